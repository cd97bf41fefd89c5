"""Which prefix subsets and pairs of a served set are compiled, and which come first."""

from __future__ import annotations

from itertools import combinations

import pytest

from prefill_workers.background.candidate_sets import cross_request_pairs, pair_batches, prefix_subsets

SHARES = [0.9, 0.2, 0.5]
TOKENS = [10, 1000, 100]


def test_a_part_is_worth_what_its_beginnings_save_where_all_of_them_are_asked_for():
    found = {subset.chunks: subset.value for subset in prefix_subsets(SHARES, TOKENS)}
    assert found.keys() == {chosen for size in (1, 2, 3) for chosen in combinations(range(3), size)}
    assert found[0,] == pytest.approx(0.9 * 10)
    assert found[0, 2] == pytest.approx(0.9 * 10 + 0.9 * 0.5 * 100)
    assert found[0, 1, 2] == pytest.approx(0.9 * 10 + 0.9 * 0.2 * 1000 + 0.9 * 0.2 * 0.5 * 100)


def test_the_most_valuable_come_first():
    values = [subset.value for subset in prefix_subsets(SHARES, TOKENS)]
    assert values == sorted(values, reverse=True)


def test_of_many_chunks_the_most_popular_are_weighed_in_the_order_served():
    shares = [0.01 * (i * 7 % 30) for i in range(30)]
    found = prefix_subsets(shares, [100] * 30)
    assert len(found) == 255
    assert {chunk for subset in found for chunk in subset.chunks} == {i for i in range(30) if shares[i] >= 0.22}
    assert all(list(subset.chunks) == sorted(subset.chunks) for subset in found)


def test_pairs_come_in_both_orders_those_behind_the_same_chunk_together():
    found = pair_batches([0.9, 0.2, 0.5], [100, 100, 100], limit=12)
    assert [batch.chunks for batch in found] == [(0, 2, 1), (2, 0, 1), (1, 0, 2)]
    assert found[0].value == pytest.approx((0.9 * 0.5 + 0.9 * 0.2) * 100 / 300)


def test_of_many_chunks_the_pairs_of_the_most_popular_are_weighed():
    found = pair_batches([0.01 * i for i in range(30)], [100] * 30, limit=56)
    assert sum(len(batch.chunks) - 1 for batch in found) == 8 * 7
    assert max(len(batch.chunks) for batch in found) == 5
    assert min(min(batch.chunks) for batch in found) == 22
    assert [batch.value for batch in found] == sorted((batch.value for batch in found), reverse=True)


def test_the_pairs_of_popular_chunks_come_first_so_that_whole_sets_are_served():
    found = pair_batches([0.9, 0.1, 0.8, 0.7, 0.2], [100] * 5, limit=6)
    assert [batch.chunks for batch in found[:3]] == [(0, 2, 3), (2, 0, 3), (3, 0, 2)]
    assert sum(len(batch.chunks) - 1 for batch in found) == 20


def test_cross_request_pairs_are_those_of_a_requests_chunks_with_others():
    found = cross_request_pairs([0, 1], [2, 3], [0.5, 0.1, 0.9, 0.2], [100, 100, 100, 100])
    assert [batch.chunks for batch in found] == [(0, 2, 3), (2, 0, 1), (3, 0, 1), (1, 2, 3)]
    assert found[0].value == pytest.approx(0.5 * (0.9 + 0.2) * 100 / 300)
    assert cross_request_pairs([0, 1], [], [0.5, 0.1], [100, 100]) == []
