"""The keeper's sweep of sessions: what nobody asked for goes, what forks share stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvstore_support import FINGERPRINT, GQA, canonical, random_kv, segment_patch_of

from kvstore.library import Library
from kvstore.records.keys import session_key
from kvstore.records.record import SegmentRecord, SessionRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Lifetime
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.memory import MemoryTier
from prefill_workers.sessions.manifest import KeptKV, KeptSegment, Session
from prefill_workers.sessions.sweep import Swept, sweep

HOUR, NOW, ROOM = 3600.0, 1e9, 1 << 30


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(LibrarySettings(), FINGERPRINT, [DiskTier(tmp_path)]) as library:
        yield library


def key(name: str) -> str:
    return name.encode().hex().ljust(64, "0")


def put(
    library: Library, id: str, names: str, idle: float = 0.0, tenant: str = "acme", patch: KeptKV | None = None
) -> None:
    """A session of segments, a letter each; all were used last `idle` seconds ago. `patch`: of the first."""
    segments = []
    for i, name in enumerate(names):
        record = SegmentRecord(
            key=key(name), fingerprint=FINGERPRINT, tenant=tenant, content="", layout=GQA, kv=random_kv(GQA, 2), at=i
        )
        library.put(record)
        segments.append(KeptSegment(name, 2, conditioned=KeptKV(key(name), (), True, 1)))
    segments[0] = replace(segments[0], mended=patch)
    session = Session(id, tenant, NOW - idle, NOW - idle, tuple(segments))
    library.put(
        SessionRecord(
            key=session_key(FINGERPRINT, id, "float32"), fingerprint=FINGERPRINT, tenant=tenant, content="",
            manifest=session.to_json(),
        )
    )  # fmt: skip
    library.flush()


def age(root: Path, seconds: float) -> None:
    """Let all files have been used so long ago."""
    for file in root.rglob("*.arrow"):
        os.utime(file, (NOW - seconds, NOW - seconds))


def left(library: Library, *names: str, tenant: str = "acme") -> str:
    return "".join(name for name in names if library.has("segment", key(name), tenant))


def has_session(library: Library, id: str) -> bool:
    return library.has("session", session_key(FINGERPRINT, id, "float32"), "acme")


def test_idle_sessions_go_with_what_no_other_needs(library: Library, tmp_path: Path):
    put(library, "old", "ab", idle=HOUR + 1)
    put(library, "fork", "ac")
    age(tmp_path, HOUR + 1)
    swept = sweep(library, HOUR, ROOM, NOW)
    assert (swept.sessions, swept.segments) == (1, 1)
    assert not has_session(library, "old")
    assert has_session(library, "fork")
    assert left(library, *"abc") == "ac"
    assert sweep(library, HOUR, ROOM, NOW) == Swept()


def test_a_patch_stays_as_long_as_its_session(library: Library, tmp_path: Path):
    patch = segment_patch_of(canonical(), key("patch"))
    library.put(patch)
    put(library, "s", "A", patch=KeptKV(key("A"), (), False, 1, patch.key, 1))
    age(tmp_path, 2 * HOUR)
    sweep(library, HOUR, ROOM, NOW)
    assert library.has("segment", patch.key, "acme")
    sweep(library, HOUR, ROOM, NOW + 2 * HOUR)
    assert not library.has("segment", patch.key, "acme")


def test_segments_that_no_session_names_go_once_they_are_idle(library: Library, tmp_path: Path):
    put(library, "s", "ab")
    library.delete("session", session_key(FINGERPRINT, "s", "float32"), "acme")
    age(tmp_path, HOUR - 1)
    assert sweep(library, HOUR, ROOM, NOW) == Swept(), "their session may be about to be written"
    age(tmp_path, HOUR + 1)
    assert sweep(library, HOUR, ROOM, NOW).segments == 2


def test_beyond_the_bytes_the_longest_idle_sessions_go(library: Library, tmp_path: Path):
    for i, names in enumerate(("ab", "bc", "de")):
        put(library, names, names, idle=300.0 - 100 * i)
    age(tmp_path, 0)
    size = sum(entry.size for entry in library.listed("segment")) // 5
    assert sweep(library, HOUR, 4 * size, NOW).sessions == 1
    assert left(library, *"abcde") == "bcde", "what two sessions share stays with the second"
    assert sweep(library, HOUR, 2 * size, NOW).nbytes == 2 * size
    assert left(library, *"abcde") == "de"


def test_a_manifest_that_cannot_be_read_goes(library: Library):
    library.put(SessionRecord(key=key("m"), fingerprint=FINGERPRINT, tenant="acme", content="", manifest=b"{}"))
    library.flush()
    assert sweep(library, HOUR, ROOM, NOW).sessions == 1


def test_a_session_that_another_node_goes_on_with_stays(tmp_path: Path):
    shared = MemoryTier("store")
    shared.lifetime = Lifetime.STORE

    def node(name: str) -> Library:
        return Library(LibrarySettings(), FINGERPRINT, [DiskTier(tmp_path / name), shared])

    with node("one") as one, node("two") as two:
        put(one, "agent", "ab", idle=HOUR + 1)
        put(two, "agent", "bc")
        assert sweep(one, HOUR, ROOM, NOW).sessions == 0
    with node("three") as other:
        assert has_session(other, "agent")
