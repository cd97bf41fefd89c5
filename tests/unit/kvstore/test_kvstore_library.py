"""The library: reading, writing, tiers, damage, concurrency.

Deletion, eviction, and tiers that fail or do not answer have files of their own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from kvstore_support import FINGERPRINT, SIZE, MakeLibrary, canonical, embedding_of, patch_of, stored
from waiting import wait_for as wait_until

from kvstore.errors import InvalidKey, StoreError
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import QUARANTINE
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faults import FaultyTier, HeldTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import path_of
from kvstore.tiers.write_behind import WriteBehind

# Reading and writing


def test_a_record_is_there_at_once_and_after_a_restart(make_library: MakeLibrary) -> None:
    record = canonical()
    library = make_library()
    library.put(record)
    assert library.get_canonical(record.key, "acme") is record
    library.close()

    again = make_library()
    loaded = again.get_canonical(record.key, "acme")
    assert loaded is not None
    assert torch.equal(loaded.kv, record.kv)
    assert again.get_canonical(record.key, "acme") is loaded  # now from memory, neither read nor verified again
    stats = again.stats()
    assert (stats.tier_hits, stats.memory_hits, stats.misses, stats.loads) == (1, 1, 0, 1)
    assert stats.load_ms > 0


def test_the_three_kinds_do_not_mix(make_library: MakeLibrary) -> None:
    library, record = make_library(), canonical()
    patch, embedding = patch_of(record), embedding_of(record)
    library.put(record)
    library.put(patch)
    library.put(embedding)
    assert library.get_patch(patch.key, "acme") is patch
    assert library.get_embedding(embedding.key, "acme") is embedding
    assert library.get_patch(record.key, "acme") is None
    assert library.has("patch", patch.key, "acme")
    assert not library.has("canonical", patch.key, "acme")


def test_absent_record_is_a_counted_miss(make_library: MakeLibrary) -> None:
    library = make_library()
    assert library.get_canonical("0" * 64, "acme") is None
    assert not library.has("canonical", "0" * 64, "acme")
    assert (library.stats().misses, library.stats().hits) == (1, 0)


def test_another_tenant_sees_nothing(make_library: MakeLibrary) -> None:
    record = canonical()
    for library in (make_library(), make_library()):
        library.put(record)
        library.flush()
        assert library.get_canonical(record.key, "rival") is None
        assert not library.has("canonical", record.key, "rival")
        assert not library.delete("canonical", record.key, "rival")
        assert library.delete_content(record.content, "rival") == 0
        assert library.has("canonical", record.key, "acme")


def test_another_models_records_are_neither_taken_nor_given(make_library: MakeLibrary) -> None:
    record, other = canonical(), make_library(fingerprint="other-model@1")
    with pytest.raises(StoreError, match="fingerprint"):
        other.put(record)
    library = make_library()
    library.put(record)
    library.flush()
    assert other.get_canonical(record.key, "acme") is None


def test_malformed_keys_are_refused(make_library: MakeLibrary) -> None:
    for key in ("", "../../etc/passwd", "A" * 64, "0" * 63):
        with pytest.raises(InvalidKey):
            make_library().get_canonical(key, "acme")


def test_a_record_is_found_while_it_waits_to_be_written(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make_library(slow, memory_bytes=0)  # nothing fits in memory, so only the queue can answer
    record = canonical()
    library.put(record)
    assert slow.entered.wait(5)
    assert library.get_canonical(record.key, "acme") is record
    assert library.has("canonical", record.key, "acme")
    slow.release.set()
    assert library.flush(5)
    loaded = library.get_canonical(record.key, "acme")
    assert loaded is not None
    assert loaded is not record


def test_flush_waits_for_the_tier(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make_library(slow)
    library.put(canonical())
    assert not library.flush(0.05)
    slow.release.set()
    assert library.flush(5)
    assert stored(slow.inner) == {canonical().key}


def test_a_full_queue_drops_the_write_and_counts_it(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make_library(slow, write_queue_items=1)
    records = [canonical(name) for name in "abc"]
    library.put(records[0])
    assert slow.entered.wait(5)  # the first is being written, the second waits, the third finds no place
    library.put(records[1])
    library.put(records[2])
    assert library.stats().dropped_writes == 1
    assert library.get_canonical(records[2].key, "acme") is records[2]
    slow.release.set()
    library.flush()
    assert stored(slow.inner) == {records[0].key, records[1].key}


def test_a_record_larger_than_the_queue_is_written_where_none_waits(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make_library(slow, write_queue_bytes=1)
    records = [canonical(name) for name in "abc"]
    library.put(records[0])
    assert slow.entered.wait(5)
    library.put(records[1])
    library.put(records[2])
    assert library.stats().dropped_writes == 1
    slow.release.set()
    library.flush()
    assert stored(slow.inner) == {records[0].key, records[1].key}


def test_a_slow_tier_keeps_nothing_from_the_others(make_library: MakeLibrary) -> None:
    near, slow = MemoryTier("near"), HeldTier(MemoryTier("far"), "put")
    library = make_library(near, slow, write_queue_items=1)
    records = [canonical(name) for name in "abc"]
    for record in records:
        library.put(record)
        wait_until(lambda record=record: record.key in stored(near))
        assert slow.entered.wait(5)
    assert library.stats().dropped_writes == 1, "of the far one"
    assert not library.flush(0.05)
    slow.release.set()
    assert library.flush(5)
    assert stored(slow.inner) == {records[0].key, records[1].key}


def test_what_could_not_be_written_before_the_end_is_told(
    make_library: MakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    near, slow = MemoryTier("near"), HeldTier(MemoryTier("far"), "put")
    library = make_library(near, slow)
    for name in "abc":
        library.put(canonical(name))
    library.close(0.5)
    assert len(stored(near)) == 3
    assert [record.getMessage() for record in caplog.records] == ["far: 3 records were not persisted in time"]
    slow.release.set()


def test_putting_again_replaces(make_library: MakeLibrary) -> None:
    library = make_library()
    old, new = canonical(), canonical(kv=torch.ones_like(canonical().kv))
    library.put(old)
    library.flush()
    library.put(new)
    library.flush()
    library.close()
    loaded = make_library().get_canonical(old.key, "acme")
    assert loaded is not None
    assert torch.equal(loaded.kv, new.kv)


# Tiers


def test_a_load_reads_the_nearest_tier_and_copies_to_nearer_ones(make_library: MakeLibrary, tmp_path: Path) -> None:
    near, far, record = MemoryTier("near"), MemoryTier("far"), canonical()
    with Library(LibrarySettings(), FINGERPRINT, [far]) as writer:
        writer.put(record)
    library = make_library(near, far)
    assert library.get_canonical(record.key, "acme") is not None
    library.flush()
    assert stored(near) == {record.key}
    far_again = FaultyTier(far, "get")
    assert make_library(near, far_again).get_canonical(record.key, "acme") is not None
    assert far_again.calls == []


def test_every_tier_gets_a_copy(make_library: MakeLibrary) -> None:
    tiers = [MemoryTier("one"), MemoryTier("two")]
    library = make_library(*tiers)
    library.put(canonical())
    library.flush()
    assert [stored(tier) for tier in tiers] == [{canonical().key}] * 2
    assert library.stats().writes == 2
    assert library.stats().tier_bytes["one"] > SIZE


def test_only_what_the_farthest_tier_holds_is_persisted(make_library: MakeLibrary) -> None:
    record, near, far = canonical(), MemoryTier("near"), FaultyTier(MemoryTier("far"))
    with Library(LibrarySettings(), FINGERPRINT, [near]) as writer:
        writer.put(record)
    library = make_library(near, far, tier_failures=2, tier_cooldown_s=3600)
    assert library.has("canonical", record.key, "acme")
    assert not library.persisted("canonical", record.key, "acme")
    library.put(record)
    library.flush()
    assert library.persisted("canonical", record.key, "acme")
    assert not library.persisted("canonical", record.key, "other")
    far.failing.add("contains")
    far.calls.clear()
    assert not any(library.persisted("canonical", record.key, "acme") for _ in range(5))
    assert len(far.calls) == 2  # then it is left alone


def test_a_load_does_not_take_the_place_of_what_was_put_meanwhile(make_library: MakeLibrary) -> None:
    """That is to go to all tiers, what was loaded to the nearer ones only."""
    near, middle, far = HeldTier(MemoryTier("near"), "put"), HeldTier(MemoryTier("middle"), "get"), MemoryTier("far")
    record = canonical()
    with Library(LibrarySettings(), FINGERPRINT, [middle.inner]) as writer:
        writer.put(record)
    library = make_library(near, middle, far)
    loading = library.load("canonical", record.key, "acme")
    assert middle.entered.wait(5)
    library.put(canonical("other"))
    assert near.entered.wait(5)
    newer = replace(record, recompute_seconds=7.0)
    library.put(newer)  # waits behind the other
    assert library.load("canonical", record.key, "acme").result(0) is newer, "nobody waits for a tier that hangs"
    middle.release.set()
    assert loading.result(5) is not None
    assert library.get_canonical(record.key, "acme") is newer
    near.release.set()
    assert library.flush(5)
    assert record.key in stored(far)


def test_simultaneous_loads_share_one_read(make_library: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(record)
    slow = HeldTier(tier, "get")
    library = make_library(slow, load_timeout_s=10)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(library.get_canonical, record.key, "acme") for _ in range(8)]
        assert slow.entered.wait(5)
        slow.release.set()
        results = [future.result() for future in futures]
    assert all(result is results[0] for result in results)
    assert results[0] is not None
    assert [action for action, _ in slow.calls].count("get") == 1


# Damage


@pytest.mark.parametrize("where", ["frame", "numbers", "end"])
def test_a_damaged_record_is_moved_aside_and_counted(make_library: MakeLibrary, tmp_path: Path, where: str) -> None:
    record = canonical()
    library = make_library()
    library.put(record)
    library.close()
    path = tmp_path / "library" / path_of(record)
    content = bytearray(path.read_bytes())
    at = {"frame": 30, "numbers": bytes(content).find(record.kv[1].numpy().tobytes()), "end": len(content) - 1}[where]
    content[at] ^= 4
    path.write_bytes(content)

    again = make_library()
    assert again.get_canonical(record.key, "acme") is None
    assert again.get_canonical(record.key, "acme") is None
    stats = again.stats()
    assert (stats.corrupt, stats.quarantined, stats.misses) == (1, 1, 2)
    assert not path.exists()
    assert (tmp_path / "library" / "quarantine" / path_of(record)).exists()
    again.put(record)  # computed again: the library heals
    again.flush()
    again.close()
    assert make_library().get_canonical(record.key, "acme") is not None


def test_a_record_in_anothers_place_is_not_believed(make_library: MakeLibrary, tmp_path: Path) -> None:
    mine, theirs = canonical(tenant="acme"), canonical(tenant="rival")
    library = make_library()
    library.put(mine)
    library.close()
    root = tmp_path / "library"
    target = root / path_of(theirs)
    target.parent.mkdir(parents=True, exist_ok=True)
    (root / path_of(mine)).rename(target)
    again = make_library()
    assert again.get_canonical(theirs.key, "rival") is None
    assert again.stats().corrupt == 1


def test_a_sound_copy_further_away_replaces_a_damaged_one(make_library: MakeLibrary) -> None:
    record, near, far = canonical(), MemoryTier("near"), MemoryTier("far")
    with Library(LibrarySettings(), FINGERPRINT, [near, far]) as writer:
        writer.put(record)
    near.put(path_of(record), [pa.py_buffer(b"garbage")])
    library = make_library(near, far)
    assert library.get_canonical(record.key, "acme") is not None
    library.flush()
    assert make_library(near).get_canonical(record.key, "acme") is not None


# Concurrency


def test_many_threads_on_few_records_never_see_a_wrong_one(make_library: MakeLibrary) -> None:
    library = make_library(memory_bytes=2 * SIZE, load_timeout_s=30)
    records = {name: canonical(name) for name in "abcd"}
    failures: list[str] = []

    def work(seed: int) -> None:
        for step in range(60):
            name = "abcd"[(seed * 7 + step * 3) % 4]
            record = records[name]
            action = (seed + step) % 5
            if action == 0:
                library.put(record)
            elif action == 1 and step % 20 == 1:
                library.delete("canonical", record.key, "acme")
            else:
                with library.pin([record.key]):
                    found = library.get_canonical(record.key, "acme")
                    if found is not None and not torch.equal(found.kv, record.kv):
                        failures.append(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert failures == []
    assert library.flush(10)
    stats = library.stats()
    assert (stats.corrupt, stats.tier_errors) == (0, 0)
    assert stats.bytes <= 2 * SIZE
    assert not library._loading
    assert not library._pins


def test_a_failing_write_does_not_end_the_writer() -> None:
    written: list[str] = []

    def write(path: str, payload: int, prepared: int) -> None:
        assert prepared == -payload
        if payload < 0:
            raise ValueError(payload)
        written.append(path)

    queue: WriteBehind[int, int] = WriteBehind(int.__neg__, write, written.remove, 10, 10)
    assert queue.submit("bad", -1, 1)
    assert queue.submit("good", 1, 1)
    assert queue.flush(5)
    assert (written, queue.failures) == (["good"], 1)
    assert queue.close(5) == 0
    assert not queue.submit("late", 1, 1)


def test_closing_writes_what_is_queued(make_library: MakeLibrary) -> None:
    tier = MemoryTier()
    library = make_library(tier)
    for number in range(10):
        library.put(canonical(f"n{number}"))
    library.close()
    assert len(stored(tier)) == 10


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_not_stored(make_library: MakeLibrary, number: float) -> None:
    record, library = canonical(), make_library()
    record.kv[1, 2, 3] = number
    with pytest.raises(StoreError, match="not finite"):
        library.put(record)
    assert not library.has("canonical", record.key, "acme")


def test_a_quarantined_record_is_gone_from_memory_and_every_tier(make_library: MakeLibrary, tmp_path: Path) -> None:
    record, far = canonical(), MemoryTier()
    library = make_library(DiskTier(tmp_path / "near"), far)
    library.put(record)
    library.flush()
    library.quarantine("canonical", record.key, "acme")
    assert library.get_canonical(record.key, "acme") is None
    assert not library.has("canonical", record.key, "acme")
    assert library.stats().quarantined == 2
    assert list(far.keys(QUARANTINE)) == [QUARANTINE + path_of(record)]
    library.put(record)  # computed again
    assert library.has("canonical", record.key, "acme")


@pytest.mark.parametrize("damage", ["garbage", "zeros", "truncated"])
def test_a_file_that_is_damaged_while_its_record_is_in_use_is_never_served(
    make_library: MakeLibrary, tmp_path: Path, damage: str
) -> None:
    record = canonical(tokens=2000)
    library = make_library()
    library.put(record)
    library.close()
    reader = make_library()
    loaded = reader.get_canonical(record.key, "acme")
    (path,) = (tmp_path / "library").rglob(f"{record.key}.arrow")
    size = path.stat().st_size
    with path.open("r+b") as file:  # the same inode: what maps it would see this
        if damage == "truncated":
            file.truncate(size // 2)
        else:
            file.seek(size // 4)
            file.write((b"\xff" if damage == "garbage" else b"\0") * (size - size // 4))
    assert loaded is not None
    assert torch.equal(loaded.kv, record.kv)
    again = make_library()
    assert again.get_canonical(record.key, "acme") is None
    assert (again.stats().corrupt, again.stats().quarantined) == (1, 1)


# What routing asks


def test_what_is_in_memory_is_named_most_recently_used_first(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier())
    one, two, three = (canonical(name) for name in ("one", "two", "three"))
    assert library.hot(9) == []
    for record in (one, two, three):
        library.put(record)
    library.put(embedding_of(canonical("only embedded")))
    library.get_canonical(one.key, "acme")
    assert [record.content for record in library.hot(9)] == [one.content, three.content, two.content]
    assert [record.content for record in library.hot(1)] == [one.content]
    version = library.hot_version
    library.get_canonical(two.key, "acme")
    assert library.hot_version == version
    library.delete("canonical", two.key, "acme")
    assert library.hot_version > version
    assert [record.content for record in library.hot(9)] == [one.content, three.content]


def test_bytes_that_loads_brought_are_counted(make_library: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    library = make_library(tier)
    library.put(record)
    library.flush()
    assert library.stats().loaded_bytes == 0
    again = make_library(tier)
    again.get_canonical(record.key, "acme")
    again.get_canonical("0" * 64, "acme")
    (entry,) = tier.entries("records/")
    assert again.stats().loaded_bytes == entry.size
