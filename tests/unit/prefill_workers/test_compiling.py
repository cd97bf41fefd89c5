"""What is compiled ahead, what comes first, and how much of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from clock import Clock

from kvstore.library import Library
from kvstore.settings import LibrarySettings
from prefill_workers.background.compile_queue import (
    HORIZON_S,
    CompileJob,
    CompileLimits,
    CompileQueue,
    ComputeBudget,
    Demand,
    JobKind,
    cross_request_jobs,
    jobs,
)
from prefill_workers.settings import PrefillSettings

LIMITS = CompileLimits(orbit_chunks=3, subset_forwards=2, pair_forwards=12, compose_up_to=1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def demand(clock: Clock) -> Demand:
    return Demand(clock)


def made(demand: Demand, contents: str, tenant: str = "local", limits: CompileLimits = LIMITS) -> list[CompileJob[str]]:
    return jobs(contents, tenant, (), list(contents), [100] * len(contents), limits, demand)


def taken(queue: CompileQueue[str]) -> Iterator[CompileJob[str]]:
    """Jobs in the order in which they go."""
    while (job := queue.best()) is not None:
        queue.remove(job)
        yield job


def test_small_sets_get_all_orders_and_large_ones_subsets_and_pairs(demand: Demand):
    assert [(job.kind, job.forwards) for job in made(demand, "abc")] == [(JobKind.orders, 6)]
    large = [(job.kind, job.forwards) for job in made(demand, "abcd")]
    assert large == [(JobKind.prefix_subsets, 2), (JobKind.pairs, 12)]
    assert made(demand, "a") == []


def test_where_pairs_serve_a_small_set_its_orders_wait_until_it_is_expected_again(demand: Demand):
    def kinds(contents: str, compose_up_to: int = 2) -> list[JobKind]:
        limits = replace(LIMITS, compose_up_to=compose_up_to)
        return [job.kind for job in made(demand, contents, limits=limits)]

    demand.observe("local", list("abc"))
    assert kinds("abc") == [JobKind.pairs]
    assert kinds("abc", compose_up_to=1) == [JobKind.orders], "sums of two are not used"
    assert kinds("ab") == [JobKind.orders], "which are its pairs"
    demand.observe("local", list("abc"))
    assert kinds("abc") == [JobKind.orders, JobKind.pairs]


def test_nothing_is_compiled_that_is_switched_off_or_has_no_share_of_the_time(demand: Demand):
    for limits, kinds in (
        (CompileLimits(orbit_chunks=0), []),
        (CompileLimits(orbit_chunks=0, pair_forwards=2), [JobKind.pairs]),
        (CompileLimits(subset_forwards=1), [JobKind.prefix_subsets]),
        (CompileLimits(pair_forwards=2, share=0), []),
    ):
        assert [job.kind for job in made(demand, "abcd", limits=limits)] == kinds


def test_pairs_are_worth_nothing_to_a_model_that_does_not_compose():
    settings = PrefillSettings()
    assert settings.compile_limits(3).pair_forwards == settings.pair_forwards > 0
    assert settings.compile_limits(3).compose_up_to == 3
    for never in (0, 1):
        assert settings.compile_limits(never).pair_forwards == settings.compile_limits(never).compose_up_to == 0


def test_what_is_expected_to_save_most_per_second_goes_first(demand: Demand):
    queue = CompileQueue[str](8, demand)
    for contents in ("abc", "xyz", "abq", "abc", "de"):
        demand.observe("local", list(contents))
    for contents in ("xyz", "abc", "de"):
        for job in made(demand, contents):
            queue.add(job)
    # of sets that are asked for alike the smaller: its orders are fewer, and each is shorter
    assert [job.item for job in taken(queue)] == ["abc", "de", "xyz"]


def test_what_came_once_was_not_asked_for_again_however_many_requests_come(demand: Demand):
    demand.observe("local", ["once"])
    demand.observe("local", ["twice"])
    for number in range(600):
        demand.observe("local", [f"another-{number}"])
    demand.observe("local", ["twice"])
    assert demand.asked_again("local", "twice")
    assert not demand.asked_again("local", "once")
    for number in range(10_000):
        demand.observe("local", [f"one more {number}"])
    demand.observe("local", ["late"])
    assert demand.expected("local", "late") > 2, "so many requests come, of which it has a share"
    assert not demand.asked_again("local", "late")


def test_a_busy_tenants_sets_go_before_those_of_a_quiet_one_with_the_same_shares(demand: Demand):
    queue = CompileQueue[str](8, demand)
    for tenant, requests in (("quiet", 1), ("busy", 5)):
        for _ in range(requests):
            demand.observe(tenant, list("abc"))
        for job in made(demand, "abc", tenant):
            queue.add(job)
    assert [job.tenant for job in taken(queue)] == ["busy", "quiet"]


def test_a_value_follows_demand_while_it_waits(demand: Demand):
    queue = CompileQueue[str](8, demand)
    for contents in ("abc", "xyz"):
        demand.observe("local", list(contents))
        for job in made(demand, contents):
            queue.add(job)
    for _ in range(3):
        demand.observe("local", list("xyz"))
    assert [job.item for job in taken(queue)] == ["xyz", "abc"]


def test_requests_are_expected_as_they_came_in_the_last_hour(demand: Demand, clock: Clock):
    for _ in range(4):
        demand.observe("local", ["a"])
    assert demand.requests("local") == pytest.approx(4)
    clock.now = HORIZON_S
    assert demand.requests("local") == pytest.approx(4 / math.e)
    assert demand.requests("nobody") == 0


def test_what_never_comes_again_is_told_from_what_does(demand: Demand):
    assert demand.odds_against("local") == 1, "nothing is known yet"
    for i in range(40):
        demand.observe("one-shot", [f"new {i}"])
        demand.observe("again", ["a", "b"])
    assert demand.odds_against("one-shot") > 30
    assert demand.odds_against("again") < 0.1
    for _ in range(400):
        demand.observe("one-shot", ["a"])
    assert demand.odds_against("one-shot") < 0.2, "what was long ago counts less"


def test_a_full_queue_loses_its_least_valuable_job(demand: Demand):
    queue = CompileQueue[str](2, demand)
    for contents in ("abc", "abc", "abq", "xyz"):
        demand.observe("local", list(contents))
    for contents in ("xyz", "abc", "abq"):
        for job in made(demand, contents):
            queue.add(job)
    assert [job.item for job in taken(queue)] == ["abc", "abq"]
    assert queue.dropped == 1


def test_a_set_that_comes_again_waits_once(demand: Demand):
    queue = CompileQueue[str](8, demand)
    for _ in range(2):
        demand.observe("local", list("abc"))
        for job in made(demand, "abc"):
            queue.add(job)
    assert len(queue) == 1


def test_bytes_are_those_of_all_patches_that_come_of_a_step(demand: Demand):
    (orders,) = made(demand, "abc")
    subsets = [chosen for size in range(3) for chosen in combinations("ab", size)]
    assert orders.nbytes(lambda tokens: tokens) == 3 * len(subsets) * 100
    subsets, pairs = made(demand, "abcd")
    assert subsets.nbytes(lambda tokens: tokens) == len(subsets.steps[0]) * 100
    assert pairs.steps[0] == (0, 1, 2, 3)
    assert pairs.nbytes(lambda tokens: tokens) == 400
    assert (pairs.step_tokens(), pairs.longest()) == (400, 200), "the first is computed once, the others in turns"


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_no_more_than_the_share_of_the_time_is_spent(share: float, clock: Clock):
    window, forward = 10.0, 0.5
    budget, spent = ComputeBudget(share, window, clock), 0.0
    for _ in range(10_000):
        if budget.is_open:
            clock.now += forward
            budget.spend(forward)
            spent += forward
        else:
            clock.now += 0.1
        assert spent <= share * (clock.now + window) + forward
    assert spent >= 0.9 * share * clock.now


def test_what_an_idle_worker_saves_up_is_bounded(clock: Clock):
    budget = ComputeBudget(0.5, 10.0, clock)
    clock.now = 1e6
    budget.spend(5.0)
    assert not budget.is_open
    clock.now += 0.1
    assert budget.is_open


def test_under_a_tight_budget_the_most_valuable_are_compiled_and_the_rest_waits(demand: Demand, clock: Clock):
    queue, budget = CompileQueue[str](8, demand), ComputeBudget(0.1, 10.0, clock)
    for contents in ("xyz", "abc", "abc", "abc"):
        demand.observe("local", list(contents))
    for contents in ("xyz", "abc"):
        for job in made(demand, contents):
            queue.add(job)
    ran: list[str] = []
    waiting = taken(queue)
    while budget.is_open:
        ran.append(next(waiting).item)
        budget.spend(1.0)
    assert ran == ["abc"]
    assert [job.item for job in waiting] == ["xyz"]


def test_a_library_with_room_asks_no_price(tmp_path):
    with Library(LibrarySettings(directory=tmp_path), "model") as library:
        assert library.price("local") == 0


def test_chunks_that_were_asked_for_again_are_paired_across_requests(demand: Demand):
    for contents in ("ab", "cd", "ae", "cf"):
        demand.observe("local", list(contents))

    def paired(contents: str, own: int, limits: CompileLimits = LIMITS) -> list[tuple[int, ...]]:
        found = cross_request_jobs(contents, "local", (), list(contents), [100] * len(contents), own, limits, demand)
        return [step for job in found for step in job.steps]

    assert paired("aecd", 2) == [(0, 2), (2, 0)], "a and c came twice"
    assert paired("ebdf", 2) == []
    assert paired("ac", 2) == [], "they are the request's own"
    for limits in (CompileLimits(pair_forwards=0), CompileLimits(pair_forwards=9, share=0)):
        assert paired("aecd", 2, limits) == []


def test_jobs_over_what_was_deleted_are_given_up(demand: Demand):
    queue = CompileQueue[str](9, demand)
    for tenant, contents in (("local", "ab"), ("local", "cd"), ("other", "ab")):
        for job in made(demand, contents, tenant):
            queue.add(job)
    queue.forget("a", "local")
    assert [(job.tenant, "".join(job.contents)) for job in taken(queue)] == [("local", "cd"), ("other", "ab")]
