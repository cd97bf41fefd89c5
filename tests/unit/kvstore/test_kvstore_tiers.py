"""Every tier passes the conformance suite; below it, what each does on its own."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from pathlib import Path

import pytest
from tier_conformance import TierConformance, buffers

from kvstore.errors import BlobReplaced, TierUnavailable
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faults import FaultyTier, HeldTier, SlowTier
from kvstore.tiers.fsspec import FsspecTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.stack import tier_for_url


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier()


class TestDiskTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DiskTier(tmp_path / "tier")

    def test_what_was_read_holds_no_descriptor(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"x" * 10_000))
        before = len(os.listdir("/proc/self/fd"))
        held = [tier.get("k") for _ in range(50)]
        assert len(os.listdir("/proc/self/fd")) == before
        assert {bytes(buffer or b"") for buffer in held} == {b"x" * 10_000}

    def test_a_file_is_read_through_in_chunks(self, tmp_path: Path) -> None:
        tier, content = DiskTier(tmp_path), os.urandom(1_300_000)
        tier.put("k", buffers(content))
        blob = tier.open("k")
        assert blob is not None
        assert blob.read is not None
        chunks = [bytes(chunk) for chunk in blob.read(5, 1_299_999)]
        assert len(chunks) > 1
        assert b"".join(chunks) == content[5:1_299_999]
        assert bytes(blob.buffer)[5:1_299_999] == content[5:1_299_999]

    @pytest.mark.parametrize("size", [0, 5_000, 20_000])
    def test_a_file_that_changes_in_place_changes_nothing_that_was_read(self, tmp_path: Path, size: int) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"x" * 10_000))
        held = tier.get("k")
        with (tmp_path / "k").open("r+b") as file:
            file.write(b"y" * size)
            file.truncate(size)
        assert held is not None
        assert bytes(held) == b"x" * 10_000

    def test_a_file_that_is_cut_short_while_it_is_read_is_replaced(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path)
        tier.put("k", buffers(b"x" * 10_000))
        blob = tier.open("k")
        os.truncate(tmp_path / "k", 5_000)
        assert blob is not None
        assert blob.read is not None
        with pytest.raises(BlobReplaced):
            list(blob.read(0, 10_000))

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

    def test_a_durable_tier_syncs_the_file_before_its_name_and_the_folders_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[str] = []
        real_sync, real_rename = os.fsync, os.rename

        def sync(descriptor: int) -> None:
            steps.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)) or "/")
            real_sync(descriptor)

        def rename(source: Path, target: Path) -> None:
            steps.append("rename")
            real_rename(source, target)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "rename", rename)
        DiskTier(tmp_path, durable=True).put("a/b", buffers(b"x"))
        assert steps[0].startswith("/.partial/")
        assert steps[1:] == ["rename", "/a", "/"]
        steps.clear()
        DiskTier(tmp_path, durable=False).put("a/b", buffers(b"x"))
        assert steps == ["rename"]

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

    def test_a_folder_that_refuses_to_be_looked_into_is_unavailable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path) -> bool:
            raise OSError(errno.ESTALE, "Stale file handle")

        tier = DiskTier(tmp_path)
        monkeypatch.setattr(Path, "is_file", refuse)
        with pytest.raises(TierUnavailable, match=r"cannot look up a/b: .*Stale"):
            tier.contains("a/b")

    def test_an_unusable_root_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a folder")
        with pytest.raises(TierUnavailable):
            DiskTier(tmp_path / "file")


class TestFsspecTier(TierConformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return FsspecTier(f"memory://{uuid.uuid4().hex}/prefix")

    def test_two_prefixes_do_not_see_each_other(self) -> None:
        root = uuid.uuid4().hex
        one, two = FsspecTier(f"memory://{root}/one"), FsspecTier(f"memory://{root}/two")
        one.put("k", buffers(b"1"))
        assert two.get("k") is None
        assert list(two.keys()) == []

    def test_keys_are_looked_up_beside_one_another(self, tier: FsspecTier, monkeypatch: pytest.MonkeyPatch) -> None:
        tier.put("k", buffers(b"x"))
        info, together = tier._fs.info, threading.Barrier(4)

        def slow(path: str) -> object:
            together.wait(10)
            return info(path)

        monkeypatch.setattr(tier._fs, "info", slow)
        assert tier.stored(["a", "k", "b", "c"]) == {"k"}

    def test_backend_errors_become_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = FsspecTier("memory://x")

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("the client library's own error")

        for name in ("cat_file", "pipe_file", "info", "find"):
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
    """The wrappers that other tests and benchmarks use must be tiers themselves."""

    @pytest.fixture
    def tier(self) -> Tier:
        return SlowTier(HeldTier(FaultyTier(MemoryTier())), bytes_per_s=1e12)


def test_a_faulty_tier_fails_as_told_and_recovers() -> None:
    tier = FaultyTier(MemoryTier("far"), "get")
    tier.put("k", buffers(b"x"))
    with pytest.raises(TierUnavailable, match="far: get fails on purpose"):
        tier.get("k")
    tier.failing.clear()
    assert tier.get("k") is not None
    assert tier.calls == [("put", "k"), ("get", "k"), ("get", "k")]


def test_a_slow_tier_shares_its_link_and_not_its_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = 100.0, []
    monkeypatch.setattr("kvstore.tiers.faults.time.monotonic", lambda: clock)
    monkeypatch.setattr("kvstore.tiers.faults.time.sleep", waits.append)
    tier = SlowTier(MemoryTier(), latency_s=0.25, bytes_per_s=1000)
    tier.put("k", buffers(b"x" * 500))
    tier.get("k")  # the clock stands still: the link is still busy with the put
    tier.get("absent")
    assert waits == [0.5, 0.25, 0.25, 1.0, 0.25]


def test_local_urls_get_the_tier_that_writes_atomically(tmp_path: Path) -> None:
    for url in (str(tmp_path / "plain"), f"file://{tmp_path}/a%20b"):
        assert isinstance(tier_for_url(url), DiskTier)
    assert (tmp_path / "a b").is_dir()
    for name in ("exp#1", "what?", "a%20c"):  # which would mean something in a URL
        tier_for_url(str(tmp_path / name))
        assert (tmp_path / name).is_dir()
    assert isinstance(tier_for_url("memory://bucket"), FsspecTier)
