"""Bounds of memory and tiers, in all and per tenant, and what leaves first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import ExitStack

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_support import FINGERPRINT, SIZE, MakeLibrary, canonical, stored

from kvstore.library import Library
from kvstore.memory_cache import MemoryCache
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Entry, Tier
from kvstore.tiers.eviction import Candidate, TierBudget, delete_records, worth
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import path_of


def test_memory_is_bounded_and_keeps_what_was_used_last(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier(), memory_bytes=3 * SIZE)
    records = [canonical(name) for name in "abcdef"]
    for record in records:
        library.put(record)
        assert library.stats().bytes <= 3 * SIZE
    assert library.stats().evictions >= 3
    library.flush()
    assert library.get_canonical(records[-1].key, "acme") is records[-1]
    assert library.get_canonical(records[0].key, "acme") is not records[0]  # from the tier again


def test_pinned_records_stay_in_memory(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier(), memory_bytes=2 * SIZE)
    pinned = canonical("pinned")
    library.put(pinned)
    with library.pin([pinned.key]), library.pin([pinned.key]):
        for name in "abcdef":
            library.put(canonical(name))
        library.flush()
        assert library.get_canonical(pinned.key, "acme") is pinned
        assert library.stats().bytes <= 2 * SIZE
    for name in "ghi":
        library.put(canonical(name))
    library.flush()
    assert library.get_canonical(pinned.key, "acme") is not pinned


def test_pins_are_let_go_when_the_block_fails(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier())
    with pytest.raises(RuntimeError), library.pin(["a"]):
        raise RuntimeError
    assert not library._is_pinned("a")


def test_a_key_is_pinned_until_its_last_pin_is_let_go(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier())
    with library.pin(["shared", "a"]), library.pin(["b"]):
        with library.pin(["shared", "shared"]):
            pass
        assert all(library._is_pinned(key) for key in ("shared", "a", "b"))
    assert not any(library._is_pinned(key) for key in ("shared", "a", "b"))
    assert not library._pins


def test_a_finalizer_may_let_go_of_pins_in_a_thread_that_holds_the_librarys_locks(make_library: MakeLibrary) -> None:
    class Plan:
        """Owns a pin."""

    library, plans, pins = make_library(MemoryTier()), [Plan()], ExitStack()
    pins.enter_context(library.pin(["a"]))
    weakref.finalize(plans[0], pins.close)
    assert library._is_pinned("a")

    def drop() -> None:
        with library._lock, library._hot._lock, library._pins._lock:
            plans.clear()

    dropping = threading.Thread(target=drop, daemon=True)
    dropping.start()
    dropping.join(5)
    assert not dropping.is_alive()
    assert not library._is_pinned("a")


def test_a_record_larger_than_memory_is_only_persisted(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier(), memory_bytes=SIZE - 1)
    library.put(canonical())
    library.flush()
    assert library.stats().bytes == 0
    assert library.get_canonical(canonical().key, "acme") is not None


def test_one_tenant_cannot_crowd_out_another(make_library: MakeLibrary) -> None:
    library = make_library(MemoryTier(), memory_bytes=6 * SIZE, tenant_memory_bytes=2 * SIZE)
    quiet = canonical("quiet", tenant="quiet")
    library.put(quiet)
    for number in range(20):
        library.put(canonical(f"n{number}", tenant="greedy"))
    assert library.get_canonical(quiet.key, "quiet") is quiet
    assert library.stats().bytes <= 3 * SIZE


@pytest.mark.parametrize("share", [None, 100])
def test_memory_evicts_once_for_a_record_that_passes_both_limits(share: int | None) -> None:
    unit = canonical(tokens=1).nbytes
    cache = MemoryCache(100 * unit, share and share * unit, lambda key: False)
    for record in (canonical("a", tokens=45), canonical("b", tokens=45)):
        assert cache.put(path_of(record), record)
    large = canonical("large", tokens=56)
    assert cache.put(path_of(large), large)
    assert (cache.nbytes, cache.evictions) == (56 * unit, 2)
    for number in range(12):  # the last one finds no room
        record = canonical(f"n{number}", tokens=4)
        assert cache.put(path_of(record), record)
    assert cache.evictions == 3, "the large one alone had to go"


def test_what_a_tenant_must_give_up_is_room_in_memory_that_no_other_tenant_pays() -> None:
    cache = MemoryCache(10 * SIZE, 5 * SIZE, lambda key: False)
    quiet = [canonical(f"q{number}", tenant="quiet") for number in range(5)]
    for record in (*quiet, *(canonical(f"g{number}", tenant="greedy") for number in range(6))):
        assert cache.put(path_of(record), record)
    assert {path_of(record) for record in quiet} <= set(cache.last_used())


def survey_one_tenant(_: Tier, entries: Iterable[Entry]) -> list[Candidate]:
    return [Candidate(entry.key, "acme", entry.size, entry.used, 0.0, pinned=False) for entry in entries]


@pytest.mark.parametrize(("there", "size", "left"), [([10] * 10, 10, 8), ([45, 45], 56, 0)])
def test_a_tier_evicts_once_for_a_record_that_passes_both_limits(there: list[int], size: int, left: int) -> None:
    tier = MemoryTier()
    for number, nbytes in enumerate(there):
        tier.put(f"records/{number}", [pa.py_buffer(bytes(nbytes))])
    budget = TierBudget(tier, 100, 100, survey_one_tenant)
    assert budget.make_room("acme", size)
    assert len(list(tier.keys())) == left


def file_size(tier_type: type[MemoryTier] = MemoryTier) -> int:
    tier = tier_type()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as library:
        library.put(canonical())
    return tier.size_bytes()


def test_a_tier_is_bounded_and_keeps_its_markers_in_step(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make_library(tier, disk_bytes=4 * size, memory_bytes=0)
    for number in range(20):
        library.put(canonical(f"n{number}"))
        library.flush()
        assert tier.size_bytes() <= 4 * size
    assert 1 <= len(stored(tier)) <= 4
    assert len(list(tier.keys("by-content/"))) == len(stored(tier))
    assert library.stats().evictions == 20 - len(stored(tier))
    assert library.get_canonical(canonical("n19").key, "acme") is not None


def test_a_tier_gives_up_what_is_cheap_to_recompute_first(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make_library(tier, disk_bytes=5 * size)
    dear = canonical("dear", recompute_seconds=100.0)
    library.put(dear)
    for number in range(20):
        library.put(canonical(f"n{number}", recompute_seconds=0.001))
        library.flush()
    assert dear.key in stored(tier)


def test_a_tier_spares_pinned_records_and_drops_the_write_instead(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make_library(tier, disk_bytes=2 * size + 100)
    records = [canonical(name) for name in "ab"]
    with library.pin([record.key for record in records]):
        for record in (*records, canonical("c")):
            library.put(record)
            library.flush()
        assert stored(tier) == {record.key for record in records}
        assert library.stats().dropped_writes == 1


def test_a_tenants_share_of_a_tier_is_bounded(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make_library(tier, disk_bytes=100 * size, tenant_bytes=3 * size)
    library.put(canonical("quiet", tenant="quiet"))
    for number in range(12):
        library.put(canonical(f"n{number}", tenant="greedy"))
        library.flush()
    assert canonical("quiet", tenant="quiet").key in stored(tier)
    assert len(stored(tier)) <= 4


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=60, max_size=150))
def test_writers_that_do_not_see_each_other_keep_the_bound_in_any_order(writes: list[tuple[int, int]]) -> None:
    tier, limit = MemoryTier(), 240
    budgets = [TierBudget(tier, limit, None, survey_one_tenant, writers=4) for _ in range(4)]
    for number, (writer, size) in enumerate(writes):
        assert budgets[writer].make_room("acme", size)
        tier.put(f"records/{number}", [pa.py_buffer(bytes(size))])
        budgets[writer].wrote("acme", size)
        assert tier.size_bytes() <= limit


def test_quarantined_records_go_before_sound_ones(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(canonical("bad"))
        writer.put(canonical("good"))
    tier.quarantine(path_of(canonical("bad")))
    library = make_library(tier, disk_bytes=tier.size_bytes() + size // 2)
    library.put(canonical("new"))
    library.flush()
    assert list(tier.keys("quarantine/")) == []
    assert stored(tier) == {canonical("good").key, canonical("new").key}


@settings(max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "remove", "pin"]), st.integers(0, 4)), max_size=60),
    limit=st.integers(0, 5),
    share=st.one_of(st.none(), st.integers(0, 5)),
)
def test_hot_cache_is_always_within_its_bounds(steps: list[tuple[str, int]], limit: int, share: int | None) -> None:
    pinned: set[str] = set()
    cache = MemoryCache(limit * SIZE, None if share is None else share * SIZE, pinned.__contains__)
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


def test_a_full_tier_has_the_price_of_what_went_last(make_library: MakeLibrary) -> None:
    size, tier = file_size(), MemoryTier()
    library = make_library(tier, disk_bytes=20 * size, memory_bytes=0)
    for number in range(20):
        library.put(canonical(f"n{number}", recompute_seconds=1.0))
        library.flush()
    assert library.price("acme") == 0, "there was room for all"
    for number in range(20, 24):
        library.put(canonical(f"n{number}", recompute_seconds=1.0))
        library.flush()
    assert 0 < library.price("acme") < 1.1 * worth(1.0, size, 0)
    for key in list(tier.keys("records/")):
        tier.delete(key)
    library.put(canonical("again"))
    library.flush()
    assert library.price("acme") == 0, "there is room again"


def test_a_tenants_own_limit_is_the_price_of_its_own_records_alone(make_library: MakeLibrary) -> None:
    size = file_size()
    library = make_library(MemoryTier(), tenant_bytes=20 * size, memory_bytes=0)
    for number in range(24):
        library.put(canonical(f"n{number}", tenant="greedy", recompute_seconds=1.0))
        library.flush()
    assert library.price("greedy") > 0
    assert library.price("quiet") == 0


def test_a_record_that_another_process_puts_back_while_it_is_evicted_keeps_its_markers() -> None:
    class Shared(MemoryTier):
        """Another process puts `back` as soon as records are deleted."""

        def delete_all(self, keys: Collection[str]) -> int:
            went = super().delete_all(keys)
            if "back" in keys:
                self.put("back", [pa.py_buffer(b"record")])
            return went

    tier = Shared()
    for key in ("back", "gone", "marker-of-back", "marker-of-gone"):
        tier.put(key, [pa.py_buffer(b"x")])
    assert delete_records(tier, {"back": ["marker-of-back"], "gone": ["marker-of-gone"]}) == 2
    assert set(tier.keys()) == {"back", "marker-of-back"}
