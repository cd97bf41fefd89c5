"""The pure parts of the fidelity benchmark: scores, intervals, and which tokens arms choose."""

from __future__ import annotations

import math

import pytest
import torch
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor

from kvstore.layout import Layout
from kvstore.patch import compose
from prefill_workers.composing import measured_weights, weighted_sum
from prefill_workers.selection import MEASURED_LAYER
from prefill_workers.settings import FidelitySettings
from serving.bench.fidelity import masses, online, storage
from serving.bench.fidelity.arms import Arms, PageKV
from serving.bench.fidelity.bench import figures_of
from serving.bench.fidelity.reader import _kept
from serving.bench.fidelity.scores import Scores, figures

TOKENS = 12


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
    arms = Arms(layout, torch.float32)
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
    changed = [not torch.equal(a, b) for a, b in zip(deep.kv, page.canonical, strict=True)]
    assert changed == [index >= layout.layers - round(layout.layers / 2) for index in range(layout.layers)]


def test_patches_come_closer_with_rank(layout: Layout, page: PageKV):
    arms = Arms(layout, torch.float32)
    errors = [float((arms.patch(rank)(page).kv - page.exact).norm()) for rank in (1, 2, 4, None)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_tokens_that_are_not_computed_again_stay():
    assert _kept(10, 16, None) == [(10, 16)]
    assert _kept(10, 16, torch.tensor([0, 1, 4])) == [(12, 14), (15, 16)]
    assert _kept(10, 12, torch.tensor([0, 1])) == []


def test_rounding_to_eight_bits_moves_little(layout: Layout, page: PageKV):
    patch = Arms(layout, torch.float32).formed(page.delta, 4)
    rounded = storage._rounded(patch)
    assert float((rounded.dense() - patch.dense()).norm() / patch.dense().norm()) < 0.02
    elements = sum(factor.numel() for factor in (*patch.left, *patch.right))
    assert elements < storage._stored("int8", rounded) < 2 * elements


def test_figures_are_named_by_family_split_arm_and_kind():
    names = ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction")
    tables = {f"gqa: {name}": {"patch_16": {"multi": 0.5, "multi ±": 0.1, "single": float("nan")}} for name in names}
    assert figures_of("gqa", tables) == {f"gqa.multi.patch_16.{name}": 0.5 for name in names}


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
    arms, drawn = Arms(layout, torch.float32), torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(1))
    base, *pairs = (arms.formed(random_kv(layout, TOKENS, seed=seed).float(), None) for seed in range(4))
    whole = weighted_sum(base, pairs, drawn[:, None])
    found = measured_weights(base, pairs, whole.dense()[[MEASURED_LAYER]])
    torch.testing.assert_close(found, drawn, rtol=0, atol=0.03)  # what the ridge shrinks
    torch.testing.assert_close(
        weighted_sum(base, pairs, torch.ones(3, 1, 1)).dense(), compose(pairs, 1.0, base).dense()
    )


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
