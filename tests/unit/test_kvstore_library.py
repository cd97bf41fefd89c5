from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_support import FINGERPRINT, canonical, embedding_of, patch_of

from kvstore.errors import InvalidKey, StoreError, TierUnavailable
from kvstore.eviction import HotCache, worth
from kvstore.format import CanonicalRecord, Record
from kvstore.library import Library
from kvstore.paths import path_of
from kvstore.settings import LibrarySettings
from kvstore.tier_faults import FaultyTier, HeldTier
from kvstore.tiers import DiskTier, MemoryTier, Tier
from kvstore.write_behind import WriteBehind

SIZE = canonical().nbytes  # bytes of one test record in memory
MakeLibrary = Callable[..., Library]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> MakeLibrary:
    """Opens a library on `tiers` (default: a disk) and closes it after the test."""

    def open_library(*tiers: Tier, fingerprint: str = FINGERPRINT, **fields: Any) -> Library:
        chosen = LibrarySettings(directory=tmp_path / "library", **fields)
        library = Library(chosen, fingerprint, tiers or None)
        request.addfinalizer(lambda: library.close(5))
        return library

    return open_library


def stored(tier: Tier) -> set[str]:
    """Keys of the sound records in a tier."""
    return {key.rpartition("/")[2].removesuffix(".arrow") for key in tier.keys("records/")}


# Reading and writing


def test_a_record_is_there_at_once_and_after_a_restart(make: MakeLibrary) -> None:
    record = canonical()
    library = make()
    library.put_canonical(record)
    assert library.get_canonical(record.key, "acme") is record
    library.close()

    again = make()
    loaded = again.get_canonical(record.key, "acme")
    assert loaded is not None
    assert torch.equal(loaded.kv, record.kv)
    assert again.get_canonical(record.key, "acme") is loaded  # now from memory, neither read nor verified again
    stats = again.stats()
    assert (stats.tier_hits, stats.memory_hits, stats.misses, stats.loads) == (1, 1, 0, 1)
    assert stats.load_ms > 0


def test_the_three_kinds_do_not_mix(make: MakeLibrary) -> None:
    library, record = make(), canonical()
    patch, embedding = patch_of(record), embedding_of(record)
    library.put_canonical(record)
    library.put_patch(patch)
    library.put_embedding(embedding)
    assert library.get_patch(patch.key, "acme") is patch
    assert library.get_embedding(embedding.key, "acme") is embedding
    assert library.get_patch(record.key, "acme") is None
    assert library.has("patch", patch.key, "acme")
    assert not library.has("canonical", patch.key, "acme")


def test_absent_record_is_a_counted_miss(make: MakeLibrary) -> None:
    library = make()
    assert library.get_canonical("0" * 64, "acme") is None
    assert not library.has("canonical", "0" * 64, "acme")
    assert (library.stats().misses, library.stats().hits) == (1, 0)


def test_another_tenant_sees_nothing(make: MakeLibrary) -> None:
    record = canonical()
    for library in (make(), make()):
        library.put_canonical(record)
        library.flush()
        assert library.get_canonical(record.key, "rival") is None
        assert not library.has("canonical", record.key, "rival")
        assert not library.delete("canonical", record.key, "rival")
        assert library.delete_content(record.content, "rival") == 0
        assert library.has("canonical", record.key, "acme")


def test_another_models_records_are_neither_taken_nor_given(make: MakeLibrary) -> None:
    record, other = canonical(), make(fingerprint="other-model@1")
    with pytest.raises(StoreError, match="fingerprint"):
        other.put_canonical(record)
    library = make()
    library.put_canonical(record)
    library.flush()
    assert other.get_canonical(record.key, "acme") is None


def test_malformed_keys_are_refused(make: MakeLibrary) -> None:
    for key in ("", "../../etc/passwd", "A" * 64, "0" * 63):
        with pytest.raises(InvalidKey):
            make().get_canonical(key, "acme")


def test_a_record_is_found_while_it_waits_to_be_written(make: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make(slow, memory_bytes=0)  # nothing fits in memory, so only the queue can answer
    record = canonical()
    library.put_canonical(record)
    assert slow.entered.wait(5)
    assert library.get_canonical(record.key, "acme") is record
    assert library.has("canonical", record.key, "acme")
    slow.release.set()
    assert library.flush(5)
    loaded = library.get_canonical(record.key, "acme")
    assert loaded is not None
    assert loaded is not record


def test_flush_waits_for_the_tier(make: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make(slow)
    library.put_canonical(canonical())
    assert not library.flush(0.05)
    slow.release.set()
    assert library.flush(5)
    assert stored(slow.inner) == {canonical().key}


def test_a_full_queue_drops_the_write_and_counts_it(make: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make(slow, write_queue_items=1)
    records = [canonical(name) for name in "abc"]
    library.put_canonical(records[0])
    assert slow.entered.wait(5)  # the first is being written, the second waits, the third finds no place
    library.put_canonical(records[1])
    library.put_canonical(records[2])
    assert library.stats().dropped_writes == 1
    assert library.get_canonical(records[2].key, "acme") is records[2]
    slow.release.set()
    library.flush()
    assert stored(slow.inner) == {records[0].key, records[1].key}


def test_putting_again_replaces(make: MakeLibrary) -> None:
    library = make()
    old, new = canonical(), canonical(kv=torch.ones_like(canonical().kv))
    library.put_canonical(old)
    library.flush()
    library.put_canonical(new)
    library.flush()
    library.close()
    loaded = make().get_canonical(old.key, "acme")
    assert loaded is not None
    assert torch.equal(loaded.kv, new.kv)


# Tiers


def test_a_load_reads_the_nearest_tier_and_copies_to_nearer_ones(make: MakeLibrary, tmp_path: Path) -> None:
    near, far, record = MemoryTier("near"), MemoryTier("far"), canonical()
    with Library(LibrarySettings(), FINGERPRINT, [far]) as writer:
        writer.put_canonical(record)
    library = make(near, far)
    assert library.get_canonical(record.key, "acme") is not None
    library.flush()
    assert stored(near) == {record.key}
    far_again = FaultyTier(far, "get")
    assert make(near, far_again).get_canonical(record.key, "acme") is not None
    assert far_again.calls == []


def test_every_tier_gets_a_copy(make: MakeLibrary) -> None:
    tiers = [MemoryTier("one"), MemoryTier("two")]
    library = make(*tiers)
    library.put_canonical(canonical())
    library.flush()
    assert [stored(tier) for tier in tiers] == [{canonical().key}] * 2
    assert library.stats().writes == 2
    assert library.stats().tier_bytes["one"] > SIZE


def test_only_what_the_farthest_tier_holds_is_persisted(make: MakeLibrary) -> None:
    record, near, far = canonical(), MemoryTier("near"), FaultyTier(MemoryTier("far"))
    with Library(LibrarySettings(), FINGERPRINT, [near]) as writer:
        writer.put_canonical(record)
    library = make(near, far, tier_failures=2, tier_cooldown_s=3600)
    assert library.has("canonical", record.key, "acme")
    assert not library.persisted("canonical", record.key, "acme")
    library.put_canonical(record)
    library.flush()
    assert library.persisted("canonical", record.key, "acme")
    assert not library.persisted("canonical", record.key, "other")
    far.failing.add("contains")
    far.calls.clear()
    assert not any(library.persisted("canonical", record.key, "acme") for _ in range(5))
    assert len(far.calls) == 2  # then it is left alone


def test_a_failing_tier_costs_a_miss_and_the_next_one_answers(make: MakeLibrary) -> None:
    record, sound = canonical(), MemoryTier("sound")
    with Library(LibrarySettings(), FINGERPRINT, [sound]) as writer:
        writer.put_canonical(record)
    broken = FaultyTier(MemoryTier("broken"), "get", "put", "contains", "entries", "delete")
    assert make(broken).get_canonical(record.key, "acme") is None
    assert not make(broken).has("canonical", record.key, "acme")
    library = make(broken, sound)
    assert library.get_canonical(record.key, "acme") is not None
    assert library.has("canonical", record.key, "acme")
    library.flush()
    assert library.stats().tier_errors >= 1
    assert library.stats().dropped_writes == 1  # the copy to the nearer, broken tier


def test_a_tier_that_keeps_failing_is_left_alone_for_a_while(make: MakeLibrary) -> None:
    broken = FaultyTier(MemoryTier(), "get")
    library = make(broken, tier_failures=2, tier_cooldown_s=3600)
    for name in "abcdef":
        assert library.get_canonical(canonical(name).key, "acme") is None
    assert len(broken.calls) == 2


def test_a_tier_that_recovers_is_used_again(make: MakeLibrary) -> None:
    record = canonical()
    flaky = FaultyTier(MemoryTier(), "get")
    library = make(flaky, memory_bytes=0, tier_failures=1, tier_cooldown_s=0.001)
    library.put_canonical(record)
    library.flush()
    assert library.get_canonical(record.key, "acme") is None
    flaky.failing.clear()
    threading.Event().wait(0.05)
    assert library.get_canonical(record.key, "acme") is not None


def test_a_slow_load_is_a_miss_now_and_a_hit_later(make: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put_canonical(record)
    slow = HeldTier(tier, "get")
    library = make(slow, load_timeout_s=0.05)
    assert library.get_canonical(record.key, "acme") is None
    assert library.stats().timeouts == 1
    pending = library.load("canonical", record.key, "acme")
    slow.release.set()
    assert pending.result(5) is not None
    assert library.get_canonical(record.key, "acme") is pending.result()


def test_a_tier_that_keeps_dawdling_is_left_alone_for_a_while(make: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "get")
    library = make(slow, load_timeout_s=0.02, tier_failures=2, tier_cooldown_s=3600)
    for name in "abcdef":
        assert library.get_canonical(canonical(name).key, "acme") is None
    assert len(slow.calls) == 2
    assert library.stats().timeouts == 2
    slow.release.set()


def test_simultaneous_loads_share_one_read(make: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put_canonical(record)
    slow = HeldTier(tier, "get")
    library = make(slow, load_timeout_s=10)
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
def test_a_damaged_record_is_moved_aside_and_counted(make: MakeLibrary, tmp_path: Path, where: str) -> None:
    record = canonical()
    library = make()
    library.put_canonical(record)
    library.close()
    path = tmp_path / "library" / path_of(record)
    content = bytearray(path.read_bytes())
    at = {"frame": 30, "numbers": bytes(content).find(record.kv[1].numpy().tobytes()), "end": len(content) - 1}[where]
    content[at] ^= 4
    path.write_bytes(content)

    again = make()
    assert again.get_canonical(record.key, "acme") is None
    assert again.get_canonical(record.key, "acme") is None
    stats = again.stats()
    assert (stats.corrupt, stats.quarantined, stats.misses) == (1, 1, 2)
    assert not path.exists()
    assert (tmp_path / "library" / "quarantine" / path_of(record)).exists()
    again.put_canonical(record)  # computed again: the library heals
    again.flush()
    again.close()
    assert make().get_canonical(record.key, "acme") is not None


def test_a_record_in_anothers_place_is_not_believed(make: MakeLibrary, tmp_path: Path) -> None:
    mine, theirs = canonical(tenant="acme"), canonical(tenant="rival")
    library = make()
    library.put_canonical(mine)
    library.close()
    root = tmp_path / "library"
    target = root / path_of(theirs)
    target.parent.mkdir(parents=True, exist_ok=True)
    (root / path_of(mine)).rename(target)
    again = make()
    assert again.get_canonical(theirs.key, "rival") is None
    assert again.stats().corrupt == 1


def test_a_sound_copy_further_away_replaces_a_damaged_one(make: MakeLibrary) -> None:
    record, near, far = canonical(), MemoryTier("near"), MemoryTier("far")
    with Library(LibrarySettings(), FINGERPRINT, [near, far]) as writer:
        writer.put_canonical(record)
    near.put(path_of(record), [pa.py_buffer(b"garbage")])
    library = make(near, far)
    assert library.get_canonical(record.key, "acme") is not None
    library.flush()
    assert make(near).get_canonical(record.key, "acme") is not None


# Deleting


def test_a_deleted_record_is_gone_everywhere(make: MakeLibrary) -> None:
    tiers, record = [MemoryTier("one"), MemoryTier("two")], canonical()
    library = make(*tiers)
    library.put_canonical(record)
    library.flush()
    assert library.delete("canonical", record.key, "acme")
    assert not library.delete("canonical", record.key, "acme")
    assert library.get_canonical(record.key, "acme") is None
    assert [stored(tier) for tier in tiers] == [set(), set()]


def test_deleting_overtakes_a_write_under_way(make: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "put")
    library = make(slow)
    being_written, waiting = canonical("a"), canonical("b")
    library.put_canonical(being_written)
    assert slow.entered.wait(5)
    library.put_canonical(waiting)
    for record in (being_written, waiting):
        assert library.delete("canonical", record.key, "acme")
        assert library.get_canonical(record.key, "acme") is None
    slow.release.set()
    library.flush()
    assert stored(slow.inner) == set()


def test_deleting_overtakes_a_load_under_way(make: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put_canonical(record)
    held = threading.Event()

    class HoldsWhatItRead(HeldTier):
        def get(self, key: str) -> pa.Buffer | None:
            buffer = self.inner.get(key)
            self.entered.set()
            held.wait(10)
            return buffer

    slow = HoldsWhatItRead(tier)
    library = make(slow, load_timeout_s=5)
    loading = library.load("canonical", record.key, "acme")
    assert slow.entered.wait(5)
    assert library.delete("canonical", record.key, "acme")
    held.set()
    wait_for([loading], 5)
    assert library.get_canonical(record.key, "acme") is None
    library.flush()
    assert stored(tier) == set()


def test_deleting_content_takes_all_that_derives_from_it(make: MakeLibrary, tmp_path: Path) -> None:
    page, other = canonical("page"), canonical("other")
    of_page = [page, patch_of(page), embedding_of(page), patch_of(other, [page.content])]
    kept: list[Record] = [other, patch_of(other), canonical("page", tenant="rival")]
    library = make(DiskTier(tmp_path / "one"), MemoryTier("two"))
    for record in (*of_page, *kept):
        library._put(record)
    library.flush()
    assert library.delete_content(page.content, "acme") == len(of_page)
    for tier in (DiskTier(tmp_path / "one"), library._stack.tiers[1]):
        assert stored(tier) == {record.key for record in kept}
        assert not [entry.key for entry in tier.entries() if page.content in entry.key]
    assert library.get_canonical(page.key, "acme") is None
    assert library.get_canonical(other.key, "acme") is other
    assert library.delete_content(page.content, "acme") == 0


def test_deleting_content_reaches_what_another_process_stored_and_what_is_still_queued(make: MakeLibrary) -> None:
    tier = HeldTier(MemoryTier())
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put_canonical(canonical("page"))
        writer.put_patch(patch_of(canonical("other"), ["some page", canonical("page").content]))
    with Library(LibrarySettings(), "another-model", [tier]) as writer:
        writer.put_canonical(canonical("page", fingerprint="another-model"))
    library = make(tier)
    tier.held = {"put"}
    library.put_patch(patch_of(canonical("page")))
    assert library.delete_content(canonical("page").content, "acme") == 4
    tier.release.set()
    library.flush()
    assert list(tier.keys("records/")) == []


def test_what_a_request_under_way_derives_from_deleted_content_is_not_kept(make: MakeLibrary) -> None:
    page, other, tier = canonical("page"), canonical("other"), MemoryTier()
    library = make(tier)
    library.delete_content(page.content, "acme")
    for late in (page, patch_of(other, [page.content]), embedding_of(page)):
        library._put(late)
    for kept in (other, canonical("page", tenant="rival")):
        library._put(kept)
    library.flush()
    assert stored(tier) == {other.key, canonical("page", tenant="rival").key}
    assert library.get_canonical(page.key, "acme") is None
    again = make(tier, deletion_grace_s=0)
    again.delete_content(page.content, "acme")
    again.put_canonical(page)
    assert again.get_canonical(page.key, "acme") is page


def test_deleting_tells_when_a_tier_could_not_be_reached(make: MakeLibrary) -> None:
    record, tier = canonical(), FaultyTier(MemoryTier("far"))
    near = MemoryTier("near")
    library = make(near, tier)
    library.put_canonical(record)
    library.flush()
    tier.failing = {"delete"}
    with pytest.raises(TierUnavailable):
        library.delete("canonical", record.key, "acme")
    assert stored(near) == set()
    tier.failing = {"entries"}
    with pytest.raises(TierUnavailable):
        library.delete_content(record.content, "acme")


# Bounds


def test_memory_is_bounded_and_keeps_what_was_used_last(make: MakeLibrary) -> None:
    library = make(MemoryTier(), memory_bytes=3 * SIZE)
    records = [canonical(name) for name in "abcdef"]
    for record in records:
        library.put_canonical(record)
        assert library.stats().bytes <= 3 * SIZE
    assert library.stats().evictions >= 3
    library.flush()
    assert library.get_canonical(records[-1].key, "acme") is records[-1]
    assert library.get_canonical(records[0].key, "acme") is not records[0]  # from the tier again


def test_pinned_records_stay_in_memory(make: MakeLibrary) -> None:
    library = make(MemoryTier(), memory_bytes=2 * SIZE)
    pinned = canonical("pinned")
    library.put_canonical(pinned)
    with library.pin([pinned.key]), library.pin([pinned.key]):
        for name in "abcdef":
            library.put_canonical(canonical(name))
        library.flush()
        assert library.get_canonical(pinned.key, "acme") is pinned
        assert library.stats().bytes <= 2 * SIZE
    for name in "ghi":
        library.put_canonical(canonical(name))
    library.flush()
    assert library.get_canonical(pinned.key, "acme") is not pinned


def test_pins_are_let_go_when_the_block_fails(make: MakeLibrary) -> None:
    library = make(MemoryTier())
    with pytest.raises(RuntimeError), library.pin(["a"]):
        raise RuntimeError
    assert not library._is_pinned("a")


def test_a_record_larger_than_memory_is_only_persisted(make: MakeLibrary) -> None:
    library = make(MemoryTier(), memory_bytes=SIZE - 1)
    library.put_canonical(canonical())
    library.flush()
    assert library.stats().bytes == 0
    assert library.get_canonical(canonical().key, "acme") is not None


def test_one_tenant_cannot_crowd_out_another(make: MakeLibrary) -> None:
    library = make(MemoryTier(), memory_bytes=6 * SIZE, tenant_memory_bytes=2 * SIZE)
    quiet = canonical("quiet", tenant="quiet")
    library.put_canonical(quiet)
    for number in range(20):
        library.put_canonical(canonical(f"n{number}", tenant="greedy"))
    assert library.get_canonical(quiet.key, "quiet") is quiet
    assert library.stats().bytes <= 3 * SIZE


def records_on(tier: Tier) -> int:
    return len(list(tier.keys("records/")))


def file_size(tier_type: type[MemoryTier] = MemoryTier) -> int:
    tier = tier_type()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as library:
        library.put_canonical(canonical())
    return tier.size_bytes()


def test_a_tier_is_bounded_and_keeps_its_markers_in_step(make: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make(tier, disk_bytes=4 * size, memory_bytes=0)
    for number in range(20):
        library.put_canonical(canonical(f"n{number}"))
        library.flush()
        assert tier.size_bytes() <= 4 * size + 500  # the newest record's marker is not counted beforehand
    assert 1 <= records_on(tier) <= 4
    assert len(list(tier.keys("by-content/"))) == records_on(tier)
    assert library.stats().evictions == 20 - records_on(tier)
    assert library.get_canonical(canonical("n19").key, "acme") is not None


def test_a_tier_gives_up_what_is_cheap_to_recompute_first(make: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make(tier, disk_bytes=5 * size)
    dear = canonical("dear", recompute_seconds=100.0)
    library.put_canonical(dear)
    for number in range(20):
        library.put_canonical(canonical(f"n{number}", recompute_seconds=0.001))
        library.flush()
    assert dear.key in stored(tier)


def test_a_tier_spares_pinned_records_and_drops_the_write_instead(make: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make(tier, disk_bytes=2 * size + 100)
    records = [canonical(name) for name in "ab"]
    with library.pin([record.key for record in records]):
        for record in (*records, canonical("c")):
            library.put_canonical(record)
            library.flush()
        assert stored(tier) == {record.key for record in records}
        assert library.stats().dropped_writes == 1


def test_a_tenants_share_of_a_tier_is_bounded(make: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make(tier, disk_bytes=100 * size, tenant_bytes=3 * size)
    library.put_canonical(canonical("quiet", tenant="quiet"))
    for number in range(12):
        library.put_canonical(canonical(f"n{number}", tenant="greedy"))
        library.flush()
    assert canonical("quiet", tenant="quiet").key in stored(tier)
    assert records_on(tier) <= 4


def test_quarantined_records_go_before_sound_ones(make: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put_canonical(canonical("bad"))
        writer.put_canonical(canonical("good"))
    tier.quarantine(path_of(canonical("bad")))
    library = make(tier, disk_bytes=tier.size_bytes() + size // 2)
    library.put_canonical(canonical("new"))
    library.flush()
    assert list(tier.keys("quarantine/")) == []
    assert stored(tier) == {canonical("good").key, canonical("new").key}


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "remove", "pin"]), st.integers(0, 9)), max_size=60),
    limit=st.integers(0, 5),
    share=st.one_of(st.none(), st.integers(0, 5)),
)
def test_hot_cache_is_always_within_its_bounds(steps: list[tuple[str, int]], limit: int, share: int | None) -> None:
    pinned: set[str] = set()
    cache = HotCache(limit * SIZE, None if share is None else share * SIZE, pinned.__contains__)
    for action, number in steps:
        record = canonical(f"n{number}", tenant=f"t{number % 2}")
        path = path_of(record)
        if action == "put":
            held = {p for p in cache.last_used() if cache.get(p) is not None and p.rpartition("/")[2][:64] in pinned}
            cache.put(path, record)
            assert held - {path} <= set(cache.last_used())
        elif action == "get":
            cache.get(path)
        elif action == "remove":
            cache.remove(path)
            assert cache.get(path) is None
        elif cache.get(path) is not None:
            pinned.add(record.key)
        assert cache.nbytes == len(cache.last_used()) * SIZE <= limit * SIZE
        for tenant in ("t0", "t1"):
            own = cache.matching(lambda r, tenant=tenant: r.tenant == tenant)  # type: ignore[misc]
            assert share is None or len(own) <= share


def test_worth_weighs_cost_size_and_idleness() -> None:
    assert worth(2.0, 100, 10) > worth(1.0, 100, 10)
    assert worth(1.0, 100, 10) > worth(1.0, 200, 10)
    assert worth(1.0, 100, 10) > worth(1.0, 100, 20)
    assert worth(0.0, 100, 10) == worth(0.0, 5000, 10)  # unknown cost: taken as proportional to size


# Concurrency


def test_many_threads_on_few_records_never_see_a_wrong_one(make: MakeLibrary) -> None:
    library = make(memory_bytes=2 * SIZE, load_timeout_s=30)
    records = {name: canonical(name) for name in "abcd"}
    failures: list[str] = []

    def work(seed: int) -> None:
        for step in range(60):
            name = "abcd"[(seed * 7 + step * 3) % 4]
            record = records[name]
            action = (seed + step) % 5
            if action == 0:
                library.put_canonical(record)
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
    assert queue.close(5)
    assert not queue.submit("late", 1, 1)


def test_closing_writes_what_is_queued(make: MakeLibrary) -> None:
    tier = MemoryTier()
    library = make(tier)
    for number in range(10):
        library.put_canonical(canonical(f"n{number}"))
    library.close()
    assert records_on(tier) == 10


def test_records_come_back_mapped_not_copied(make: MakeLibrary) -> None:
    record = canonical(tokens=2000)
    library = make()
    library.put_canonical(record)
    library.close()
    loaded = make().get_canonical(record.key, "acme")
    assert isinstance(loaded, CanonicalRecord)
    place, mapped = loaded.kv.data_ptr(), Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in mapped if line.endswith(f"{record.key}.arrow")]
    assert any(int(start, 16) <= place < int(end, 16) for start, end in spans)
