"""Which orders a set of chunks is run in, and which patches come of it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import pytest
import torch

from kvstore.operator.patch import ORBIT_ORDERINGS, PatchKind, set_kind
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming, arrange


def chunk(name: str, tokens: int = 3) -> OrbitChunk:
    return OrbitChunk(name, f"content {name}", torch.arange(tokens), torch.arange(tokens), torch.zeros(1, 4), first=1)


def forming(count: int) -> OrbitForming:
    return OrbitForming((7, 8), tuple(chunk(name) for name in "abcdefghij"[:count]), "local", opening=(1, 7, 8, 2))


def run(orbit: OrbitForming) -> tuple[list[str], dict[tuple[str, frozenset[str]], float], int]:
    """Orders that were run, the means that came of them, and the most that were under way at a time.

    The deficit of a chunk behind an order is a number that tells the orders apart.
    """
    orders, means, under_way = [], {}, 0
    for order in orbit.orders:
        names = "".join(item.key for item in order)
        orders.append(names)
        for place, key in enumerate(names):
            before = tuple(names[:place])
            if orbit.wants(key, before):
                mean = orbit.add(key, before, torch.tensor([deficit_of(before)]))
                if mean is not None:
                    assert (key, frozenset(before)) not in means
                    means[key, frozenset(before)] = mean.item()
            under_way = max(under_way, len(orbit._means))
    return orders, means, under_way


def deficit_of(before: tuple[str, ...]) -> float:
    return float(sum(ord(name) * (place + 1) for place, name in enumerate(before)))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_up_to_four_predecessors_every_set_gets_the_mean_over_all_its_orders(count: int):
    orders, means, _ = run(forming(count))
    names = "abcdefghij"[:count]
    assert sorted(orders) == sorted(map("".join, permutations(names)))
    sets = {(key, frozenset(before)) for key in names for size in range(count)
            for before in combinations(set(names) - {key}, size)}  # fmt: skip
    assert means.keys() == sets
    for (_, before), mean in means.items():
        all_orders = [deficit_of(order) for order in permutations(sorted(before))]
        assert mean == pytest.approx(sum(all_orders) / len(all_orders))


@pytest.mark.parametrize("count", [6, 8])
def test_larger_sets_are_sampled_and_give_the_whole_set_and_pairs(count: int):
    orders, means, under_way = run(forming(count))
    assert len(orders) == len(set(orders)) == count * ORBIT_ORDERINGS
    assert set(Counter(order[-1] for order in orders).values()) == {ORBIT_ORDERINGS}
    sizes = Counter(len(before) for _, before in means)
    assert sizes[0] == sizes[count - 1] == count
    assert set(sizes) == {0, 1, count - 1}
    assert sizes[1] > 0.8 * count * (count - 1)
    assert under_way == 1  # deficits are large: one mean at a time


def test_few_means_are_under_way_at_a_time():
    assert run(forming(5))[2] <= 16  # of 80


def test_an_order_counts_once_however_often_it_is_met():
    orbit = forming(3)
    assert orbit.add("c", ["a", "b"], torch.tensor([2.0])) is None
    assert not orbit.wants("c", ["a", "b"])
    assert orbit.wants("c", ["b", "a"])
    mean = orbit.add("c", ["b", "a"], torch.tensor([4.0]))
    assert mean is not None
    assert mean.item() == 3.0
    assert not orbit.wants("c", ["b", "a"])


def test_one_predecessor_makes_a_pair():
    assert [set_kind(count) for count in range(3)] == [PatchKind.orbit, PatchKind.pair, PatchKind.orbit]


def test_an_arrangement_lies_back_to_back_behind_the_opening():
    orbit = forming(2)
    sequence, placed = arrange(orbit.opening, (chunk("b", 4), chunk("a", 3)), range(1, 2))
    assert orbit.tokens == 10
    assert [(place.start, place.position) for place in placed] == [(4, 4), (8, 8)]
    assert sequence.token_ids.tolist() == [1, 7, 8, 2, 0, 1, 2, 3, 0, 1, 2]
    assert sequence.positions.tolist() == list(range(11))
    assert [item.start for item in sequence.embedded] == [5, 9]
