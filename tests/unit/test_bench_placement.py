"""The placement benchmark's trace, its replay and its bound."""

from __future__ import annotations

import pytest

from serving.bench.placement import HitRate, optimum, replay, trace


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
    arrival, placed, best = replay(requests, placed=False), replay(requests, placed=True), optimum(requests)
    assert arrival.of_all < placed.of_all <= best.of_all
    assert arrival.of_others < placed.of_others <= best.of_others
    assert arrival.again is not None
    assert placed.again is not None
    assert arrival.again < placed.again < 1


def test_an_order_comes_again_where_all_before_a_chunk_stood_as_they_do():
    requests = [["a", "b", "c", "d"], ["a", "b", "d", "c"], ["a", "b", "d", "e"]]
    assert replay(requests, placed=False).again == 1 / 6  # `d` behind `a` and `b`


def test_what_is_compiled_ahead_helps():
    requests = trace(40, 5, 150)
    assert replay(requests, placed=True).of_all > replay(requests, placed=True, compiles=False).of_all
