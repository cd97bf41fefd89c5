"""Compaction: how many entries stay, which, and what the others become."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from prefill_workers.compaction.plan import (
    COVERED,
    OBSERVERS,
    SINKS,
    CompactionPlan,
    compaction_plan,
    observed,
    placeholder_ids,
)
from prefill_workers.compaction.reduction import anchors, buckets, coverage, importance, means
from prefill_workers.protocol import ChunkSpan, Compaction, CompactionPolicy, LinkRequest
from prefill_workers.scheduler.observers import observers
from prefill_workers.sequence import Run

EVICT, COVER, MERGE, PAPER = CompactionPolicy
BLOCK = 16


class Sequence(list):
    """Tokens and blocks of a linked prompt."""

    blocks = (1, 2)

    def __init__(self, tokens: int) -> None:
        super().__init__(range(tokens))


def request(n: int = 200, budget: float = 0.3, policy: CompactionPolicy = EVICT, **options: int) -> LinkRequest:
    """A prompt with images at 20 to 60 and 70 to 150, between delimiters of a token each."""
    chunks = [ChunkSpan("a", "image", 19, 61, 20, 40), ChunkSpan("b", "image", 69, 151, 70, 80)]
    return LinkRequest("request", list(range(n)), tuple(chunks), compaction=Compaction(budget, policy, **options))


def planned(**options) -> CompactionPlan:
    plan = compaction_plan(request(**options), BLOCK)
    assert plan is not None
    return plan


def test_words_that_choose_are_computed_though_an_earlier_prompt_had_them():
    assert observed(request()) == observed(request(policy=MERGE)) == OBSERVERS
    assert observed(request(n=160)) == 9, "no image is computed again for it"
    assert observed(request(n=151)) == observed(request(budget=1.0)) == observed(request(policy=COVER)) == 1


@pytest.mark.parametrize("policy", CompactionPolicy)
def test_a_full_budget_leaves_everything_as_it_is(policy: CompactionPolicy):
    assert compaction_plan(request(budget=1.0, policy=policy), BLOCK) is None


def test_entries_fill_their_last_block_but_for_the_first_tokens_slot():
    plan = planned(budget=0.3)
    assert (plan.kept, plan.shift) == (63, -137)
    assert compaction_plan(request(budget=0.99), BLOCK) is None, "a budget that saves no block saves nothing"


def test_the_last_turns_text_stays_up_to_half_of_the_entries():
    assert planned(budget=0.6).reducible == (Run(SINKS, 151),)
    assert planned(budget=0.2).reducible == (Run(SINKS, 180),)


def test_merging_keeps_all_text_whatever_the_budget():
    plan = planned(budget=0.1, policy=MERGE)
    assert plan.reducible == (Run(20, 60), Run(70, 150))
    assert plan.kept >= 80 + 2
    text = LinkRequest("request", [0] * 200, compaction=Compaction(0.2, MERGE))
    assert compaction_plan(text, BLOCK) is None


def test_entries_are_no_fewer_than_asked_for():
    assert planned(budget=0.05, least=100).kept >= 100


@pytest.mark.parametrize("policy", CompactionPolicy)
@pytest.mark.parametrize("seed", range(5))
def test_every_layer_keeps_as_many_anchors_in_order_and_what_may_not_be_reduced(policy: CompactionPolicy, seed: int):
    plan = planned(budget=0.45, policy=policy)
    scores = torch.rand(3, plan.tokens, generator=torch.Generator().manual_seed(seed))
    at = anchors(scores, plan)
    assert at.shape == (3, plan.kept)
    assert bool((at.diff() > 0).all())
    reducible = {t for run in plan.reducible for t in range(run.start, run.stop)}
    for layer, mine in enumerate(at.tolist()):
        assert set(mine) >= set(range(plan.tokens)) - reducible
        chosen, left = set(mine) & reducible, reducible - set(mine)
        forced = {0} if policy is PAPER else set()
        if policy is MERGE:
            forced = {run.start + int(scores[layer, run.start : run.stop].argmax()) for run in plan.reducible}
        assert min(float(scores[layer, t]) for t in chosen - forced) >= max(float(scores[layer, t]) for t in left)


@pytest.mark.parametrize("policy", [MERGE, PAPER])
@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_nearest_anchors_and_never_leave_their_run(policy: CompactionPolicy, seed: int):
    plan = planned(budget=0.45, policy=policy)
    at = anchors(torch.rand(2, plan.tokens, generator=torch.Generator().manual_seed(seed)), plan)
    for mine, bucket in zip(at.tolist(), buckets(at, plan).tolist(), strict=True):
        assert set(bucket) == set(range(plan.kept)), "none is empty"
        for t, b in enumerate(bucket):
            run = next((run for run in plan.reducible if run.start <= t < run.stop), Run(t, t + 1))
            inside = [a for a in mine if run.start <= a < run.stop]
            assert mine[b] in inside
            assert abs(mine[b] - t) == min(abs(a - t) for a in inside)
            lower = [a for a in inside if abs(a - t) == abs(mine[b] - t)]
            assert mine[b] == min(lower), "midpoints belong to the left"


def test_means_are_means_of_each_bucket():
    kv = torch.randn(5, 3, dtype=torch.float64)
    reduced = means(kv, torch.tensor([0, 0, 1, 2, 2]), 3)
    expected = torch.stack([kv[:2].mean(0), kv[2], kv[3:].mean(0)])
    assert torch.allclose(reduced, expected.float())


def test_importance_sums_over_queries_and_averages_heads():
    attention = torch.rand(2, 3, 4, 7)  # two KV heads with three queries each, four tokens
    parts = attention.split(2, dim=2)
    assert torch.allclose(importance(parts), attention.sum(2).mean((0, 1)))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(EVICT, [(Run(18, 30), 168), (Run(30, 50), 180)]), (PAPER, [(Run(10, 30), 160), (Run(30, 50), 180)])],
)
def test_observed_are_the_last_tokens_of_links_that_the_forward_ends(
    policy: CompactionPolicy, expected: list[tuple[Run, int]]
):
    other, mine = (
        SimpleNamespace(plan=SimpleNamespace(sequence=Sequence(200)), compaction=plan, name="lease")
        for plan in (None, planned(policy=policy))
    )
    work = [(other, [Run(50, 60)]), (mine, [Run(160, 180), Run(180, 200)])]
    found = list(observers(work, [0, 1]))
    assert [(one.tokens, one.first) for one in found] == expected
    assert {(one.link, one.blocks) for one in found} == {("lease", (1, 2))}
    assert list(observers(work, [0])) == []


def test_covering_observes_nobody():
    job = SimpleNamespace(plan=SimpleNamespace(sequence=Sequence(200)), compaction=planned(policy=COVER), name="lease")
    assert list(observers([(job, [Run(160, 200)])], [0])) == []


def test_groups_are_chunks_and_the_text_between_them_in_parts_that_are_not_too_long():
    assert planned(budget=0.6, policy=COVER).groups == (
        Run(4, 20), Run(20, 60), Run(60, 70), Run(70, 150), Run(150, 151)
    )  # fmt: skip
    text = LinkRequest("request", [0] * 5000, compaction=Compaction(0.2, COVER))
    plan = compaction_plan(text, BLOCK)
    assert plan is not None
    assert max(map(len, plan.groups)) <= COVERED
    assert [run.start for run in plan.groups[1:]] == [run.stop for run in plan.groups[:-1]]
    assert sum(map(len, plan.groups)) == sum(map(len, plan.reducible))


def farthest_first(rows: torch.Tensor, count: int) -> list[int]:
    """The greedy choice by its definition."""
    chosen = [int((rows - rows.mean(0)).norm(dim=1).argmax())]
    while len(chosen) < count:
        chosen.append(int(torch.cdist(rows, rows[chosen]).min(1).values.argmax()))
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_of_every_group_the_same_share_stays_and_it_is_what_lies_farthest_apart(seed: int):
    plan = planned(budget=0.45, policy=COVER)
    rows = torch.randn(plan.tokens, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (at,) = anchors(coverage(rows, plan, lambda part: part)[None], plan).tolist()
    share = (plan.kept - plan.tokens) / sum(map(len, plan.groups)) + 1
    for group in plan.groups:
        mine = [token - group.start for token in at if group.start <= token < group.stop]
        assert abs(len(mine) - share * len(group)) <= 1
        assert set(mine) == set(farthest_first(rows[group.start : group.stop], len(mine)))


def test_ranks_that_have_some_features_each_choose_alike():
    plan = planned(budget=0.3, policy=COVER)
    rows = torch.randn(plan.tokens, 8, generator=torch.Generator().manual_seed(7))
    whole: list[torch.Tensor] = []
    coverage(rows[:, :4], plan, lambda part: whole.append(part) or part)
    first = coverage(rows[:, 4:], plan, lambda part: part + whole[0])
    assert torch.equal(first.sign(), coverage(rows, plan, lambda part: part).sign())


def test_tokens_that_are_all_alike_are_covered_by_any():
    plan = planned(budget=0.3, policy=COVER)
    scores = coverage(torch.ones(plan.tokens, 4), plan, lambda part: part)
    assert len(set(anchors(scores[None], plan)[0].tolist())) == plan.kept
    assert int((scores > 0).sum()) >= plan.kept - (plan.tokens - sum(map(len, plan.groups)))


def test_placeholders_end_like_the_prompt_and_name_all_of_its_ids():
    ids = [5, 6, 7, 5, 8, 9, 6]
    assert placeholder_ids(ids, 7) == ids
    short = placeholder_ids(ids, 6)
    assert (len(short), set(short), short[-1]) == (6, set(ids), 6)
    assert placeholder_ids(ids, 2) == [9, 6]


@pytest.mark.parametrize("kept", range(1, 60))
def test_placeholders_keep_as_much_of_the_prompts_end_as_all_other_ids_leave_room_for(kept: int):
    ids = torch.randint(0, 20, (60,), generator=torch.Generator().manual_seed(kept)).tolist()
    found = placeholder_ids(ids, kept)
    assert len(found) == kept
    if len(set(ids)) > kept:
        assert found == ids[-kept:]
        return
    assert set(found) == set(ids)
    stay = next(n for n in range(kept, 0, -1) if found[-n:] == ids[-n:])
    others = found[: kept - stay]
    last = {token: at for at, token in enumerate(ids)}
    assert [last[token] for token in others] == sorted(last[token] for token in others)
    assert len(set(others)) == len(others)
    assert not set(others) & set(ids[-stay:]), "room for a longer end"
