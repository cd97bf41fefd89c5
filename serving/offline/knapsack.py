"""Knapsack with shared items: choose demands to meet within a budget.

A demand is worth its value once all of its items are made; an item costs bytes and seconds, once. This is a knapsack
with shared items. `pick` is greedy, what is made already counting nothing; `bound` says how much any choice could be
worth at most, so that what greed loses is known.

Pure functions and values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SWEEPS = 24  # over which items' prices are shared out anew
_STEPS = 24  # of the search for a resource's price
_ROUNDS = 3  # over both resources

Floats = NDArray[np.float64]


class Cost(NamedTuple):
    """Bytes stored, and seconds of computing."""

    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """Both."""
        return Cost(self.bytes + other.bytes, self.seconds + other.seconds)

    def within(self, budget: Cost) -> bool:
        """True if a budget allows it."""
        return self.bytes <= budget.bytes and self.seconds <= budget.seconds


UNBOUNDED = Cost(math.inf, math.inf)


class Demand(NamedTuple):
    """A value in seconds that is gained once these items (indices, each once) are made."""

    value: float
    items: tuple[int, ...]


@dataclass
class Picked:
    """Choice of items and demands (indices), with its value and cost."""

    items: set[int] = field(default_factory=set)
    demands: list[int] = field(default_factory=list)
    value: float = 0.0
    cost: Cost = field(default_factory=Cost)


def pick(items: Sequence[Cost], demands: Sequence[Demand], budget: Cost = UNBOUNDED) -> Picked:
    """The best of three: two greedy orders, and the most valuable single demand that fits.

    Greedy by value per share of the budget that a demand alone would take; or as if all demands that want an item
    paid for it together, each by its value: that finds items that are worth something to many, and little to each.
    Demands without value are left alone.
    """
    alone = [_share(cost.bytes, budget.bytes) + _share(cost.seconds, budget.seconds) for cost in items]
    wanted = [0.0] * len(items)  # value of all that want an item
    for demand in demands:
        for item in demand.items:
            wanted[item] += max(demand.value, 0.0)
    together = [price / value if value else math.inf for price, value in zip(alone, wanted, strict=True)]
    found = (
        _greedy(items, demands, budget, alone, [demand.value for demand in demands]),
        _greedy(items, demands, budget, together, [1.0] * len(demands)),
        _best_single(items, demands, budget),
    )
    return max(found, key=lambda each: each.value)


def _greedy(
    items: Sequence[Cost], demands: Sequence[Demand], budget: Cost, prices: Sequence[float], gains: Sequence[float]
) -> Picked:
    """Meet demands greedily, by gain over the prices of their items that are not made yet."""
    users: list[list[int]] = [[] for _ in items]
    for d, demand in enumerate(demands):
        for item in demand.items:
            users[item].append(d)
    picked, met = Picked(), set[int]()

    def missing(d: int) -> list[int]:
        return [i for i in demands[d].items if i not in picked.items]

    def entry(d: int) -> tuple[float, int]:
        price = sum(prices[i] for i in missing(d))
        return (-gains[d] / price if price > 0 else -math.inf), d

    heap = [entry(d) for d, demand in enumerate(demands) if demand.value > 0]
    heapq.heapify(heap)
    while heap:
        _, d = heapq.heappop(heap)  # a demand is pushed again whenever it gets cheaper: its first entry is right
        fresh = missing(d)
        cost = picked.cost.plus(_sum(items[i] for i in fresh))
        if d in met or not cost.within(budget):
            continue
        met.add(d)
        picked.items.update(fresh)
        picked.demands.append(d)
        picked.value, picked.cost = picked.value + demands[d].value, cost
        for other in {user for i in fresh for user in users[i]} - met:
            if demands[other].value > 0:
                heapq.heappush(heap, entry(other))
    return picked


def _sum(costs: Iterable[Cost]) -> Cost:
    listed = list(costs)
    return Cost(sum(cost.bytes for cost in listed), sum(cost.seconds for cost in listed))


def _whole(items: Sequence[Cost], demand: Demand) -> Cost:
    return _sum(items[i] for i in demand.items)


def _share(cost: float, budget: float) -> float:
    return 0.0 if math.isinf(budget) or not cost else cost / budget if budget else math.inf


def _best_single(items: Sequence[Cost], demands: Sequence[Demand], budget: Cost) -> Picked:
    best = Picked()
    for d, demand in enumerate(demands):
        if demand.value > best.value:
            cost = _whole(items, demand)
            if cost.within(budget):
                best = Picked(set(demand.items), [d], demand.value, cost)
    return best


# -- the bound --------------------------------------------------------------------------------------------------------


def bound(items: Sequence[Cost], demands: Sequence[Demand], budget: Cost = UNBOUNDED) -> float:
    """Upper bound of every choice within the budget: a dual of the linear relaxation.

    For any price per byte and second, and any way in which demands share the price of an item between them, a choice
    is worth at most the whole budget's price and what every demand is worth beyond its shares. Prices are searched for
    by golden section, shares by giving each demand so much of an item as it can pay.
    """
    demands = [demand for demand in demands if demand.value > 0 and _whole(items, demand).within(budget)]
    total = sum(demand.value for demand in demands)
    if not demands:
        return 0.0
    prices = _Prices(items, demands)
    best = total
    resources = [r for r, most in enumerate(budget) if math.isfinite(most)]
    price = [0.0, 0.0]
    for _ in range(_ROUNDS if len(resources) > 1 else 1):
        for r in resources:

            def at(value: float, r: int = r) -> float:
                priced = [value if other == r else price[other] for other in (0, 1)]
                spent = sum(budget[other] * priced[other] for other in resources)
                return spent + prices.surplus(priced)

            value, found = _least(at, 0.0, prices.highest(r))
            if found < best:
                best, price[r] = found, value
    return best


class _Prices:
    """Demands and items as one long list of pairs."""

    def __init__(self, items: Sequence[Cost], demands: Sequence[Demand]) -> None:
        self._values: Floats = np.array([demand.value for demand in demands])
        self._demand = np.repeat(np.arange(len(demands)), [len(demand.items) for demand in demands])
        self._item = np.fromiter((i for demand in demands for i in demand.items), np.int64)
        self._costs: Floats = np.array(items, dtype=np.float64).reshape(-1, 2)

    def highest(self, resource: int) -> float:
        """A price beyond which nothing that costs any of the resource is worth making."""
        cost = np.bincount(self._demand, self._costs[self._item, resource], len(self._values))
        used = self._costs[:, resource][self._costs[:, resource] > 0]
        return float(self._values.sum() / used.min()) if len(used) and cost.any() else 0.0

    def surplus(self, price: Sequence[float]) -> float:
        """Value of demands beyond their shares of items' prices.

        The least of a few ways to share.
        """
        prices = self._costs @ np.asarray(price)
        of_pair = prices[self._item]
        weight = self._values[self._demand]
        least = math.inf
        for _ in range(_SWEEPS):
            whole = np.bincount(self._item, weight, len(prices))[self._item]
            share = np.divide(of_pair * weight, whole, out=np.zeros_like(weight), where=whole > 0)
            slack = self._values - np.bincount(self._demand, share, len(self._values))
            found = float(np.maximum(slack, 0.0).sum())
            if found >= least * (1 - 1e-6):
                return min(found, least)
            least = found
            weight = np.maximum(slack[self._demand] + share, 0.0) + 1e-12  # what each could pay for this item
        return least


def _least(of: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Least point of a convex function between `low` and `high`, and its value.

    Searched on a log scale.
    """
    if high <= 0:
        return 0.0, of(0.0)
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(high) - 40.0, math.log(high)
    best = min((of(x), x) for x in (low, high))
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = of(math.exp(c)), of(math.exp(d))
    for _ in range(_STEPS):
        best = min(best, (at_c, math.exp(c)), (at_d, math.exp(d)))
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = of(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = of(math.exp(d))
    return best[1], best[0]
