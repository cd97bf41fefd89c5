"""Several processes' libraries on one directory, each with its own budget and its own memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvstore_support import FINGERPRINT, canonical

from kvstore import memory_cache
from kvstore.library import Library
from kvstore.records.format import encode
from kvstore.settings import LibrarySettings
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.paths import path_of

SIZE = encode(canonical("n0")).size  # bytes of one record's file
OpenLibrary = Callable[..., Library]


@pytest.fixture
def library(tmp_path: Path, request: pytest.FixtureRequest) -> OpenLibrary:
    """Opens another library on the same directory; closed after the test."""

    def open_library(**fields: Any) -> Library:
        opened = Library(LibrarySettings(directory=tmp_path, **fields), FINGERPRINT)
        request.addfinalizer(lambda: opened.close(5))
        return opened

    return open_library


def put(library: Library, name: str, **fields: Any) -> None:
    library.put(canonical(name, **fields))
    assert library.flush(10)


def test_libraries_that_write_in_turn_keep_the_bound_together(library: OpenLibrary, tmp_path: Path) -> None:
    limit = 60 * SIZE
    sharing = [library(disk_bytes=limit, writers=3) for _ in range(3)]
    disk = DiskTier(tmp_path)
    for number in range(180):
        put(sharing[number % 3], f"n{number}")
        assert disk.size_bytes() <= limit
    assert disk.size_bytes() >= 0.5 * limit
    assert len(list(disk.keys("by-content/"))) == len(list(disk.keys("records/")))
    evicted = sum(one.stats().evictions for one in sharing)
    assert evicted == 180 - len(list(disk.keys("records/")))


def test_what_one_library_answers_from_memory_is_not_idle_to_the_others(
    library: OpenLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_cache, "_ANNOUNCE_SECONDS", 0.0)
    reader, wanted, idle = library(), canonical("wanted"), canonical("idle")
    for record in (wanted, idle):
        put(reader, {wanted.key: "wanted", idle.key: "idle"}[record.key])
        os.utime(tmp_path / path_of(record), (0, 0))
    assert reader.get_canonical(wanted.key, "acme") is not None
    assert reader.stats().memory_hits == 1
    reader._loads[0].shutdown(wait=True)  # what it had to tell is told
    writer = library(disk_bytes=5 * SIZE, writers=1)
    for number in range(3):
        put(writer, f"n{number}")
    kept = {Path(key).stem for key in DiskTier(tmp_path).keys("records/")}
    assert wanted.key in kept
    assert idle.key not in kept


def test_a_chunk_in_use_survives_its_eviction_by_another_process(library: OpenLibrary, tmp_path: Path) -> None:
    record = canonical("in use", recompute_seconds=0.0001)
    put(library(), "in use", recompute_seconds=0.0001)
    reader = library(memory_bytes=0)
    held = reader.get_canonical(record.key, "acme")
    assert held is not None
    os.utime(tmp_path / path_of(record), (0, 0))
    writer = library(disk_bytes=3 * SIZE, writers=1)
    for number in range(6):
        put(writer, f"n{number}", recompute_seconds=100.0)
    assert not (tmp_path / path_of(record)).exists()
    assert torch.equal(held.kv, record.kv)
    assert reader.get_canonical(record.key, "acme") is None
    assert reader.stats().corrupt == 0


def test_each_tenant_has_its_share_on_a_shared_disk(library: OpenLibrary, tmp_path: Path) -> None:
    sharing = [library(disk_bytes=1000 * SIZE, tenant_bytes=5 * SIZE) for _ in range(2)]
    put(sharing[0], "quiet", tenant="quiet")
    for number in range(30):
        put(sharing[number % 2], f"n{number}", tenant="greedy")
    kept = [Path(key).stem for key in DiskTier(tmp_path).keys("records/")]
    assert canonical("quiet", tenant="quiet").key in kept
    assert len(kept) <= 1 + 5
