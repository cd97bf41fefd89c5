"""Damaged files under a real prefill worker: computed again, stored again, and the answer is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rig import Rig

from kvstore.library import Library
from kvstore.settings import LibrarySettings
from prefill_workers.engine.engine import PrefillEngine

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
