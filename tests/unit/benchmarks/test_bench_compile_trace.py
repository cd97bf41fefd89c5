"""The compile-trace benchmark's replay: what a plan's patches serve of later requests."""

from __future__ import annotations

import pytest

from kvstore.catalog.index import prefix_key
from serving.offline.compile_plan import Kind, Plan, Scope, Wanted
from serving.offline.knapsack import Cost
from tests.benchmarks.compile_trace import patched_share

SCOPE = Scope("local", prefix_key(()))


def made(ordered: bool, *contents: str) -> Plan:
    kind = Kind.sets if ordered else Kind.pairs
    patches = tuple(Wanted(SCOPE, ordered, tuple(each)) for each in contents)
    return Plan(kind, patches, saves=0, most=0, possible=0, candidates=0, cost=Cost())


def test_sets_serve_their_order_and_any_that_placement_may_turn_into_it():
    sets = made(True, "a", "ab", "abc")
    assert patched_share(sets, ["abc"], placed=False) == 1.0
    assert patched_share(sets, ["cba"], placed=False) == 0.0
    assert patched_share(sets, ["cba"], placed=True) == 1.0


def test_pairs_serve_a_chunk_only_if_all_that_make_it_up_are_there():
    pairs = made(False, "a", "b", "c", "ab", "ac", "bc")
    assert patched_share(pairs, ["abc"], placed=False) == 1.0
    assert patched_share(pairs, ["acb"], placed=False) == pytest.approx(2 / 3)  # no patch of b behind c
    assert patched_share(made(False, "a", "ab", "ac", "bc"), ["abc"], placed=False) == pytest.approx(2 / 3)
