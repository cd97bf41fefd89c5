"""What the fidelity benchmark's arms keep, choose and add up, and what they cost."""

from __future__ import annotations

import pytest
import torch
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor
from vllm.multimodal.inputs import MultiModalKwargsItem

from kvstore.operator.basis import pool_basis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import PatchKind, compose
from kvstore.operator.svd import SCALE_BYTES
from prefill_workers.link.compose import measured_weights, weighted_sum
from prefill_workers.link.token_selection import MEASURED_LAYER
from prefill_workers.protocol import ChunkSpan
from serving.bench.fidelity import masses, prefix, storage
from serving.bench.fidelity.arms import TOKEN_ARMS, Arms, PageKV, Repaired, computed_share
from serving.bench.fidelity.reader import Page, Place, Prompt, _kept
from serving.bench.fidelity.shape import Shape
from serving.bench.harness import UNCERTAINTY

TOKENS = 12
HIDDEN = 32


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


def test_patches_come_closer_with_rank(layout: Layout, page: PageKV):
    arms = Arms(layout, torch.float32, HIDDEN)
    errors = [float((arms.patch(rank)(page).kv - page.exact).norm()) for rank in (1, 2, 4, None)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_forms_that_are_compared_take_the_same_bytes(layout: Layout, page: PageKV):
    rank = 2
    sizes = {
        name: form.form(page.delta, layout, PatchKind.own, torch.bfloat16).nbytes
        for name, form in storage.forms(rank).items()
    }
    directions = rank * layout.layers * len(layout.segments)
    scales = SCALE_BYTES * directions
    assert sizes["int8"] == sizes["uniform"] + scales  # twice as many directions in half the bytes each
    assert 0.8 < sizes["spread"] / sizes["uniform"] <= 1
    assert 0.8 < sizes["int8_spread"] / sizes["int8"] <= 1


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
    spread = {"tokens for 90%": 0.5, "directions for 90%": 2}
    assert tables["deficit spread"][""] == spread | {f"{name} {UNCERTAINTY}": 0.0 for name in spread}
    by_layer = [norm for name, norm in tables["deficit norm by layer"][""].items() if UNCERTAINTY not in name]
    assert by_layer[0] == 0.0
    assert min(by_layer[1:]) > 0.0


def prompt(pages: int = 3, cells: int = 20) -> Prompt:
    """Four tokens of text, pages of `cells` tokens between delimiters, six tokens of text, an answer of one."""
    span = ChunkSpan("page", "image", 0, cells + 2, 1, cells)
    page = Page((7, *[8] * cells, 9), span, ("image", MultiModalKwargsItem()), torch.zeros(cells, HIDDEN))
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


def test_tokens_that_are_not_computed_again_stay():
    assert _kept(10, 16, None) == [(10, 16)]
    assert _kept(10, 16, torch.tensor([0, 1, 4])) == [(12, 14), (15, 16)]
    assert _kept(10, 12, torch.tensor([0, 1])) == []


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
