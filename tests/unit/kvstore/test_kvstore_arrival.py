"""Records that are used while they load: which layers count as there, and what becomes of a load that goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
import torch
from kvstore_support import FINGERPRINT, MakeLibrary, canonical

from kvstore.errors import BlobReplaced
from kvstore.library import Library
from kvstore.records.format import decode, encode
from kvstore.records.record import CanonicalRecord
from kvstore.records.seal import find_seal
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Blob, Tier
from kvstore.tiers.faults import WrappedTier
from kvstore.tiers.loading import Loading
from kvstore.tiers.memory import MemoryTier


class SteppedTier(WrappedTier):
    """Reads wait at the layer `stop`, until it is raised; `replaced`: then the blob is not the same any more."""

    def __init__(self, inner: Tier, stop: int) -> None:
        super().__init__(inner)
        self.stop = stop
        self.damaged = self.replaced = False
        self.moved = threading.Condition()

    def let_pass(self, layers: int) -> None:
        with self.moved:
            self.stop = layers
            self.moved.notify_all()

    def open(self, key: str) -> Blob | None:
        buffer = self.get(key)
        if buffer is None:
            return None
        seal = find_seal(buffer)
        if self.damaged:
            data = bytearray(buffer)
            data[seal.end - 1] ^= 1
            buffer = pa.py_buffer(bytes(data))

        def read(start: int, end: int) -> Iterator[memoryview]:
            with self.moved:
                assert self.moved.wait_for(lambda: end <= seal.first + self.stop * seal.stride, 20)
            if self.replaced and start > seal.first:
                raise BlobReplaced("injected")
            yield memoryview(buffer)[start:end]

        return Blob(buffer, read)


def test_all_that_a_record_is_made_of_is_waited_for() -> None:
    """Bytes between layers as well: they are part of the frame, which is looked at as a whole."""
    record = canonical(tokens=4001)  # larger than what is read of a file to see what it is
    whole = memoryview(encode(record))
    filled = bytearray(len(whole))
    seal = find_seal(pa.py_buffer(whole))
    assert seal.stride > seal.size

    def read(start: int, end: int) -> Iterator[memoryview]:
        filled[start:end] = whole[start:end]
        yield memoryview(filled)[start:end]

    expected = {"expect_key": record.key, "expect_fingerprint": FINGERPRINT, "expect_tenant": record.tenant}
    decode(pa.py_buffer(filled), **expected, read=read)
    assert bytes(filled) == bytes(whole)


@pytest.fixture
def record() -> CanonicalRecord:
    return canonical(tokens=4000)  # a layer is larger than what is read of a file to see what it is


@pytest.fixture
def stored(record: CanonicalRecord) -> MemoryTier:
    tier = MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(record)
    return tier


def begin(library: Library, record: CanonicalRecord) -> Loading:
    return library.load("canonical", record.key, record.tenant)


def soon() -> float:
    return time.monotonic() + 10


def arriving(loading: Loading) -> CanonicalRecord:
    """The record that comes in, once its first layer is there."""
    deadline = soon()
    while loading.record is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert isinstance(loading.record, CanonicalRecord)
    return loading.record


def test_layers_are_there_one_after_the_other(
    make_library: MakeLibrary, stored: MemoryTier, record: CanonicalRecord
) -> None:
    tier = SteppedTier(stored, stop=1)
    loading = begin(make_library(tier), record)
    partial, layers = arriving(loading), record.layout.layers
    assert torch.equal(partial.kv[0], record.kv[0])
    assert not loading.wait_for_layer(partial, 1, time.monotonic() + 0.02)
    tier.let_pass(2)
    assert loading.wait_for_layer(partial, 1, soon())
    assert torch.equal(partial.kv[1], record.kv[1])
    assert not loading.done()
    tier.let_pass(layers + 1)
    assert loading.result(10) is partial
    assert loading.wait_for_layer(partial, layers - 1, 0.0)
    assert torch.equal(partial.kv, record.kv)


def test_of_a_damaged_record_the_sound_layers_came_for_nothing(
    make_library: MakeLibrary, stored: MemoryTier, record: CanonicalRecord
) -> None:
    tier = SteppedTier(stored, stop=1)
    tier.damaged = True
    library = make_library(tier)
    loading = begin(library, record)
    partial, layers = arriving(loading), record.layout.layers
    tier.let_pass(layers + 1)
    assert not loading.wait_for_layer(partial, layers - 1, soon())
    assert loading.result(10) is None
    assert loading.record is None
    assert not loading.wait_for_layer(partial, 0, soon())
    assert library.stats().quarantined == 1


def test_after_a_damaged_record_a_sound_one_of_a_farther_tier_is_another(
    make_library: MakeLibrary, stored: MemoryTier, record: CanonicalRecord
) -> None:
    near, far = SteppedTier(_copy(stored), stop=1), SteppedTier(stored, stop=record.layout.layers + 1)
    near.damaged = True
    loading = begin(make_library(near, far), record)
    partial = arriving(loading)
    near.let_pass(record.layout.layers + 1)
    found = loading.result(10)
    assert isinstance(found, CanonicalRecord)
    assert found is not partial
    assert torch.equal(found.kv, record.kv)
    assert not loading.wait_for_layer(partial, 0, soon())


def _copy(tier: MemoryTier) -> MemoryTier:
    copy = MemoryTier("near")
    for key in list(tier.keys()):
        copy.put(key, [tier.get(key) or pa.py_buffer(b"")])
    return copy


def test_a_record_written_anew_while_it_is_read_is_read_as_a_whole(
    make_library: MakeLibrary, stored: MemoryTier, record: CanonicalRecord
) -> None:
    tier = SteppedTier(stored, stop=record.layout.layers + 1)
    tier.replaced = True
    library = make_library(tier)
    found = begin(library, record).result(10)
    assert isinstance(found, CanonicalRecord)
    assert torch.equal(found.kv, record.kv)
    assert library.stats().tier_errors == 0


def test_what_is_left_of_a_load_is_told_by_what_has_come(record: CanonicalRecord) -> None:
    loading = Loading("path")
    assert loading.seconds_left == 0.0
    time.sleep(0.01)
    for layers in (1, 2):
        loading.arrived(record, layers, 4)
        arrival = loading.arrival
        assert arrival is not None
        assert arrival.seconds >= 0.01
        assert loading.seconds_left == pytest.approx((4 - layers) / layers * arrival.seconds)
    loading.set_result(record)
    assert loading.seconds_left == 0.0
