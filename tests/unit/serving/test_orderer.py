"""What an ingress learns about patches and costs, and the orders that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from kvstore.catalog.index import Entry, Scope, prefix_key
from kvstore.catalog.popularity import Popularity
from kvstore.operator.patch import PatchKind
from kvstore.records.keys import DYNAMIC_TENANT
from prefill_workers.modes import FreeText, Mode, OperatingPoint, Text
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest, LinkResult
from serving.errors import RoleUnavailable
from serving.placement.orderer import LinkCosts, PatchAwareOrderer
from serving.placement.patch_feed import PatchFeed, follow
from serving.placement.search import Problem, place

PREFIX = (7, 8)
SCOPE = Scope("acme", prefix_key(PREFIX))


def request(contents: str | list[str], tenant: str = "acme") -> LinkRequest:
    spans = tuple(ChunkSpan(content, "image", 10 * i, 10 * i + 10, 10 * i + 1, 8) for i, content in enumerate(contents))
    return LinkRequest("request", [], spans, tenant=tenant, prefix=PREFIX)


def outcome(kind: PatchKind | None = None, missed: bool = True, tokens: int = 10) -> ChunkOutcome:
    if kind is None:
        return ChunkOutcome(tokens, OperatingPoint.RECOMPUTED, 0, "", missed=missed)
    point = OperatingPoint.COMPOSED if kind is PatchKind.composed else OperatingPoint.PATCHED
    return ChunkOutcome(tokens, point, 0, "", 32, kind)


def result(*outcomes: ChunkOutcome, reused: int = 0, computed: int = 0, **stages_ms: float) -> LinkResult:
    compute_ms, select_ms = (stages_ms.pop(stage, 0.0) for stage in ("forward", "select"))
    return LinkResult("lease", {}, outcomes, reused, computed, stages_ms, compute_ms=compute_ms, select_ms=select_ms)


def problem(
    orderer: PatchAwareOrderer,
    contents: Sequence[str],
    groups: Sequence[int | None] | None = None,
    tenant: str = "acme",
    prefix: Sequence[int] = PREFIX,
) -> Problem:
    """As a request has it, which counts first."""
    orderer.popularity.observe(tenant, contents)
    return orderer.problem(list(contents), groups or [0] * len(contents), tenant, prefix)


def order(
    orderer: PatchAwareOrderer, contents: str, tenant: str = "acme", groups: list[int | None] | None = None
) -> str:
    found = place(problem(orderer, contents, groups, tenant)).order
    return "".join(contents[chunk] for chunk in found)


def test_a_link_teaches_which_own_patches_are_stored():
    orderer = PatchAwareOrderer()
    orderer.learn(request("cab"), result(*[outcome(PatchKind.own)] * 3))
    assert order(orderer, "abc") == "cab"
    assert order(orderer, "abc", tenant="another") == "abc"
    assert place(problem(orderer, "abc", prefix=())).order == (0, 1, 2), "another prefix"


def test_what_is_keyed_by_text_is_learnt_of_that_text_alone():
    orderer = PatchAwareOrderer(free_text=FreeText(between=2, before=2))

    def between(words: list[int], text: Text = Text.AUTO) -> LinkRequest:
        first, second = (ChunkSpan(name, "image", at, at + 1, at, 1) for name, at in (("a", 0), ("b", 1 + len(words))))
        return LinkRequest("request", [0, *words, 0], (first, second), prefix=PREFIX, tenant="acme", text=text)

    orderer.learn(between([1, 2, 3]), result(*[outcome(PatchKind.own)] * 2))
    assert orderer.patched(between([1, 2, 3])) == (True, True)
    assert orderer.patched(between([1, 2, 4])) == orderer.patched(between([1, 2])) == (True, False)
    assert orderer.patched(between([1, 2, 3], Text.FREE)) == (True, False)
    orderer.learn(between([1, 2]), result(*[outcome(PatchKind.own)] * 2))
    orderer.learn(between([1, 2, 4]), result(outcome(PatchKind.own), outcome()))
    assert orderer.patched(between([])) == (True, True), "what that text misses is stored without it"
    assert orderer.patched(replace(between([]), mode=Mode.FULL_REUSE)) == ()


def test_a_link_that_misses_a_patch_takes_it_out_of_the_index():
    orderer = PatchAwareOrderer()
    entry = Entry(SCOPE, "b", ("a",), ordered=True)
    orderer.formed([entry, Entry(SCOPE, "b", ("a",), ordered=False)])
    switched_off = result(outcome(missed=False), outcome(missed=False))
    orderer.learn(request("ab"), switched_off)
    assert len(orderer.index) == 2, "it was not looked for"
    orderer.learn(request("ab"), result(outcome(), outcome()))
    assert len(orderer.index) == 0


def test_a_sum_of_pairs_is_no_stored_patch():
    orderer = PatchAwareOrderer()
    orderer.learn(request("ab"), result(outcome(PatchKind.orbit), outcome(PatchKind.composed)))
    assert len(orderer.index) == 1


def test_sums_of_known_pairs_are_counted_where_they_are_used():
    pairs = [Entry(SCOPE, content, before, ordered=False) for content in "abc" for before in ((), *zip("abc"))]
    pairs = [entry for entry in pairs if entry.content not in entry.antecedents]
    orderer, without = PatchAwareOrderer(compose_up_to=2), PatchAwareOrderer()
    for each in (orderer, without):
        each.formed(pairs)
    summed, plain = (place(problem(each, "abc")) for each in (orderer, without))
    costs = orderer.costs
    assert summed.cost == 2 * costs.of(256, patched=True) + costs.of_sum(256)
    assert plain.cost == 2 * costs.of(256, patched=True) + costs.of(256, patched=False)
    assert costs.of(256, patched=True) < costs.of_sum(256) < costs.of(256, patched=False)


def test_a_sum_that_was_missed_takes_its_pairs_out_of_the_index():
    orderer = PatchAwareOrderer(compose_up_to=2)
    pairs = [Entry(SCOPE, "c", before, ordered=False) for before in ((), ("a",), ("b",))]
    orderer.formed([*pairs, Entry(SCOPE, "b", ("a",), ordered=False)])
    found = [outcome(PatchKind.own), outcome(PatchKind.pair)]
    orderer.learn(request("abc"), result(*found, outcome(PatchKind.composed)))
    assert all(entry in orderer.index for entry in pairs)
    orderer.learn(request("abc"), result(*found, outcome()))
    assert not any(entry in orderer.index for entry in pairs)
    assert Entry(SCOPE, "b", ("a",), ordered=False) in orderer.index


def test_while_sums_are_switched_off_no_order_counts_on_them_and_none_that_is_missed_costs_its_pairs():
    orderer = PatchAwareOrderer(compose_up_to=2)
    pairs = [Entry(SCOPE, "c", before, ordered=False) for before in ((), ("a",), ("b",))]
    orderer.formed(pairs)
    orderer.sums_allowed = False
    orderer.learn(request("abc"), result(outcome(PatchKind.own), outcome(PatchKind.pair), outcome()))
    assert all(entry in orderer.index for entry in pairs)
    orderer.sums_allowed = True  # as far as this ingress has heard
    missed = replace(outcome(), sums_off=True)
    orderer.learn(request("abc"), result(outcome(PatchKind.own), outcome(PatchKind.pair), missed))
    assert all(entry in orderer.index for entry in pairs)
    sums = []
    for orderer.sums_allowed in (False, True):
        sums.append(problem(orderer, "abc").stored.sums)
    assert sums == [{}, {0b011: 0b100}]


def test_while_patches_are_switched_off_no_order_and_no_worker_is_chosen_for_any():
    orderer = PatchAwareOrderer(compose_up_to=2)
    orderer.learn(request("ab"), result(*[outcome(PatchKind.own)] * 2))
    for orderer.patches_allowed, patched in ((False, (False, False)), (True, (True, True))):
        assert orderer.patched(request("ab")) == patched
        assert bool(problem(orderer, "ab").stored.sequences) == orderer.patches_allowed


def test_no_sum_serves_a_list_in_which_a_chunk_comes_twice():
    """The linker sums none there: no pair was read behind the same page twice."""
    orderer = PatchAwareOrderer(compose_up_to=3)
    orderer.formed([Entry(SCOPE, "c", before, ordered=False) for before in ((), ("a",), ("b",))])
    assert orderer.patched(request("abc"))[-1]
    assert not orderer.patched(request("aabc"))[-1]
    assert not orderer.patched(request("acbc"))[-1]


def test_parts_of_a_sum_may_lie_with_the_tenant_and_with_everybody():
    orderer = PatchAwareOrderer(compose_up_to=2)
    everybody = Scope(DYNAMIC_TENANT, SCOPE.prefix)
    contents = ["shared-a", "b", "shared-c"]
    parts = [Entry(everybody, "shared-c", part, ordered=False) for part in ((), ("shared-a",))]
    parts.append(Entry(SCOPE, "shared-c", ("b",), ordered=False))
    orderer.formed(parts)
    assert problem(orderer, contents).stored.sums == {0b011: 0b100}
    orderer.learn(request(contents), result(outcome(), outcome(), outcome()))
    assert not any(part in orderer.index for part in parts)


def test_a_patch_is_known_for_this_order_for_the_set_or_by_a_sum_of_parts():
    orderer = PatchAwareOrderer(compose_up_to=2)

    def known(contents: str) -> str:
        patched = orderer.patched(request(contents))
        return "".join(chunk if fits else "-" for chunk, fits in zip(contents, patched, strict=True))

    assert known("abc") == "---"
    orderer.learn(request("abc"), result(*[outcome(PatchKind.own)] * 3))
    assert (known("abc"), known("bac"), orderer.patched(request("abc", "other"))) == ("abc", "---", (False,) * 3)
    orderer.learn(request("abc"), result(*[outcome(PatchKind.orbit)] * 3))
    assert known("bac") == "--c", "behind the set; nothing is known of the others in these places"
    for pair in ("bd", "cd", "d"):
        orderer.learn(request(pair), result(*[outcome(PatchKind.orbit)] * len(pair)))
    assert known("abcd") == "abc-", "a sum of three"
    assert known("bcd") == "b-d"
    orderer.sums_allowed = False
    assert known("bcd") == "b--"


def test_patches_of_references_serve_every_tenant():
    orderer = PatchAwareOrderer()
    shared = ["shared-a", "shared-b"]
    orderer.formed([Entry(Scope(DYNAMIC_TENANT, SCOPE.prefix), content, (), ordered=False) for content in shared[1:]])
    orderer.formed([Entry(Scope(DYNAMIC_TENANT, SCOPE.prefix), "shared-a", ("shared-b",), ordered=False)])
    assert place(problem(orderer, shared)).order == (1, 0)


def test_what_a_tenant_often_asks_for_comes_first_for_that_tenant():
    orderer = PatchAwareOrderer()
    for _ in range(3):
        order(orderer, "ab", groups=[None, None])
        order(orderer, "b", groups=[None])
    assert order(orderer, "ab") == "ba"
    assert order(orderer, "ab", tenant="another") == "ab"


def test_chunks_that_came_together_only_have_one_order_however_they_are_sent():
    orderer = PatchAwareOrderer()
    assert {order(orderer, "".join(sent)) for sent in permutations("cab")} == {"abc"}


def test_popularity_fades():
    popularity = Popularity(remembered=10)
    for content in ["old"] * 20 + ["new"] * 12:
        popularity.observe("acme", [content])
    assert popularity.share("acme", "new") > popularity.share("acme", "old") > 0
    assert popularity.share("acme", "new") + popularity.share("acme", "old") == pytest.approx(1)


def test_popularity_is_bounded_and_never_overflows():
    popularity = Popularity(remembered=1, limit=3)
    for number in range(2000):
        popularity.observe("acme", ["always", str(number)])
    assert popularity.share("acme", "always") > popularity.share("acme", "1999") > 0
    assert popularity.share("acme", "1000") == 0


def test_costs_follow_measured_links():
    costs = LinkCosts()
    for _ in range(2000):
        costs.learn(result(computed=1000, reused=500, forward=4000.0, place=25.0))
    assert costs.of(100, patched=False) == pytest.approx(100 * 4e6, rel=1e-3)
    assert costs.of(100, patched=True) == pytest.approx(100 * 5e4, rel=1e-3)


def test_weighing_costs_what_links_with_sums_took_for_it_remembered_weights_nothing():
    costs = LinkCosts()
    sums = [outcome(PatchKind.own, tokens=100), outcome(PatchKind.composed, tokens=300)]
    for number in range(2000):
        costs.learn(result(*sums, select=60.0 if number % 2 else 0.0))
    assert costs.of_sum(100) - costs.of(100, patched=True) == pytest.approx(100 * 1e5, rel=0.02)
    before = costs.weigh
    costs.learn(result(outcome(PatchKind.own), select=500.0))  # another mode's choice of tokens
    assert costs.weigh == before


def test_a_tiny_forward_says_nothing_of_the_cost_of_a_token():
    costs = LinkCosts()
    before = costs.forward, costs.place
    costs.learn(result(computed=8, forward=500.0))
    assert (costs.forward, costs.place) == before


def test_chunks_cost_by_the_tokens_that_were_linked():
    orderer = PatchAwareOrderer()
    orderer.learn(request("ab"), result(outcome(tokens=300), outcome(tokens=100)))
    large, small = problem(orderer, "ab").chunks
    assert large.computed == pytest.approx(3 * small.computed)


def test_deleted_content_is_forgotten():
    orderer = PatchAwareOrderer()
    orderer.learn(request("ab"), result(*[outcome(PatchKind.own)] * 2))
    orderer.forget("a", "acme")
    assert len(orderer.index) == 0


class Roles:
    """Two replicas that have formed something; the first question goes unanswered."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int]] = []

    async def formed(self, cursors: Any) -> list[PatchFeed]:
        self.asked.append(dict(cursors))
        if len(self.asked) == 1:
            raise RoleUnavailable("starting")
        if len(self.asked) == 4:
            raise KeyboardInterrupt  # ends `follow`
        entry = Entry(SCOPE, f"page {len(self.asked)}", (), ordered=True)
        return [
            PatchFeed("one", len(self.asked), [entry]),
            PatchFeed("two", 0, [], len(self.asked) == 3, len(self.asked) == 3),
        ]


async def test_what_replicas_formed_is_asked_for_again_and_again():
    orderer, roles = PatchAwareOrderer(), Roles()
    heard: list[bool] = []
    formed = orderer.formed

    def hear(entries: Any) -> None:
        heard.append(orderer.patches_allowed and orderer.sums_allowed)
        formed(entries)

    orderer.formed = hear
    with pytest.raises(KeyboardInterrupt):
        await follow(roles, orderer, 0.001)
    assert heard == [False, False, True, True], "one replica that has switched them off is enough"
    assert roles.asked == [{}, {}, {"one": 2, "two": 0}, {"one": 3, "two": 0}]
    assert len(orderer.index) == 2
