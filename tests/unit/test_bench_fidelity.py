"""The pure parts of the fidelity benchmark: scores, intervals, and which tokens arms choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fidelity_records import recorded
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor

from infra.reference import DEFAULT_MODEL, digest, weights
from infra.reference.families import FAMILIES
from infra.reference.scenes import Split
from kvstore.basis import pool_basis
from kvstore.factor import SCALE_BYTES
from kvstore.layout import Layout
from kvstore.patch import PatchKind, compose
from prefill_workers.composing import measured_weights, weighted_sum
from prefill_workers.keys import contexts
from prefill_workers.measured import measured
from prefill_workers.plan import ChunkSpan, LinkRequest
from prefill_workers.selection import MEASURED_LAYER
from prefill_workers.settings import FREE_TEXT, FidelitySettings
from serving.bench.fidelity import envelope, masses, online, prefix, storage
from serving.bench.fidelity.arms import TOKEN_ARMS, Arms, PageKV, Repaired, computed_share
from serving.bench.fidelity.bench import (
    BENCHMARK,
    COMPOSE_UP_TO,
    KINDS,
    MARGIN,
    MULTI_HOP,
    TARGETS,
    figures_of,
    to_be_kept,
)
from serving.bench.fidelity.composition import BEHIND, holds_up_to
from serving.bench.fidelity.reader import Page, Place, Prompt, _kept
from serving.bench.fidelity.scores import Scores, figures, margin, median, share, summary
from serving.bench.fidelity.shape import Shape
from serving.bench.fidelity.tables import BUDGETS, BY_LAYERS, margins

TOKENS = 12
HIDDEN = 32


def answers(best: int, sure: float = 0.9) -> Tensor:
    """Log-probabilities [1, 4] with one likeliest token."""
    rest = (1 - sure) / 3
    return torch.tensor([[sure if token == best else rest for token in range(4)]]).log()


def scored(*tops: int, wanted: int = 1) -> Scores:
    scores = Scores()
    for top in tops:
        scores.add(answers(top), answers(wanted), (wanted,))
    return scores


def test_scores_of_arms_against_exact_and_blind():
    exact, blind = scored(*[1] * 40), scored(*[1, 2] * 20)
    half = scored(*[1, 1, 1, 2] * 10)
    found = figures(half, blind, exact)
    assert found["accuracy"].value == pytest.approx(0.75)
    assert found["eta"].value == pytest.approx(0.5)
    assert found["flip_recover"].value == pytest.approx(0.5)
    one = math.log(0.9 / (0.1 / 3)) * (0.9 - 0.1 / 3)  # KL between two of these distributions
    assert found["kl"].value == pytest.approx(one / 4, rel=1e-5)
    for interval in found.values():
        assert interval.low <= interval.value <= interval.high
    assert found["accuracy"].high - found["accuracy"].low == pytest.approx(
        2 * 1.96 * math.sqrt(0.75 * 0.25 / 40), rel=0.2
    )


def test_what_is_undefined_is_left_out():
    exact = scored(*[1] * 20)
    found = figures(exact, exact, exact)
    assert "eta" not in found
    assert "flip_recover" not in found


def test_an_answer_of_two_tokens_is_right_only_as_a_whole():
    scores = Scores()
    scores.add(torch.cat([answers(1), answers(2)]), torch.cat([answers(1), answers(3)]), (1, 3))
    assert scores.right == [False]


@pytest.fixture(params=[GQA, MLA], ids=["gqa", "mla"])
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def page(layout: Layout) -> PageKV:
    canonical = random_kv(layout, TOKENS, seed=1).float()
    delta = random_kv(layout, TOKENS, seed=2).float()
    delta[0] = 0
    delta[1] *= torch.linspace(0.1, 2.0, TOKENS).roll(3)[:, None]
    return PageKV(canonical, canonical + delta, asked=torch.arange(TOKENS) == 5)


def test_token_arms_choose_what_their_names_say(layout: Layout, page: PageKV):
    arms = Arms(layout, torch.float32, HIDDEN)
    assert arms.mpic(3)(page).again.tolist() == [0, 1, 2]
    assert len(arms.mpic(99)(page).again) == TOKENS
    deviation = page.delta[1].norm(dim=-1)
    chosen = arms.cacheblend(0.25)(page).again
    assert chosen.tolist() == sorted(deviation.topk(3).indices.tolist())
    first = arms.first(2)(page)
    assert torch.equal(first.kv[:, :2], page.exact[:, :2])
    assert torch.equal(first.kv[:, 2:], page.canonical[:, 2:])
    asked = arms.oracle(0.05, asked=True)(page)
    assert torch.equal(asked.kv[:, 5], page.exact[:, 5])
    deep = arms.deep_layers(0.5)(page)
    deepest = [index >= layout.layers - round(layout.layers / 2) for index in range(layout.layers)]
    assert changed(deep.kv, page) == [False, *deepest[1:]]  # the first layer has no deficit
    shallow = arms.shallow_layers(2 / layout.layers)(page)
    assert changed(shallow.kv, page) == [index == 1 for index in range(layout.layers)]
    assert (shallow.computed(0), shallow.nbytes) == (2 / layout.layers, 0)


def changed(kv: Tensor, page: PageKV) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(kv, page.canonical, strict=True)]


def test_a_partial_prefill_computes_the_deep_layers_of_every_token(layout: Layout, page: PageKV):
    repaired = Arms(layout, torch.float32, HIDDEN).reprefill(0.5)(page)
    assert repaired.again.tolist() == list(range(TOKENS))
    assert repaired.apart == layout.layers - round(layout.layers / 2)
    assert repaired.computed(0) == round(layout.layers / 2) / layout.layers
    assert repaired.nbytes == TOKENS * HIDDEN * 4  # the hidden states where the deep layers begin


def test_what_one_page_measures_is_computed_of_all_pages_before_it(layout: Layout):
    def page(tokens: int, measured: int = 0, again: int = 0) -> Repaired:
        return Repaired(torch.zeros(layout.layers, tokens, layout.features), torch.arange(again), measured=measured)

    first, behind = 2 / layout.layers, [page(TOKENS), page(TOKENS)]
    assert computed_share([*behind, page(TOKENS, measured=2)]) == pytest.approx(first)
    assert computed_share([page(TOKENS, measured=2), *behind]) == pytest.approx(first / 3)
    assert computed_share([page(3 * TOKENS), page(TOKENS, measured=2), page(TOKENS)]) == pytest.approx(first * 4 / 5)
    # of a page whose tokens are computed again, all in the measured layers and those tokens in the others
    again = first + (1 - first) * 3 / TOKENS
    assert computed_share([page(TOKENS, again=3), page(TOKENS, measured=2)]) == pytest.approx((again + first) / 2)


@pytest.mark.parametrize("percent", [12, 25, 50])
def test_arms_at_equal_bytes_spend_what_they_may_and_no_more(layout: Layout, percent: int):
    """Of a page long enough that a direction costs less than its share."""
    canonical = random_kv(layout, 48, seed=1).float()
    page = PageKV(canonical, canonical + random_kv(layout, 48, seed=2).float(), asked=torch.arange(48) == 5)
    arms = Arms(layout, torch.float32, HIDDEN)
    within = arms.within(percent, pool_basis([arms.formed(page.delta, 8)], 8))
    allowed = percent / 100 * canonical.nbytes
    spent = {arm.removesuffix(f"_within_{percent}"): made(page).nbytes for arm, made in within.items()}
    assert all(nbytes <= allowed for nbytes in spent.values())
    assert {spent[arm] for arm in TOKEN_ARMS} == {canonical.nbytes // 48 * int(percent / 100 * 48)}
    more = arms.own(page, 1).nbytes  # of one direction everywhere: another would not fit
    assert spent["patch"] > allowed - more
    assert spent["lowrank_k"] > 0


def test_a_patch_is_cut_where_its_directions_are_ordered(layout: Layout):
    """Also where a segment is narrower than the rank, which leaves that segment at its full rank (MLA's k_pe)."""
    canonical = random_kv(layout, 48, seed=1).float()
    page = PageKV(canonical, canonical + random_kv(layout, 48, seed=2).float())
    arms = Arms(layout, torch.float32, HIDDEN)
    for rank in (1, 4, 8, 15, 16, 31, 47, 48, 64):
        cut, formed = arms.own(page, rank), arms.formed(page.delta, rank)
        assert cut.nbytes == formed.nbytes
        torch.testing.assert_close(cut.dense(), formed.dense(), rtol=1e-4, atol=1e-4)


def test_energy_by_rank_and_by_tokens(layout: Layout):
    """A deficit of two equal directions over half of the tokens, in all layers but the first."""
    canonical = random_kv(layout, TOKENS, seed=1).float()
    delta = torch.zeros_like(canonical)
    start = 0
    for segment in layout.segments:
        delta[1:, :3, start] = 1.0
        delta[1:, 3:6, start + 1] = 1.0
        start += segment.features
    shape = Shape(layout)
    shape.add(PageKV(canonical, canonical + delta))
    tables = shape.tables()
    for segment in layout.segments:
        held = tables["energy by rank"][f" {segment.name}"]
        assert held["1"] == pytest.approx(0.5, abs=1e-5)
        assert held["2"] == held["64"] == pytest.approx(1.0, abs=1e-5)
    assert tables["energy by tokens"][""]["50%"] == pytest.approx(1.0, abs=1e-5)
    assert tables["energy by tokens"][""]["25%"] == pytest.approx(0.5, abs=1e-5)
    assert tables["deficit spread"][""] == {"tokens for 90%": 0.5, "directions for 90%": 2}
    by_layer = list(tables["deficit norm by layer"][""].values())
    assert by_layer[0] == 0.0
    assert min(by_layer[1:]) > 0.0


def prompt(pages: int = 3, cells: int = 20) -> Prompt:
    """Four tokens of text, pages of `cells` tokens between delimiters, six tokens of text, an answer of one."""
    span = ChunkSpan("page", "image", 0, cells + 2, 1, cells)
    page = Page((7, *[8] * cells, 9), span, torch.zeros(cells, HIDDEN))
    places = tuple(Place(page, 4 + (cells + 2) * i, 0) for i in range(pages))
    tokens = torch.zeros(4 + (cells + 2) * pages + 6, dtype=torch.int32)
    return Prompt(tokens, torch.arange(len(tokens)), places, (1,))


def test_prefix_caching_takes_over_whole_blocks_of_leading_pages():
    one = prompt()  # 76 tokens
    assert prefix.cached(one, leading=3, block=4) == 72  # all but the last token, in whole blocks
    assert prefix.cached(one, leading=1, block=4) == 24  # 4 + 22 + the second page's delimiter
    assert prefix.cached(one, leading=1, block=1) == 27
    assert prefix.cached(one, leading=0, block=16) == 0
    assert prefix.computed(one, "other text") == 1.0
    assert prefix.computed(one, "same") == pytest.approx(6 / 66)  # 64 tokens reused
    # one of the five other orders begins with the same page: 16 tokens, four of which are text
    assert prefix.computed(one, "another order") == pytest.approx((4 + 54 / 66) / 5)


def test_patches_come_closer_with_rank(layout: Layout, page: PageKV):
    arms = Arms(layout, torch.float32, HIDDEN)
    errors = [float((arms.patch(rank)(page).kv - page.exact).norm()) for rank in (1, 2, 4, None)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_tokens_that_are_not_computed_again_stay():
    assert _kept(10, 16, None) == [(10, 16)]
    assert _kept(10, 16, torch.tensor([0, 1, 4])) == [(12, 14), (15, 16)]
    assert _kept(10, 12, torch.tensor([0, 1])) == []


def test_forms_that_are_compared_take_the_same_bytes(layout: Layout, page: PageKV):
    rank = 2
    sizes = {
        name: form.form(page.delta, layout, PatchKind.own, torch.bfloat16).nbytes
        for name, form in storage._forms(rank).items()
    }
    directions = rank * layout.layers * len(layout.segments)
    scales = SCALE_BYTES * directions
    assert sizes["int8"] == sizes["uniform"] + scales  # twice as many directions in half the bytes each
    assert 0.8 < sizes["spread"] / sizes["uniform"] <= 1
    assert 0.8 < sizes["int8_spread"] / sizes["int8"] <= 1


def test_a_summary_holds_what_is_defined_with_its_uncertainty():
    rows = summary({"exact": scored(*[1] * 40), "blind": scored(*[1, 2] * 20), "half": scored(*[1, 1, 1, 2] * 10)})
    assert rows["half"]["eta"] == pytest.approx(0.5)
    assert rows["half"]["eta ±"] > 0.0
    assert rows["half"]["computed"] == 0.0
    assert "eta" not in summary({"exact": scored(1), "blind": scored(1)})["blind"]


def test_shares_and_medians_have_intervals_over_items():
    outcomes = np.asarray([[True, False]] * 50 + [[False, False]] * 50)
    assert share(outcomes)["share"] == 0.25
    assert 0.03 < share(outcomes)["share ±"] < 0.07, "an item's two outcomes count as one"
    assert median([1.0] * 10 + [2.0] * 90) == {"median": 2.0, "median ±": 0.0}
    assert median([1.0] * 50 + [2.0] * 50)["median ±"] > 0.2


def test_entries_of_one_item_are_drawn_together():
    """Two items of 20 entries each, of which one is closed and one is not, tell no more than two entries."""
    closed = {"exact": scored(*[1] * 40), "blind": scored(*[2] * 40), "half": scored(*[1] * 20, *[2] * 20)}
    apart, together = (summary(closed, rows)["half"]["accuracy ±"] for rows in (1, 20))
    assert apart < 0.2
    assert together == pytest.approx(0.5)


def test_the_margin_is_over_the_best_tokens_and_only_where_blind_reuse_loses():
    arms = {f"{arm}_within_25": {"eta": eta} for arm, eta in zip(TOKEN_ARMS, (0.1, 0.7, 0.2, 0.4), strict=True)}
    arms |= {"patch_within_25": {"eta": 0.9, "margin ±": 0.01}, "exact": {"accuracy": 1.0}}
    left = {Split.multi: 0.9, Split.single: 0.95}
    cells = margins({split: {**arms, "blind": {"accuracy": accuracy}} for split, accuracy in left.items()}, 25)
    assert cells["multi"] == pytest.approx(0.2)
    assert cells["multi ±"] == 0.01
    assert math.isnan(cells["single"])
    assert "single ±" not in cells


def test_a_margins_interval_is_of_items_that_are_drawn_for_both_arms():
    """Both close the same share of every item but for a tenth: how much is lost of an item does not matter."""
    lost = [1.0, 2.0] * 20
    blind, tokens, others, patch = (Scores(kl=[share * one for one in lost]) for share in (1.0, 0.2, 0.5, 0.1))
    found = margin(patch, {"tokens": tokens, "others": others}, blind)
    assert found.value == pytest.approx(0.1)
    assert found.uncertainty == pytest.approx(0.0, abs=1e-9)
    uneven = margin(Scores(kl=[0.0, 0.4] * 20), {"tokens": tokens}, blind)
    assert uneven.value == pytest.approx(0.2 - 0.2 / 1.5)
    assert uneven.uncertainty > 0.01
    assert margin(patch, {"tokens": tokens}, Scores(kl=[0.0] * 40)) is None


def test_figures_are_named_by_family_split_arm_and_kind():
    names = ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction", "computed")
    tables = {f"gqa: {name}": {"patch_16": {"multi": 0.5, "multi ±": 0.1, "single": float("nan")}} for name in names}
    assert figures_of("gqa", tables) == {f"gqa.multi.patch_16.{name}": 0.5 for name in names}


def measured_tables(blind: float) -> dict[str, dict[str, dict[str, float]]]:
    accuracy = {"exact": {"single": 1.0, "multi": 1.0}, "blind": {"single": 1.0, "multi": blind}}
    etas = {"patch_16": {"multi": 0.99}, "orbit": {"multi": 0.97}, "patch_64": {"multi": 1.0}}
    return {
        "mla: accuracy": accuracy,
        "mla: eta": etas,
        "mla: eta at equal bytes": {"patch_within_6": {"multi": 0.9}},
        "mla: flip_recover": {"patch_64": {"multi": 1.0}},
        f"mla: {BY_LAYERS}": {"multi reprefill": {"40%": 0.3}},
        f"mla: {MARGIN}": {f"{percent}%": {"multi": percent / 100, "single": float("nan")} for percent in BUDGETS},
    }


def test_a_run_over_one_family_is_held_to_that_familys_targets():
    figures = figures_of("mla", measured_tables(blind=0.4))
    assert figures["mla.multi.patch_within_6.eta"] == 0.9
    assert figures["mla.multi.reprefill_40.eta"] == 0.3
    assert figures["mla.multi.blind.lost"] == pytest.approx(0.6)
    assert figures["mla.multi.orbit.below_own"] == pytest.approx(0.02)
    assert figures["mla.multi.patch_within_6.margin"] == 0.06
    assert "mla.single.patch_within_6.margin" not in figures
    of_measured = [name for name in TARGETS if name.split(".")[0] in ("single", "multi")]
    assert BENCHMARK.targets_of(figures).keys() == {f"mla.{name}" for name in of_measured}
    assert BENCHMARK.targets_of(figures).keys() <= figures.keys()


def test_where_blind_reuse_loses_little_only_the_model_is_held_to_targets():
    figures = figures_of("mla", measured_tables(blind=0.95))
    left = {"single.exact.accuracy", "single.blind.lost", "multi.exact.accuracy"}
    assert set(BENCHMARK.targets_of(figures)) == {f"mla.{name}" for name in left}


def test_all_that_needs_several_pages_is_held_to_the_same_targets():
    names = [{name.partition(".")[2] for name in TARGETS if name.startswith(f"{split}.")} for split in MULTI_HOP]
    assert names[0] == names[1] == names[2]
    assert "orbit.below_own" in names[0]


def test_every_family_has_targets():
    assert BENCHMARK.targets.keys() == {f"{kind}.{name}" for kind in KINDS for name in TARGETS}


@pytest.mark.parametrize(("kind", "family"), KINDS.items())
def test_what_lies_beside_the_models_weights_is_what_the_recorded_table_says(kind: str, family: str):
    shipped, document = measured(weights(family)), recorded(kind)
    assert (shipped is None) == (document is None)
    if shipped is not None and document is not None:
        found = figures_of(kind, document["tables"])
        assert to_be_kept(kind, found) == shipped
        told = {name: value for name, value in document["figures"].items() if f".{COMPOSE_UP_TO}" in name}
        assert told
        assert told.items() <= found.items(), "by an older rule"


@pytest.mark.parametrize(("kind", "family"), KINDS.items())
def test_a_recorded_table_is_of_the_weights_that_are_shipped(kind: str, family: str):
    document = recorded(kind)
    assert document is not None
    for of in document["weights"]:
        assert of == {kind: digest(weights(family))}


def test_the_bundled_model_ships_what_was_measured_of_it():
    assert measured(weights(DEFAULT_MODEL)) is not None


def accuracies(
    exact: float | Sequence[float] = 0.9, **by_split: dict[int, float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Tables in which exact and own patches answer so many of the questions, and sums as given, by antecedents."""

    def rows(sums: dict[int, float]) -> dict[str, dict[str, float]]:
        answered = [exact] * len(sums) if isinstance(exact, float) else exact
        return {
            f"{BEHIND}{size}": {"exact": of, "own": of, "measured": right}
            for (size, right), of in zip(sums.items(), answered, strict=True)
        }

    return {split: rows(sums) for split, sums in by_split.items()}


@pytest.mark.parametrize(
    ("by_split", "expected"),
    [
        ({"multi": {2: 0.9, 3: 0.88, 4: 0.89}, "control": {3: 0.9, 6: 0.9}}, 4),
        ({"multi": {2: 0.9, 3: 0.87, 4: 0.9}}, 2),  # what holds beyond a loss is chance
        ({"multi": {2: 0.9, 3: 0.9}, "control": {3: 0.8}}, 0),  # nobody knows of 2
        ({"multi": {2: 0.9, 3: 0.9}, "chain": {2: 0.1}}, 0),
        ({"multi": {2: 0.8}}, 0),
        ({"multi": {2: math.nan}}, 0),
        ({}, 0),
    ],
)
def test_sums_hold_as_far_as_every_split_was_measured_to(by_split: dict, expected: int):
    assert holds_up_to(accuracies(**by_split)) == expected


def test_what_a_model_cannot_answer_tells_nothing_of_sums():
    answered, unanswered = accuracies(multi={2: 0.9, 3: 0.9}), accuracies(0.45, chain={2: 0.3, 3: 0.45})
    assert holds_up_to(answered | unanswered) == 3
    assert holds_up_to(unanswered) == 0


@pytest.mark.parametrize(
    ("exact", "sums", "expected"),
    [
        ([0.83, 0.99], {2: 0.83, 3: 0.96}, 2),  # answered behind three only, where sums lose
        ([0.83, 0.99], {2: 0.83, 3: 0.98}, 3),
        ([0.83, 0.99], {2: 0.7, 3: 0.99}, 0),
        ([0.95, 0.8, 0.6], {2: 0.95, 3: 0.8, 4: 0.5}, 3),
    ],
)
def test_a_split_that_is_answered_behind_some_number_is_judged_behind_all(
    exact: list[float], sums: dict, expected: int
):
    others = accuracies(multi={2: 0.9, 3: 0.9, 4: 0.9})
    assert holds_up_to(others | accuracies(exact, tally=sums)) == expected


def test_sums_are_weighed_by_what_needs_no_forward_where_that_holds_as_far():
    def kept(kind: str, by_kv: int, by_attention: int) -> dict[str, object]:
        figures = {f"{kind}.compose_up_to": by_kv, f"{kind}.compose_up_to_by_attention": by_attention}
        return to_be_kept(kind, figures).model_dump()

    assert kept("gqa", 3, 4) == {"compose_up_to": 4, "weigh_by": "attention"}
    assert kept("gqa", 3, 3) == {"compose_up_to": 3, "weigh_by": "attention"}
    assert kept("gqa", 3, 2) == {"compose_up_to": 3, "weigh_by": "kv"}
    assert kept("gqa", 0, 0) == {"compose_up_to": 0, "weigh_by": "kv"}
    assert kept("mla", 3, 3) == {"compose_up_to": 3, "weigh_by": "kv"}, "the engine does not tell its attention"


def test_relative_weights_are_those_of_the_prompt_where_distance_does_not_matter():
    ratios = torch.rand(3, 4, TOKENS, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(masses.relative_weights(ratios, ratios), masses.weights(ratios))
    assert masses.relative_weights(4 * ratios, ratios / 4).max() == 1.0


def test_weights_by_attention_add_up_what_one_layer_takes_from_each_page():
    """Of one head's attention the weighted sum of what single pages add is exactly what all of them add."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(TOKENS, size, generator=generator) * 3 for size in (7, 5, 9, TOKENS)]  # pages, and the rest
    values = [torch.randn(part.shape[1], 8, generator=generator) for part in scores]
    z = torch.stack([part.exp().sum(1) for part in scores])

    def attended(*parts: int) -> Tensor:
        return torch.cat([scores[i] for i in parts], 1).softmax(1) @ torch.cat([values[i] for i in parts])

    c = masses.weights((z[:3] / z[3])[:, None])
    alone = torch.stack([attended(i, 3) - attended(3) for i in range(3)])
    torch.testing.assert_close((c[..., None] * alone).sum(0), attended(0, 1, 2, 3) - attended(3))
    assert not torch.allclose(alone.sum(0), attended(0, 1, 2, 3) - attended(3), atol=0.1)


def test_measured_weights_are_those_of_the_second_layer(layout: Layout):
    """Where the second layer's deficit is a weighted sum of the pairs', token by token, the weights are found."""
    arms, drawn = Arms(layout, torch.float32, HIDDEN), torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(1))
    base, *pairs = (arms.formed(random_kv(layout, TOKENS, seed=seed).float(), None) for seed in range(4))
    whole = weighted_sum(base, pairs, drawn[:, None])
    found = measured_weights(base, pairs, whole.dense()[[MEASURED_LAYER]])
    torch.testing.assert_close(found, drawn, rtol=0, atol=0.03)  # what the ridge shrinks
    torch.testing.assert_close(
        weighted_sum(base, pairs, torch.ones(3, 1, 1)).dense(), compose(pairs, 1.0, base).dense()
    )


def test_only_reuses_that_the_rule_allows_can_be_false():
    def scores(changed: bool) -> dict[str, Scores]:
        return {"exact": scored(1, 1), "stale": scored(1, 2 if changed else 1), "orbit": scored(1, 1)}

    allowed = [one.name for one in envelope.SITUATIONS if "stale" in one.served]
    assert 0 < len(allowed) < len(envelope.SITUATIONS)
    for wrong in (allowed, [one.name for one in envelope.SITUATIONS if one.name not in allowed]):
        false = dict(envelope.false_reuse({one.name: scores(one.name in wrong) for one in envelope.SITUATIONS}))
        found = {arm: share["share"] for arm, share in false.items()}
        assert found == {"own": 0.5 if wrong is allowed else 0.0, "orbit": 0.0}


def test_the_rule_of_the_table_is_the_linkers():
    """What text a situation has where, and what it had when the patch was formed, decides in both alike."""
    tokens = FAMILIES["qwen2_5_vl"].recipe.tokenizer()

    def context(asked: dict[str, Any]) -> tuple[int, ...]:
        """Of the last of four pages of one token each."""
        texts = [*asked.get("before", ()), *[""] * 4][:4]
        prompt, spans = list[int](), []
        for text in texts:
            prompt += tokens(text)["input_ids"] if text else []
            spans.append(ChunkSpan("page", "image", len(prompt), len(prompt) + 1, len(prompt), 1))
            prompt.append(0)
        return contexts(LinkRequest("request", prompt, tuple(spans)), FREE_TEXT)[-1]

    alike = [one for one in envelope.SITUATIONS if one.pages("abc", "xyz") == "abc" and "system" not in one.text]
    assert len(alike) > 6
    for one in alike:
        assert ("stale" in one.served) == (context(one.text) == context(one.taught)), one.name


def test_alarms_follow_the_rolling_mean_of_the_check():
    settings = FidelitySettings(window=64, minimum=8)
    assert online.alarms([0.01, 0.02], settings, bound=0.05)[0] == 0.0
    assert online.alarms([0.1, 0.2], settings, bound=0.05) == (1.0, 8.0)  # as soon as it may be judged
    rare = [3.0] + [0.0] * 59
    alone, after = online.alarms(rare, settings, bound=0.04)  # one of 3 nats in a whole window passes it
    assert alone > 0.99
    assert after > 8
    early, _ = online.alarms(rare, settings, bound=0.2)  # only among the first 15 checks, or with others
    assert 0.15 < early < 0.5
