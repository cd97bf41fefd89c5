"""Damaged files under a real prefill worker: computed again, stored again, and the answer is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rig import Rig

from kvstore.library import Library
from kvstore.records.format import encode
from kvstore.records.record import CanonicalRecord, PatchRecord, Record, RecordKind
from kvstore.settings import LibrarySettings
from kvstore.tiers.paths import path_of
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.protocol import NonFiniteLogits

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " and then say what follows."]


def test_corrupted_files_are_computed_and_stored_again(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path
) -> None:
    def restarted() -> Rig:
        return make_rig(library=Library(LibrarySettings(directory=tmp_path), fp32.fingerprint))

    first = restarted()
    first.link(PAGES)
    healthy = first.link(PAGES)
    assert healthy.points == ["patched", "patched"]
    first.close()

    files = list((tmp_path / "records").rglob("*.arrow"))
    rng = random.Random(1)
    for file in files:
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    second = restarted()
    damaged = second.link(PAGES)
    assert damaged.points == ["encoded", "encoded"]
    torch.testing.assert_close(damaged.logprobs, healthy.logprobs, rtol=0, atol=1e-4)
    stats = second.library.stats()
    assert stats.corrupt == stats.quarantined > 0
    second.close()

    third = restarted()
    healed = third.link(PAGES)
    assert healed.points == ["patched", "patched"]
    torch.testing.assert_close(healed.logprobs, healthy.logprobs, rtol=0, atol=1e-4)
    assert third.library.stats().corrupt == 0


@pytest.mark.parametrize("kind", ["canonical", "patch"])
def test_nan_in_a_sound_record_is_quarantined_and_never_becomes_a_token(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path, kind: RecordKind
) -> None:
    def restarted() -> Rig:
        return make_rig(library=Library(LibrarySettings(directory=tmp_path), fp32.fingerprint))

    first = restarted()
    first.link(PAGES)
    healthy = first.link(PAGES)
    stored = [place for place in healthy.plan.stored if place[0] == kind]
    records = [first.library.wait(first.library.load(*place)) for place in stored]
    first.close()
    for record in records:
        assert record is not None
        (tmp_path / path_of(record)).write_bytes(encode(spoiled(record)))

    second = restarted()
    with pytest.raises(NonFiniteLogits) as error:
        second.link(PAGES)
    assert set(stored) <= set(error.value.stored)
    second.linker.quarantine(error.value.stored)
    again = second.link(PAGES)
    assert again.points == ["recomputed", "recomputed"]
    torch.testing.assert_close(again.logprobs, healthy.logprobs, rtol=0, atol=1e-4)
    assert second.library.stats().quarantined == len(error.value.stored)
    second.settle()
    second.wait_until_free()


def spoiled(record: Record) -> Record:
    """The record with one NaN, under a checksum that fits."""
    if isinstance(record, PatchRecord):
        (first, *others) = record.patch.segments
        scale = first.scale.clone()
        scale[0] = torch.nan
        segments = (replace(first, scale=scale), *others)
        return replace(record, patch=replace(record.patch, segments=segments))
    assert isinstance(record, CanonicalRecord)
    kv = record.kv.clone()
    kv[0, 0, 0] = torch.nan
    return replace(record, kv=kv)
