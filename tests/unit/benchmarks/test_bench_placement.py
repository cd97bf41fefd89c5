"""The placement benchmark's trace, its replay and its bound."""

from __future__ import annotations

import sys

import pytest

from prefill_workers.settings import COMPOSE_UP_TO, PrefillSettings
from tests.benchmarks.placement import NOTHING, UNBOUNDED_SUBSETS, HitRate, optimum, replay, trace

PAIRS, PLAIN = (PrefillSettings().compile_limits(up_to) for up_to in (COMPOSE_UP_TO, 0))


def test_a_trace_is_the_same_every_time_and_popular_pages_come_often():
    requests = trace(50, 4, 200)
    assert requests == trace(50, 4, 200)
    assert all(len(set(request)) == 4 for request in requests)
    came = [sum(f"page {i}" in request for request in requests) for i in (0, 40)]
    assert came[0] > 5 * came[1]


def test_the_optimum_is_the_largest_part_that_came_before():
    assert optimum([["a", "b", "c"], ["b", "d", "c"], ["a", "b", "c"], ["x", "y", "d"]]) == HitRate(
        (0 + 2 + 3 + 1) / 12, (0 + 1 + 2 + 0) / 8
    )


@pytest.mark.parametrize("retrieved", [3, 5])
def test_placement_lies_between_arrival_and_the_optimum(retrieved: int):
    requests = trace(40, retrieved, 150)
    arrival, placed, best = (
        replay(requests, PLAIN, placed=False),
        replay(requests, PLAIN, placed=True),
        optimum(requests),
    )
    assert arrival.of_all < placed.of_all <= best.of_all
    assert arrival.of_others < placed.of_others <= best.of_others
    assert arrival.again is not None
    assert placed.again is not None
    assert arrival.again < placed.again < 1


def test_without_bounds_placement_comes_to_the_optimum():
    requests = trace(40, 5, 150)
    bounded, unbounded = (
        replay(requests, PrefillSettings(subset_forwards=subsets).compile_limits(0), placed=True, budget=budget)
        for subsets, budget in ((0, 50), (UNBOUNDED_SUBSETS, sys.maxsize))
    )
    assert bounded.of_all < 0.8 * unbounded.of_all
    assert unbounded.of_all == optimum(requests).of_all


def test_an_order_comes_again_where_all_before_a_chunk_stood_as_they_do():
    requests = [["a", "b", "c", "d"], ["a", "b", "d", "c"], ["a", "b", "d", "e"]]
    assert replay(requests, PLAIN, placed=False).again == 1 / 6  # `d` behind `a` and `b`


def test_what_is_compiled_ahead_helps():
    requests = trace(40, 5, 150)
    assert replay(requests, PLAIN, placed=True).of_all > replay(requests, NOTHING, placed=True).of_all


@pytest.mark.parametrize("placed", [True, False])
def test_sums_of_pairs_serve_sets_that_never_came(placed: bool):
    requests = trace(40, 5, 150)
    plain, pairs = (replay(requests, limits, placed=placed) for limits in (PLAIN, PAIRS))
    assert plain.summed is None
    assert pairs.summed is not None
    assert pairs.of_all > plain.of_all


def test_a_sum_serves_behind_as_many_as_the_product_sums_and_only_where_all_its_pairs_are_known():
    four = [["a", "b", "c", "d"], ["d", "c", "b", "a"]]  # 12 pairs, which are all compiled of the first
    found = replay(four, PAIRS, placed=False)
    assert (found.of_all, found.summed) == (4 / 8, 2 / 8)
    five = [["a", "b", "c", "d", "e"], ["e", "d", "c", "b", "a"]]  # of 20 pairs 12 are
    assert replay(five, PAIRS, placed=False).of_all < 5 / 10
