"""Stored KV on its way to a device, by a device that counts what would make the host wait."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.operator.device_kernel import Descriptor, Placement
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.patch import compose, form_patch
from kvstore.operator.rotary import RotaryScheme
from prefill_workers.engine.copy_stream import PinnedRing
from prefill_workers.engine.device_cache import DeviceCache
from prefill_workers.engine.device_writer import DeviceWriter
from tests.counting_device import CountingDevice

LAYOUT = Layout.gqa(3, 2, 16, RotaryScheme.from_base(16))


@pytest.fixture
def device() -> Iterator[CountingDevice]:
    with CountingDevice() as device:
        yield device


def pages(layout: Layout) -> PageTable:
    """Of 16 blocks of 16 tokens, heads first."""
    heads, width = layout.segments[0].heads, layout.segments[0].width
    segment, head, column = torch.cartesian_prod(*map(torch.arange, (2, heads, width))).unbind(1)
    elements = (head * 16 + torch.arange(16)[:, None]) * 2 * width + segment * width + column
    table = PageTable.of([torch.zeros(16, heads, 16, 2 * width) for _ in range(layout.layers)], elements, layout)
    assert table is not None
    return table


def numbers_at(address: int, count: int) -> Tensor:
    """Memory at an address, fp32, as a kernel would read it."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, 4 * count)), dtype=torch.float32)


class Kernel:
    """Stands for the kernel: notes the KV that each launch would read."""

    def __init__(self, device: CountingDevice) -> None:
        self.device = device
        self.launches: list[list[Tensor]] = []

    def __call__(
        self, descriptor: Descriptor, words: Tensor, pages: PageTable, layout: Layout, dtype: torch.dtype
    ) -> None:
        assert self.device.holds(words)
        words = torch.from_numpy(words.numpy().copy())
        assert words.equal(descriptor.words)
        chunks = int(words[descriptor.work : descriptor.slots : 2].max()) + 1
        found = []
        for row in words[: 29 * chunks].view(chunks, 29).tolist():
            address, by_layer, by_token, _, tokens, *_ = row
            assert (by_layer, by_token) == (tokens * layout.features, layout.features)
            found.append(numbers_at(address, layout.layers * by_layer).view(layout.layers, tokens, -1))
        self.launches.append(found)


def writer_on(
    device: CountingDevice, ring_bytes: int = 1 << 20, **options: int
) -> tuple[DeviceWriter, Kernel, DeviceCache[Any]]:
    kernel, cache = Kernel(device), DeviceCache[Any](1 << 20)
    ring = PinnedRing(device.stream, ring_bytes)
    return DeviceWriter(pages(LAYOUT), LAYOUT, torch.float32, ring, cache, kernel, **options), kernel, cache


def stored(sizes: Sequence[int]) -> list[Placement]:
    """Chunks as records hold them: layers apart, some with patches of every kind of factor."""
    chunks, slot = [], 0
    for number, tokens in enumerate(sizes):
        kv = torch.randn(LAYOUT.layers, tokens + 1, LAYOUT.features)[:, 1:]
        patch = None
        if number % 3:
            parts = [form_patch(torch.randn(kv.shape), LAYOUT, 3, dtype=torch.int8) for _ in range(2)]
            patch = parts[0] if number % 3 == 1 else compose(parts, 0.5)
        at = torch.arange(slot, slot + tokens)
        chunks.append(Placement(kv, patch, 7 * number, at, kv_lasts=True, patch_lasts=True))
        slot += tokens
    return chunks


def test_a_link_is_one_launch_without_a_pageable_copy_or_a_wait_for_the_kernel(device: CountingDevice) -> None:
    writer, kernel, _ = writer_on(device)
    chunks = stored([5, 9, 3, 17])
    writer.write(chunks)
    assert len(kernel.launches) == 1
    assert all(torch.equal(found, chunk.kv) for found, chunk in zip(kernel.launches[0], chunks, strict=True))
    assert (device.pageable, device.waits) == (0, 0)


def test_a_link_of_much_kv_is_several_launches_of_bounded_memory(device: CountingDevice) -> None:
    writer, kernel, _ = writer_on(device, at_once=20 * LAYOUT.bytes_per_token(torch.float32))
    chunks = stored([9, 9, 40, 3])
    writer.write(chunks)
    assert [len(launch) for launch in kernel.launches] == [2, 1, 1]
    found = [kv for launch in kernel.launches for kv in launch]
    assert all(torch.equal(kv, chunk.kv) for kv, chunk in zip(found, chunks, strict=True))
    assert (device.pageable, device.waits) == (0, 0)


def test_what_is_larger_than_the_ring_waits_for_its_blocks_alone(device: CountingDevice) -> None:
    writer, kernel, _ = writer_on(device, 16 << 10)
    chunks = stored([90, 70, 33])
    writer.write(chunks)
    assert len(kernel.launches) == 1
    assert all(torch.equal(found, chunk.kv) for found, chunk in zip(kernel.launches[0], chunks, strict=True))
    assert device.pageable == 0
    assert 0 < device.waits < device.copies


def test_a_chunk_that_stays_on_the_device_is_not_copied_again(device: CountingDevice) -> None:
    writer, kernel, cache = writer_on(device)
    chunks = stored([5, 9, 3])
    writer.write(chunks)
    before = device.copies
    writer.write(chunks)
    assert device.copies == before + 1, "the descriptor alone"
    assert cache.hits == 5  # three times KV, two patches
    assert all(torch.equal(a, b) for a, b in zip(*kernel.launches, strict=True))


def test_what_no_later_link_brings_again_leaves_the_copies_of_records_alone(device: CountingDevice) -> None:
    writer, kernel, cache = writer_on(device)
    records = stored([5, 9, 3])
    writer.write(records)
    cache.limit_bytes = kept = cache.nbytes
    passing = [chunk._replace(kv_lasts=False, patch_lasts=False) for chunk in stored([7, 9, 3])]
    bound = records[1]._replace(patch=passing[1].patch, patch_lasts=False)
    writer.write([*passing, bound])
    assert torch.equal(kernel.launches[1][0], passing[0].kv)
    assert cache.nbytes == kept
    assert all(cache.holds(part) for one in records for part in (one.kv, one.patch) if part is not None)


def test_a_copy_that_stays_holds_no_memory_of_those_that_leave(device: CountingDevice) -> None:
    writer, _, cache = writer_on(device)
    chunks = stored([5, 9, 3])
    writer.write(chunks)
    copies = [cache.get(part) for chunk in chunks for part in (chunk.kv, chunk.patch) if part is not None]
    storages = {copy.untyped_storage().data_ptr() for copy in copies if isinstance(copy, Tensor)}
    assert len(storages) == 3


def test_the_same_chunk_twice_in_a_prompt_is_sent_once(device: CountingDevice) -> None:
    writer, kernel, cache = writer_on(device)
    (chunk,) = stored([9])
    writer.write([chunk, chunk._replace(delta=50)])
    assert cache.nbytes == chunk.kv.nbytes
    assert all(torch.equal(found, chunk.kv) for found in kernel.launches[0])


def test_one_layer_is_written_by_itself(device: CountingDevice) -> None:
    writer, kernel, cache = writer_on(device)
    chunks = stored([5, 9])
    for layer in range(LAYOUT.layers):
        of_layer = [
            chunk._replace(kv=chunk.kv[layer : layer + 1], patch=chunk.patch and chunk.patch.of_layer(layer))
            for chunk in chunks
        ]
        writer.write_layer(layer, of_layer)
    assert all(
        torch.equal(found, chunk.kv[layer : layer + 1])
        for layer, launch in enumerate(kernel.launches)
        for found, chunk in zip(launch, chunks, strict=True)
    )
    assert (device.pageable, device.waits, cache.nbytes) == (0, 0, 0)
    writer.write_layer(0, [])
    assert len(kernel.launches) == LAYOUT.layers


def test_a_pageable_copy_and_a_read_are_counted(device: CountingDevice) -> None:
    """Else the tests above could not fail."""
    there = device.stream.empty(16)
    there.copy_(torch.ones(16, dtype=torch.uint8))
    assert device.pageable == 1
    assert int((there + there).sum()) == 32
    assert device.waits == 1


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=1, max_size=3),
            st.sampled_from((torch.int8, torch.float16, torch.float32, torch.int64)),
        ),
        max_size=8,
    )
)
@settings(max_examples=40)
def test_tensors_of_any_shape_come_through_a_small_ring_and_back(shapes: list[tuple[list[int], torch.dtype]]) -> None:
    with CountingDevice() as device:
        ring = PinnedRing(device.stream, 4 * 768)
        sent = [torch.randint(-99, 99, shape).to(dtype) for shape, dtype in shapes]
        found = ring.send([tensor.transpose(0, -1) for tensor in sent])
        assert all(map(device.holds, (tensor for tensor in found if tensor.numel())))
        back = [ring.fetch(tensor) for tensor in found]
        assert device.pageable == 0
    assert all(torch.equal(a.transpose(0, -1), b) for a, b in zip(sent, back, strict=True))


class Original:
    """Record in host memory that a device copy belongs to."""


def test_a_copy_ends_with_its_original() -> None:
    cache = DeviceCache[str](100)
    kept, dropped = Original(), Original()
    cache.put(kept, "kept", 40)
    cache.put(dropped, "dropped", 40)
    del dropped
    gc.collect()
    assert cache.get(kept) == "kept"
    assert cache.nbytes == 40


def test_a_copy_ends_with_its_original_where_nobody_asks_for_another() -> None:
    cache, kept, dropped = DeviceCache[str](100), Original(), Original()
    cache.put(kept, "kept", 40)
    cache.put(dropped, "dropped", 40)
    before = cache.version
    del dropped
    gc.collect()
    cache.drop_ended()
    assert (cache.nbytes, cache.holds(kept)) == (40, True)
    assert cache.version > before


def test_what_is_used_least_leaves_first_and_what_never_fits_is_not_kept() -> None:
    cache = DeviceCache[str](100)
    often, once, new = Original(), Original(), Original()
    cache.put(often, "often", 50)
    cache.put(once, "once", 50)
    for _ in range(3):
        cache.get(often)
    assert not cache.put(new, "new", 101)
    assert cache.put(new, "new", 50)
    assert (cache.get(often), cache.get(once), cache.get(new)) == ("often", None, "new")
    assert cache.nbytes == 100


def test_a_device_without_memory_costs_no_block_of_the_ring(
    device: CountingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, enough = PinnedRing(device.stream, 4 * 768), device.stream.empty

    def scarce(nbytes: int) -> Tensor:
        if nbytes > 512:
            raise torch.OutOfMemoryError("injected")
        return enough(nbytes)

    monkeypatch.setattr(device.stream, "empty", scarce)
    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError):
            ring.send_groups([[torch.ones(8)], [torch.ones(1000)]])
    (copy,) = ring.send([torch.ones(8)])
    assert torch.equal(copy, torch.ones(8))
