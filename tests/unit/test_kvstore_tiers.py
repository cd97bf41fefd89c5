"""One conformance suite; every tier inherits it."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from kvstore_support import FaultyTier, SlowTier

from kvstore.errors import InvalidKey, TierUnavailable
from kvstore.tiers import DiskTier, FsspecTier, MemoryTier, Tier, tier_for_url


def buffers(*parts: bytes) -> list[pa.Buffer]:
    return [pa.py_buffer(part) for part in parts]


class TierConformance:
    """What `Tier` promises."""

    def make(self, tmp_path: Path) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return self.make(tmp_path)

    def test_absent_blob_is_none(self, tier: Tier) -> None:
        assert tier.get("a/b") is None
        assert not tier.contains("a/b")
        assert not tier.delete("a/b")
        assert not tier.quarantine("a/b")
        assert list(tier.keys()) == []
        assert tier.size_bytes() == 0

    def test_stored_blob_comes_back(self, tier: Tier) -> None:
        tier.put("a/b.arrow", buffers(b"hello"))
        found = tier.get("a/b.arrow")
        assert found is not None
        assert bytes(found) == b"hello"
        assert tier.contains("a/b.arrow")

    def test_buffers_are_joined_in_order(self, tier: Tier) -> None:
        tier.put("k", buffers(b"one ", b"", b"two ", b"three"))
        assert bytes(tier.get("k") or b"") == b"one two three"

    def test_large_and_empty_blobs(self, tier: Tier) -> None:
        large = os.urandom(3 << 20)
        tier.put("large", buffers(large))
        tier.put("empty", buffers(b""))
        assert bytes(tier.get("large") or b"") == large
        assert tier.get("empty") is not None
        assert tier.size_bytes() == len(large)

    def test_put_replaces(self, tier: Tier) -> None:
        tier.put("k", buffers(b"a long first version"))
        tier.put("k", buffers(b"second"))
        assert bytes(tier.get("k") or b"") == b"second"
        assert tier.size_bytes() == 6

    def test_a_buffer_outlives_replacement_and_deletion(self, tier: Tier) -> None:
        tier.put("k", buffers(b"first" * 2000))
        held = tier.get("k")
        tier.put("k", buffers(b"other" * 2000))
        tier.delete("k")
        assert held is not None
        assert bytes(held) == b"first" * 2000

    def test_deleted_blob_is_gone(self, tier: Tier) -> None:
        tier.put("d/e/f", buffers(b"x"))
        tier.put("d/e/g", buffers(b"y"))
        assert tier.delete("d/e/f")
        assert not tier.delete("d/e/f")
        assert tier.get("d/e/f") is None
        assert list(tier.keys()) == ["d/e/g"]

    def test_keys_are_listed_by_prefix(self, tier: Tier) -> None:
        for key in ("a/x1", "a/x2", "a/y", "ab/x", "b"):
            tier.put(key, buffers(b"12"))
        assert sorted(tier.keys()) == ["a/x1", "a/x2", "a/y", "ab/x", "b"]
        assert sorted(tier.keys("a/")) == ["a/x1", "a/x2", "a/y"]
        assert sorted(tier.keys("a/x")) == ["a/x1", "a/x2"]
        assert sorted(tier.keys("a")) == ["a/x1", "a/x2", "a/y", "ab/x"]
        assert list(tier.keys("c/d/e")) == []
        assert list(tier.keys("b/d")) == []
        assert tier.size_bytes("a/") == 6

    def test_entries_tell_size_and_recency(self, tier: Tier) -> None:
        tier.put("k", buffers(b"12345"))
        (entry,) = tier.entries()
        assert (entry.key, entry.size) == ("k", 5)
        assert entry.used > 1.6e9

    def test_touching_changes_nothing_but_recency(self, tier: Tier) -> None:
        tier.put("k", buffers(b"12345"))
        tier.touch("k")
        tier.touch("absent")
        assert list(tier.keys()) == ["k"]
        assert bytes(tier.get("k") or b"") == b"12345"

    def test_quarantined_blob_is_moved_aside(self, tier: Tier) -> None:
        tier.put("a/b", buffers(b"bad"))
        assert tier.quarantine("a/b")
        assert tier.get("a/b") is None
        assert bytes(tier.get("quarantine/a/b") or b"") == b"bad"

    def test_a_folder_is_not_a_blob(self, tier: Tier) -> None:
        tier.put("a/b/c", buffers(b"x"))
        assert tier.get("a/b") is None
        assert not tier.contains("a/b")
        assert not tier.delete("a/b")
        assert tier.contains("a/b/c")

    @pytest.mark.parametrize(
        "key", ["", "/", "/etc/passwd", "..", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a b", "a\x00", "é", "a\n"]
    )
    def test_keys_that_could_leave_the_tier_are_refused(self, tier: Tier, key: str) -> None:
        with pytest.raises(InvalidKey):
            tier.put(key, buffers(b"x"))
        with pytest.raises(InvalidKey):
            tier.get(key)
        with pytest.raises(InvalidKey):
            tier.delete(key)
        with pytest.raises(InvalidKey):
            tier.contains(key)

    def test_readers_see_whole_versions_only(self, tier: Tier) -> None:
        versions = [bytes([n]) * 200_000 for n in range(4)]
        tier.put("k", buffers(versions[0]))
        seen: list[bytes] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                seen.append(bytes(tier.get("k") or b"missing"))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(5):
            for version in versions:
                tier.put("k", buffers(version[:100_000], version[100_000:]))
        stop.set()
        reader.join()
        assert seen
        assert all(value in versions for value in seen)


class TestMemoryTier(TierConformance):
    def make(self, tmp_path: Path) -> Tier:
        return MemoryTier()


class TestDiskTier(TierConformance):
    def make(self, tmp_path: Path) -> Tier:
        return DiskTier(tmp_path / "tier")

    def test_reading_maps_the_file_and_holds_no_descriptor(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"x" * 10_000))
        before = len(os.listdir("/proc/self/fd"))
        held = [tier.get("k") for _ in range(50)]
        assert len(os.listdir("/proc/self/fd")) == before
        assert {bytes(buffer or b"") for buffer in held} == {b"x" * 10_000}

    def test_leftovers_of_dead_writers_are_swept_when_opened(self, tmp_path: Path) -> None:
        DiskTier(tmp_path)
        leftover = tmp_path / ".partial" / "dead"
        leftover.write_bytes(b"half a rec")
        tier = DiskTier(tmp_path)
        assert not leftover.exists()
        assert list(tier.keys()) == []

    def test_opening_does_not_sweep_a_living_writer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tier, real = DiskTier(tmp_path), os.fsync

        def open_another_then_sync(descriptor: int) -> None:
            DiskTier(tmp_path)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", open_another_then_sync)
        tier.put("k", buffers(b"whole"))
        assert bytes(tier.get("k") or b"") == b"whole"

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"old"))

        def disk_full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", disk_full)
        with pytest.raises(TierUnavailable, match="No space left"):
            tier.put("k", buffers(b"new"))
        assert bytes(tier.get("k") or b"") == b"old"
        assert list((tmp_path / ".partial").iterdir()) == []

    def test_deletion_leaves_no_folder_that_names_what_was_there(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path)
        tier.put("by/content/name", buffers(b"x"))
        tier.delete("by/content/name")
        assert [path.name for path in tmp_path.iterdir()] == [".partial"]

    def test_writers_and_deleters_of_one_folder_do_not_trip_each_other(self, tmp_path: Path) -> None:
        tiers = [DiskTier(tmp_path) for _ in range(2)]
        errors: list[BaseException] = []

        def work(tier: Tier, name: str) -> None:
            try:
                for _ in range(100):
                    tier.put(f"shared/{name}", buffers(b"x"))
                    tier.delete(f"shared/{name}")
            except TierUnavailable as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(tier, str(i))) for i, tier in enumerate(tiers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    def test_touch_makes_a_blob_recent(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"x"))
        os.utime(tmp_path / "k", (0, 0))
        tier.touch("k")
        assert next(tier.entries()).used > 1.6e9

    def test_an_unusable_root_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(TierUnavailable):
            DiskTier(tmp_path / "file")


class TestFsspecTier(TierConformance):
    def make(self, tmp_path: Path) -> Tier:
        return FsspecTier(f"memory://{uuid.uuid4().hex}/prefix")

    def test_two_prefixes_do_not_see_each_other(self) -> None:
        root = uuid.uuid4().hex
        one, two = FsspecTier(f"memory://{root}/one"), FsspecTier(f"memory://{root}/two")
        one.put("k", buffers(b"1"))
        assert two.get("k") is None
        assert list(two.keys()) == []

    def test_backend_errors_become_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = FsspecTier("memory://x")

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("the client library's own error")

        for name in ("cat_file", "pipe_file", "isfile", "find"):
            monkeypatch.setattr(tier._fs, name, broken, raising=False)
        for call in (
            lambda: tier.get("k"),
            lambda: tier.put("k", buffers(b"x")),
            lambda: tier.contains("k"),
            lambda: tier.delete("k"),
            lambda: list(tier.keys()),
        ):
            with pytest.raises(TierUnavailable, match="own error"):
                call()


class TestWrappedTier(TierConformance):
    """The wrappers that other tests use must be tiers themselves."""

    def make(self, tmp_path: Path) -> Tier:
        return SlowTier(FaultyTier(MemoryTier()))


def test_local_urls_get_the_tier_that_writes_atomically(tmp_path: Path) -> None:
    for url in (str(tmp_path / "plain"), f"file://{tmp_path}/a%20b"):
        assert isinstance(tier_for_url(url), DiskTier)
    assert (tmp_path / "a b").is_dir()
    assert isinstance(tier_for_url("memory://bucket"), FsspecTier)
