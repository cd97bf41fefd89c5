"""Which patches are worth compiling for a trace: against brute force, and on traces whose answer is plain."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.curves import ForwardCost
from kvstore.catalog.index import Entry, Scope, prefix_key
from kvstore.records.keys import DYNAMIC_TENANT
from serving.access_log import LoggedChunk, LoggedRequest
from serving.offline.compile_plan import Kind, Plan, Terms, Trace, plan, trace_of
from serving.offline.knapsack import UNBOUNDED, Cost, Demand, bound, pick
from serving.placement.orderer import LinkCosts, PatchAwareOrderer
from serving.placement.search import place

NO_PREFIX = prefix_key(())
TOKENS = {"a": 100, "b": 100, "c": 100, "d": 50, "e": 200}
TERMS = Terms(forward=ForwardCost(0.0, 1.0), place=0.1, patch_bytes=lambda tokens: 10 * tokens, compose_up_to=3)


def request(
    contents: Sequence[str], free: bool = True, tenant: str = "acme", prefix: tuple[int, ...] = (), sample: float = 1.0
) -> LoggedRequest:
    group = 0 if free else None
    chunks = tuple(
        LoggedChunk(content=c, modality="text", tokens=TOKENS.get(c, 100), point="encoded", group=group)
        for c in contents
    )
    return LoggedRequest(
        v=1, time=0, model="m", tenant=tenant, mode="auto", sample=sample, chunks=chunks,
        prefix=prefix_key(prefix), prefix_tokens=len(prefix),
    )  # fmt: skip


def traced(*requests: LoggedRequest, prefixes: Sequence[tuple[int, ...]] = ((),)) -> Trace:
    return trace_of(requests, {prefix_key(prefix): prefix for prefix in prefixes})


def chosen(found: Plan) -> set[str]:
    return {"".join(wanted.contents) for wanted in found.patches}


# -- a budget ---------------------------------------------------------------------------------------------------------


def best_value(items: Sequence[Cost], demands: Sequence[Demand], budget: Cost) -> float:
    """The optimum, by trying every set of demands."""
    best = 0.0
    for size in range(len(demands) + 1):
        for some in itertools.combinations(demands, size):
            made = {item for demand in some for item in demand.items}
            cost = Cost(sum(items[i].bytes for i in made), sum(items[i].seconds for i in made))
            if cost.within(budget):
                best = max(best, sum(demand.value for demand in some))
    return best


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_what_is_picked_fits_and_the_optimum_lies_between_it_and_the_bound(seed: int):
    draw = random.Random(seed)
    count = draw.randint(1, 8)
    items = [Cost(draw.choice([0, 1, 4]) * draw.random(), draw.choice([0, 1, 2]) * draw.random()) for _ in range(count)]
    demands = [
        Demand(draw.uniform(-1, 4), tuple(draw.sample(range(count), draw.randint(1, min(4, count)))))
        for _ in range(draw.randint(1, 8))
    ]
    budget = Cost(draw.choice([math.inf, 6 * draw.random()]), draw.choice([math.inf, 4 * draw.random()]))
    picked, optimum = pick(items, demands, budget), best_value(items, demands, budget)
    assert picked.cost.within(budget)
    assert picked.cost == pytest.approx(tuple(map(sum, zip(*[items[i] for i in picked.items], (0, 0), strict=False))))
    assert sum(demands[d].value for d in picked.demands) == pytest.approx(picked.value)
    assert all(set(demands[d].items) <= picked.items for d in picked.demands)
    assert picked.value <= optimum + 1e-9
    assert optimum <= bound(items, demands, budget) * (1 + 1e-9) + 1e-9
    if budget == UNBOUNDED:
        assert picked.value == pytest.approx(optimum)


def test_greed_loses_little_and_the_bound_is_near():
    draw, lost, above = random.Random(0), [], []
    for _ in range(40):
        items = [Cost(bytes=draw.random(), seconds=draw.random()) for _ in range(8)]
        demands = [Demand(draw.random(), tuple(draw.sample(range(8), draw.randint(1, 3)))) for _ in range(9)]
        optimum = best_value(items, demands, Cost(2.0, 2.0))
        lost.append(pick(items, demands, Cost(2.0, 2.0)).value / optimum)
        above.append(bound(items, demands, Cost(2.0, 2.0)) / optimum)
    assert sum(lost) / len(lost) > 0.93
    assert sum(above) / len(above) < 1.35


def test_one_dear_demand_is_taken_where_it_is_worth_more_than_all_cheap_ones():
    items = [Cost(bytes=1), Cost(bytes=10)]
    demands = [Demand(2.0, (0,)), Demand(10.0, (1,))]
    assert pick(items, demands, Cost(10, math.inf)).demands == [1]


def test_without_demands_or_budget_nothing_is_picked():
    assert pick([], []).value == bound([], []) == 0.0
    nothing = pick([Cost(1, 1)], [Demand(1.0, (0,))], Cost(0, 0))
    assert (nothing.items, nothing.value) == (set(), 0.0)
    assert bound([Cost(1, 1)], [Demand(1.0, (0,))], Cost(0, 0)) == 0.0


# -- the order of requests --------------------------------------------------------------------------------------------


def test_free_chunks_stand_with_the_most_popular_first_and_fixed_ones_where_they_were():
    requests = [request("ab"), request("bc"), request("cb"), request("cb", free=False)]
    orders = ["".join(chunk.content for chunk in order) for _, order in traced(*requests).requests]
    assert orders == ["ba", "bc", "bc", "cb"]


def test_only_chunks_of_one_group_trade_places():
    mixed = request("abcd")
    groups = [0, None, 0, 1]
    mixed = mixed.model_copy(
        update={"chunks": tuple(c.model_copy(update={"group": g}) for c, g in zip(mixed.chunks, groups, strict=True))}
    )
    ((_, order),) = [each for each in traced(request("c"), request("c"), mixed).requests if len(each[1]) == 4]
    assert [chunk.content for chunk in order] == ["c", "b", "a", "d"]


def test_popularity_is_a_tenants_own():
    orders = traced(request("ab", tenant="x"), *[request("b", tenant="y")] * 5, request("a", tenant="x")).requests
    assert [chunk.content for chunk in orders[0][1]] == ["a", "b"]


def test_what_cannot_be_compiled_is_counted_by_its_reason_and_stands_last_where_it_may():
    requests = [request("ab"), request("a", prefix=(1,)), request("cab", free=False)]
    found = trace_of(
        requests, {NO_PREFIX: ()}, lambda owned: ["gone" if chunk.content == "a" else None for _, chunk in owned]
    )
    assert found.skipped["gone"] == 1 + 2  # a, and what cannot but stand behind it
    assert [reason for reason in found.skipped if "--prefix" in reason]
    assert [[chunk.content for chunk in order] for _, order in found.requests] == [["b"], ["c"]]


# -- sets -------------------------------------------------------------------------------------------------------------


def test_every_beginning_that_requests_share_is_worth_its_last_chunk():
    found = plan(traced(*[request("abc")] * 2, request("abd"), request("e")), Kind.sets, TERMS)
    assert chosen(found) == {"a", "ab", "abc"}  # d behind a b, and e, are asked for once
    assert found.saves == pytest.approx(0.9 * (3 * 100 + 3 * 100 + 2 * 100)) == found.possible == found.most
    assert found.cost == Cost(10 * 300, 300)
    assert all(wanted.ordered for wanted in found.patches)


def test_a_forward_over_a_long_path_makes_what_lies_on_it():
    wide = plan(traced(*[request("ab")] * 2, *[request("cd")] * 2), Kind.sets, TERMS, Cost(math.inf, 200))
    assert chosen(wide) == {"a", "ab"}
    fewer_bytes = plan(traced(*[request("ab")] * 2), Kind.sets, TERMS, Cost(1000, math.inf))
    assert len(chosen(fewer_bytes)) == 1
    assert fewer_bytes.most == pytest.approx(fewer_bytes.saves, rel=1e-3)


def test_what_is_stored_takes_no_seconds_so_that_the_next_run_gets_further():
    trace, budget = traced(*[request("ab")] * 3, *[request("cde")] * 2), Cost(math.inf, 200)
    first = plan(trace, Kind.sets, TERMS, budget)
    assert chosen(first) == {"a", "ab"}
    second = plan(trace, Kind.sets, TERMS, budget, stored=lambda wanted: set(first.patches) & set(wanted))
    assert chosen(second) == {"a", "ab", "c", "cd"}
    assert second.cost == Cost(10 * 350, 150)
    behind = plan(trace, Kind.sets, TERMS, stored=lambda wanted: [one for one in wanted if one.contents == ("c", "d")])
    assert behind.cost.seconds == 200 + 350, "what stands behind it is computed over it"


def test_tenants_and_prefixes_share_nothing_and_samples_count_for_more():
    prefix = (1, 2, 3)
    requests = [request("a", tenant="x"), request("a", tenant="y"), request("a", prefix=prefix)]
    assert chosen(plan(traced(*requests, prefixes=[(), prefix]), Kind.sets, TERMS)) == set()
    found = plan(traced(*requests * 2, prefixes=[(), prefix]), Kind.sets, TERMS)
    assert len(found.patches) == 3
    assert found.cost.seconds == 3 * 100 + 3  # the prefix too
    sampled = plan(traced(*[request("a", sample=0.1)] * 2), Kind.sets, TERMS)
    assert sampled.saves == pytest.approx(0.9 * 100 * 20)


def test_placement_saves_at_least_what_the_plan_counts():
    """Any order may be chosen by placement; the plan's own is one of them."""
    draw, pages = random.Random(5), "abcdefgh"
    requests = [request(draw.sample(pages, draw.randint(1, 4)), free=draw.random() < 0.7) for _ in range(200)]
    found = plan(traced(*requests), Kind.sets, replace(TERMS, min_uses=3), Cost(30_000, math.inf))
    assert 0 < found.saves < found.possible
    orderer = PatchAwareOrderer(costs=LinkCosts(compute=TERMS.forward.added_seconds(1), place=TERMS.place))
    orderer.formed(
        Entry(Scope(wanted.scope.owner, wanted.scope.prefix), wanted.contents[-1], wanted.contents[:-1], ordered=True)
        for wanted in found.patches
    )
    spent = computed = 0.0
    for each in requests:
        contents = [chunk.content for chunk in each.chunks]
        orderer._tokens.update({chunk.content: chunk.tokens for chunk in each.chunks})
        orderer.popularity.observe(each.tenant, contents)
        problem = orderer.problem(contents, [chunk.group for chunk in each.chunks], each.tenant, ())
        spent += place(problem).cost / 1e9
        computed += TERMS.forward.seconds(sum(chunk.tokens for chunk in each.chunks))
    assert computed - spent >= found.saves * (1 - 1e-6)


def test_a_path_longer_than_the_context_is_no_candidate():
    found = plan(traced(*[request("abc")] * 2), Kind.sets, replace(TERMS, longest=250))
    assert chosen(found) == {"a", "ab"}


# -- pairs ------------------------------------------------------------------------------------------------------------


def test_pairs_serve_sets_that_never_came_twice():
    novel = [request(order) for order in itertools.combinations("abcd", 3)]
    sets, pairs = (plan(traced(*novel), kind, TERMS) for kind in Kind)
    assert pairs.saves > sets.saves
    assert pairs.saves == pairs.possible
    assert {len(wanted.contents) for wanted in pairs.patches} == {1, 2}
    assert not any(wanted.ordered for wanted in pairs.patches)


def test_a_chunk_is_composed_only_where_all_its_pairs_are_stored_and_not_beyond_the_limit():
    four = [request("abcd", free=False)] * 2
    assert chosen(plan(traced(*four), Kind.pairs, TERMS)) == {"a", "ab", "ac", "bc", "c", "ad", "bd", "cd", "d"}
    assert chosen(plan(traced(*four), Kind.pairs, replace(TERMS, compose_up_to=2))) == {"a", "ab", "ac", "bc", "c"}
    assert chosen(plan(traced(*four), Kind.pairs, replace(TERMS, compose_up_to=0))) == {"a", "ab"}
    little = plan(traced(*four), Kind.pairs, TERMS, Cost(2000, math.inf))
    assert chosen(little) == {"a", "ab"}
    assert little.saves <= little.most <= little.possible


def test_weighing_costs_the_first_layers_of_all_chunks_so_far():
    three = [request("abc", free=False)] * 2
    free, paid = (plan(traced(*three), Kind.pairs, replace(TERMS, first_layers=share)) for share in (0.0, 0.1))
    assert free.saves - paid.saves == pytest.approx(2 * 0.1 * 300)
    assert chosen(plan(traced(*three), Kind.pairs, replace(TERMS, first_layers=0.5))) == {"a", "ab"}


def test_a_set_with_a_chunk_twice_is_not_composed():
    assert chosen(plan(traced(*[request("aab", free=False)] * 2), Kind.pairs, TERMS)) == {"a", "aa"}


def test_pairs_of_references_alone_are_made_once_for_all_tenants():
    shared = ["shared-a", "shared-b"]
    found = plan(traced(request(shared, tenant="x"), request(shared, tenant="y")), Kind.pairs, TERMS)
    assert {wanted.scope.owner for wanted in found.patches} == {DYNAMIC_TENANT}
    mine = plan(traced(*[request([*shared, "a"], free=False, tenant="x")] * 2), Kind.pairs, TERMS)
    assert {wanted.scope.owner for wanted in mine.patches if wanted.contents[-1] == "a"} == {"x"}
