"""The library over tiers that fail, are slow, or do not answer: what is missed, who waits, who is left alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import pyarrow as pa
import pytest
from kvstore_support import FINGERPRINT, SIZE, HoldsWhatItRead, MakeLibrary, canonical

from kvstore.errors import TierUnavailable
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers.eviction import delete_records
from kvstore.tiers.faults import FaultyTier, HeldTier, SlowTier
from kvstore.tiers.health import Breaker
from kvstore.tiers.loading import Loading
from kvstore.tiers.memory import MemoryTier


def test_a_failing_tier_costs_a_miss_and_the_next_one_answers(make_library: MakeLibrary) -> None:
    record, sound = canonical(), MemoryTier("sound")
    with Library(LibrarySettings(), FINGERPRINT, [sound]) as writer:
        writer.put(record)
    broken = FaultyTier(MemoryTier("broken"), "get", "put", "contains", "entries", "delete")
    assert make_library(broken).get_canonical(record.key, "acme") is None
    assert not make_library(broken).has("canonical", record.key, "acme")
    library = make_library(broken, sound)
    assert library.get_canonical(record.key, "acme") is not None
    assert library.has("canonical", record.key, "acme")
    library.flush()
    assert library.stats().tier_errors >= 1
    assert library.stats().dropped_writes == 1  # the copy to the nearer, broken tier


def test_a_tier_that_keeps_failing_is_left_alone_for_a_while(make_library: MakeLibrary) -> None:
    broken = FaultyTier(MemoryTier(), "get")
    library = make_library(broken, tier_failures=2, tier_cooldown_s=3600)
    for name in "abcdef":
        assert library.get_canonical(canonical(name).key, "acme") is None
    assert len(broken.calls) == 2


def test_a_full_tier_still_gives_what_it_holds(make_library: MakeLibrary) -> None:
    record, full = canonical("held"), FaultyTier(MemoryTier(), "put")
    with Library(LibrarySettings(), FINGERPRINT, [full.inner]) as writer:
        writer.put(record)
    library = make_library(full, memory_bytes=0, tier_failures=2, tier_cooldown_s=3600)
    for name in "abcdef":
        library.put(canonical(name))
    library.flush()
    assert [action for action, _ in full.calls].count("put") == 2, "it is left alone with writes"
    assert library.stats().dropped_writes == 6
    assert library.get_canonical(record.key, "acme") is not None
    assert library.has("canonical", record.key, "acme")


def test_a_tier_that_recovers_is_used_again(make_library: MakeLibrary) -> None:
    record = canonical()
    flaky = FaultyTier(MemoryTier(), "get")
    library = make_library(flaky, memory_bytes=0, tier_failures=1, tier_cooldown_s=0.001)
    library.put(record)
    library.flush()
    assert library.get_canonical(record.key, "acme") is None
    flaky.failing.clear()
    threading.Event().wait(0.05)
    assert library.get_canonical(record.key, "acme") is not None


def test_a_slow_load_is_a_miss_now_and_a_hit_later(make_library: MakeLibrary) -> None:
    record, tier = canonical(), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        writer.put(record)
    slow = HeldTier(tier, "get")
    library = make_library(slow, load_timeout_s=0.05)
    assert library.get_canonical(record.key, "acme") is None
    assert library.stats().timeouts == 1
    pending = library.load("canonical", record.key, "acme")
    slow.release.set()
    assert pending.result(5) is not None
    assert library.get_canonical(record.key, "acme") is pending.result()


def test_a_tier_that_keeps_dawdling_is_left_alone_for_a_while(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "get")
    library = make_library(slow, load_timeout_s=0.02, tier_failures=2, tier_cooldown_s=3600)
    for name in "abcdef":
        assert library.get_canonical(canonical(name).key, "acme") is None
    assert len(slow.calls) == 2
    assert library.stats().timeouts == 2
    slow.release.set()


def test_a_tier_that_does_not_tell_what_it_holds_is_left_alone_for_a_while(make_library: MakeLibrary) -> None:
    silent = HeldTier(MemoryTier(), "contains")
    library = make_library(silent, load_timeout_s=0.02, tier_failures=2, tier_cooldown_s=3600)
    keys = [canonical(name).key for name in "abcdef"]
    assert not any(library.has("canonical", key, "acme") for key in keys)
    assert len(silent.calls) < len(keys)
    assert not library.stored("canonical", [(key, "acme") for key in keys]), "who waits without a limit neither"
    assert library.stats().tier_errors >= 2
    silent.release.set()


def test_nobody_joins_a_load_that_is_stuck_in_a_tier_that_is_left_alone(make_library: MakeLibrary) -> None:
    record, stuck, far = canonical(), HeldTier(MemoryTier(), "get"), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [far]) as writer:
        writer.put(record)
    library = make_library(stuck, far, load_timeout_s=0.5, load_threads=1, tier_failures=1, tier_cooldown_s=3600)
    queued = canonical("queued").key
    loads = [library.load("canonical", key, "acme") for key in (record.key, queued)]
    assert stuck.entered.wait(5)
    assert library.wait(loads[0]) is None, "from now on the tier is left alone"
    assert library.get_canonical(record.key, "acme") is not None, "from the tier behind it"
    assert library.get_canonical(queued, "acme") is None
    assert library.stats().timeouts == 1, "what waits for its turn there is not waited for either"
    stuck.release.set()
    wait_for(loads, 5)
    assert loads[0].result() is not None, "who waited all the time has it too"
    assert [action for action, _ in stuck.calls].count("get") == 1, "nor is it asked for what had waited"


def test_a_read_that_somebody_gave_up_on_is_not_waited_for_while_it_goes_on(make_library: MakeLibrary) -> None:
    record, slow = canonical(), HeldTier(MemoryTier(), "get")
    with Library(LibrarySettings(), FINGERPRINT, [slow.inner]) as writer:
        writer.put(record)
    library = make_library(slow, load_timeout_s=0.5, load_threads=2, tier_failures=2)
    assert library.get_canonical(record.key, "acme") is None
    loading, began = library.load("canonical", record.key, "acme"), time.monotonic()
    assert library.wait(loading) is None
    assert time.monotonic() - began < 0.3
    stats = library.stats()
    assert (stats.timeouts, stats.tier_errors) == (2, 1), "the tier is to blame once"
    slow.release.set()
    assert loading.result(5) is not None
    assert library.wait(loading) is not None


def test_all_who_wait_for_one_read_blame_the_tier_once(make_library: MakeLibrary) -> None:
    slow = HeldTier(MemoryTier(), "get")
    library = make_library(slow, load_timeout_s=0.3, tier_failures=2, tier_cooldown_s=3600)
    loading = library.load("canonical", canonical().key, "acme")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(library.wait, [loading] * 4)) == [None] * 4
    stats = library.stats()
    assert (stats.timeouts, stats.tier_errors) == (4, 1)
    slow.release.set()


def test_a_tier_is_not_blamed_for_a_load_that_waited_for_its_turn(make_library: MakeLibrary) -> None:
    slow = SlowTier(MemoryTier(), latency_s=0.3)
    library = make_library(slow, load_timeout_s=1, load_threads=1, tier_failures=1)
    loads = [library.load("canonical", canonical(name).key, "acme") for name in "abcdef"]
    until = time.monotonic() + 1  # in the middle of the fourth read, which has not had half of its time
    assert [library.wait(loading, until) for loading in loads] == [None] * 6
    assert library.stats().timeouts > 0
    assert library.stats().tier_errors == 0
    wait_for(loads, 5)


class Throttled(MemoryTier):
    """Does not tell whether it has the keys named in `silent`."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()

    def contains(self, key: str) -> bool:
        if any(name in key for name in self.silent):
            raise TierUnavailable("SlowDown")
        return super().contains(key)


def test_a_look_up_that_fails_in_part_is_not_certain_and_a_failure(make_library: MakeLibrary) -> None:
    throttled = Throttled()
    library = make_library(throttled, tier_failures=2, tier_cooldown_s=3600)
    told, silent = canonical("a"), canonical("b")
    for record in (told, silent):
        library.put(record)
    library.flush()
    throttled.silent.add(silent.key)
    asking = make_library(throttled, tier_failures=2, tier_cooldown_s=3600)
    places = [(record.key, "acme") for record in (silent, told)]
    assert asking.look_up("canonical", places) == ({(told.key, "acme")}, False)
    assert asking.stats().tier_errors == 1
    assert asking.look_up("canonical", places) == ({(told.key, "acme")}, False)
    throttled.silent.clear()
    assert asking.look_up("canonical", places) == (set(), False), "it is left alone"


def test_markers_stay_of_a_record_that_may_be_there() -> None:
    tier = Throttled()
    for key in ("gone", "back", "gone-marker", "back-marker"):
        tier.put(key, [pa.py_buffer(b"x")])
    tier.silent.add("back")
    with pytest.raises(TierUnavailable, match="SlowDown"):
        delete_records(tier, {"gone": ["gone-marker"], "back": ["back-marker"]})
    assert sorted(tier.keys()) == ["back-marker", "gone-marker"]


def test_all_that_is_waited_for_until_a_time_is_given_up_then(make_library: MakeLibrary) -> None:
    silent = HeldTier(MemoryTier(), "get")
    library = make_library(silent, load_timeout_s=10, load_threads=4, tier_failures=9)
    loads = [library.load("canonical", canonical(name).key, "acme") for name in "abc"]
    until = time.monotonic() + 0.3
    assert [library.wait(loading, until) for loading in loads] == [None] * 3
    assert time.monotonic() < until + 0.5
    silent.release.set()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_load_that_was_passed_by_still_warms_memory_unless_its_record_was_deleted(
    make_library: MakeLibrary, deleted: bool
) -> None:
    record, stuck = canonical(), HoldsWhatItRead(MemoryTier())
    with Library(LibrarySettings(), FINGERPRINT, [stuck.inner]) as writer:
        writer.put(record)
    library = make_library(stuck, load_timeout_s=0.2, tier_failures=1, tier_cooldown_s=3600)
    loading = library.load("canonical", record.key, "acme")
    assert stuck.entered.wait(5)
    assert library.wait(loading) is None
    assert library.get_canonical(record.key, "acme") is None, "nobody else has it"
    if deleted:
        library.delete("canonical", record.key, "acme")
    stuck.release.set()
    assert loading.result(5) is not None, "who waited has it"
    assert library.is_resident("canonical", record.key, "acme") is not deleted
    assert not library._loading


def test_a_tier_in_which_all_threads_hang_is_left_alone_until_one_comes_back(make_library: MakeLibrary) -> None:
    records, hung, far = [canonical(name) for name in "abc"], HeldTier(MemoryTier(), "get"), MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [far]) as writer:
        for record in records:
            writer.put(record)
    settings = {"load_timeout_s": 0.3, "load_threads": 1, "tier_failures": 1, "tier_cooldown_s": 0.05}
    library = make_library(hung, far, **settings)
    loading = library.load("canonical", records[0].key, "acme")
    assert hung.entered.wait(5)
    assert library.wait(loading) is None
    for record in records[1:]:
        time.sleep(0.1)  # the tier would be tried again, had it a thread left
        assert library.get_canonical(record.key, "acme") is not None
    assert library.stats().timeouts == 1
    hung.release.set()
    assert loading.result(5) is not None
    with Library(LibrarySettings(), FINGERPRINT, [hung.inner]) as writer:
        writer.put(other := canonical("d"))
    assert library.get_canonical(other.key, "acme") is not None, "it is asked again"


def test_a_read_that_ends_as_somebody_gives_up_is_nobodys_fault() -> None:
    loading = Loading("path")
    assert loading.give_up() is None, "it has not begun"
    loading.queue(0)
    assert loading.give_up() is None, "nor has its read"
    assert loading.begin() == 0
    assert loading.give_up(60) is None, "it has hardly begun"
    assert loading.give_up() == (0, True)
    assert loading.give_up() == (0, False), "by another"
    assert loading.end()
    loading.queue(1)
    assert loading.give_up() is None
    assert loading.begin() == 1
    assert not loading.is_late
    assert not loading.end()
    assert loading.give_up() is None


def test_a_silent_tier_holds_some_of_those_who_ask_and_no_more(
    make_library: MakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.stack._MOST_QUESTIONS", 2)
    silent = HeldTier(MemoryTier(), "contains")
    library = make_library(silent, load_timeout_s=1, tier_failures=100)
    places = [(canonical(name).key, "acme") for name in "abcdef"]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(library.look_up, "canonical", [place]) for place in places]
        done, asking = wait_for(answers, 3)
        assert len(asking) == 2, "the others gave up"
        assert {answer.result()[1] for answer in done} == {False}, "and know that they do not know"
        began = time.monotonic()
        assert library.look_up("canonical", places) == (set(), False)
        assert time.monotonic() - began < 0.8, "all places are taken by questions that are late"
        assert len(silent.calls) == 2
        assert library.stats().tier_errors == 2
        silent.release.set()
        assert {answer.result(5)[1] for answer in asking} == {True}
    assert library.look_up("canonical", places) == (set(), True), "there is room again"


def test_a_tier_that_failed_is_left_alone_at_its_next_failure_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    breaker = Breaker(2, 10.0)
    for is_open in (False, True):
        breaker.failed()
        assert breaker.is_open == is_open
    now = 111.0
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open
    now = 122.0
    breaker.succeeded()
    breaker.failed()
    assert not breaker.is_open


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_tier_whose_blobs_drip_is_left_alone_for_a_while(make_library: MakeLibrary, one_at_a_time: bool) -> None:
    records, tier = [canonical(name) for name in "abcdef"], MemoryTier()
    with Library(LibrarySettings(), FINGERPRINT, [tier]) as writer:
        for record in records:
            writer.put(record)
    dripping = SlowTier(tier, bytes_per_s=4 * SIZE)
    library = make_library(dripping, load_timeout_s=0.02, tier_failures=2, tier_cooldown_s=3600)
    for record in records:
        loading = library.load("canonical", record.key, "acme")
        assert library.wait(loading) is None
        if one_at_a_time:
            wait_for([loading], 5)  # what comes too late does not speak for the tier either
    assert [action for action, _ in dripping.calls].count("get") == 2


def test_a_tier_that_answers_between_failures_is_not_left_alone(make_library: MakeLibrary) -> None:
    record, flaky = canonical("stored"), FaultyTier(MemoryTier())
    with Library(LibrarySettings(), FINGERPRINT, [flaky.inner]) as writer:
        writer.put(record)
    library = make_library(flaky, memory_bytes=0, tier_failures=2, tier_cooldown_s=3600)
    for answer in (record.key, canonical("absent").key) * 2:
        flaky.failing.add("get")
        assert library.get_canonical(canonical("other").key, "acme") is None
        flaky.failing.clear()
        assert (library.get_canonical(answer, "acme") is None) == (answer != record.key)


def test_loads_that_wait_for_a_silent_tier_keep_nobody_from_the_others(make_library: MakeLibrary) -> None:
    record, near, silent = canonical("near"), MemoryTier(), HeldTier(MemoryTier(), "get")
    with Library(LibrarySettings(), FINGERPRINT, [near]) as writer:
        writer.put(record)
    settings = {"load_threads": 2, "load_timeout_s": 0.1, "tier_failures": 2, "tier_cooldown_s": 3600}
    library = make_library(near, silent, **settings)
    absent = [library.load("canonical", canonical(name).key, "acme") for name in "abcd"]
    deadline = time.monotonic() + 5
    while len(silent.calls) < settings["load_threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert library.load("canonical", record.key, "acme").result(5) is not None, "while the other is silent"
    asked = {key for _, key in silent.calls}  # the first two that a thread came to; the others wait for their turn
    assert [library.wait(loading) for loading in absent if loading.path in asked] == [None, None]
    later = canonical("e").key
    assert library.load("canonical", later, "acme").result(5) is None, "the silent tier is left alone by now"
    assert not any(later in key for _, key in silent.calls)
    silent.release.set()
    wait_for(absent, 5)


def test_a_look_up_waits_no_longer_than_a_load(make_library: MakeLibrary):
    inner = MemoryTier()
    with_it = make_library(inner)
    record = canonical()
    with_it.put(record)
    with_it.flush()
    assert make_library(inner, load_timeout_s=30).has("canonical", record.key, "acme")
    silent = HeldTier(inner, "contains")
    library = make_library(silent, load_timeout_s=0.1)
    assert not library.has("canonical", record.key, "acme"), "it would be found if it were waited for"
    assert library.stats().timeouts == 1
    silent.release.set()
