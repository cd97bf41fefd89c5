"""Compactor: importance by the definition of attention, and the entries that it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from kvstore.operator.apply import relocate
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from prefill_workers.compaction.plan import CompactionPlan
from prefill_workers.engine import compactor as module
from prefill_workers.engine.batch import Observing
from prefill_workers.engine.compactor import Compactor
from prefill_workers.sequence import Run

TOKENS, LAYERS, HEADS, KV_HEADS, WIDTH = 12, 2, 4, 2, 8
ROTARY = RotaryScheme((1.0, 0.1, 0.01, 0.001), "neox")
PLAN = CompactionPlan(TOKENS, 6, (Run(2, 9),), merges=False, first_stays=False, observers=3)


class Layer(nn.Module):
    """Attention layer of which only queries are looked at."""

    def __init__(self, **impl: object) -> None:
        super().__init__()
        self.impl = SimpleNamespace(**({"scale": 0.3} | impl))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


class Pages:
    """KV by blocks' first number, as a worker has it."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(5)
        self.kv = torch.randn(layout.layers, TOKENS, layout.features, generator=generator)
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def stored(self, blocks: Sequence[int], first: int, count: int, layers: Sequence[int]) -> Iterator[Tensor]:
        assert (blocks, first) == ((7,), 0)
        return (self.kv[layer, :count] for layer in layers)

    def update(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        self.written[layer] = rows.clone(), slots


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)


def made(layers: Sequence[Layer], layout: Layout, *, latent: bool = False) -> tuple[Compactor, Pages]:
    pages = Pages(layout)
    compactor = Compactor(layers, pages.stored, pages.update, torch.float32, latent=latent)
    compactor.layout = layout
    return compactor, pages


def observed(
    compactor: Compactor, layers: Sequence[Layer], queries: Sequence[Tensor], runs: Sequence[Observing]
) -> None:
    with compactor.observing(runs):
        for layer, query in zip(layers, queries, strict=True):
            layer(query, query, query)


def test_importance_is_attention_summed_over_the_observers_and_averaged_over_heads():
    layers, layout = [Layer() for _ in range(LAYERS)], Layout.gqa(LAYERS, KV_HEADS, WIDTH, ROTARY)
    compactor, pages = made(layers, layout)
    queries = [torch.randn(5, HEADS * WIDTH) for _ in layers]  # of a batch, whose tokens 2 to 5 are the prompt's last
    observed(compactor, layers, queries, [Observing("link", Run(2, 5), 9, (7,))])
    expected = torch.zeros(LAYERS, TOKENS)
    for layer, query in enumerate(queries):
        keys = pages.kv[layer, :, : KV_HEADS * WIDTH].view(TOKENS, KV_HEADS, WIDTH)
        for head in range(HEADS):
            mine = query[2:, head * WIDTH : (head + 1) * WIDTH]
            scores = mine @ keys[:, head // 2].T * 0.3
            scores = scores.masked_fill(torch.arange(TOKENS) > torch.arange(9, 12)[:, None], -torch.inf)
            expected[layer] += scores.softmax(-1).sum(0) / HEADS
    found = compactor.take("link")
    assert torch.allclose(found, expected, atol=1e-5)
    assert compactor.take("link") is None, "taken once"
    assert not any(layer._forward_hooks for layer in layers)


def test_latent_queries_meet_latents_as_they_meet_the_keys_made_of_them():
    latent, rope, nope = 6, 4, 5
    layer = Layer(qk_nope_head_dim=nope, qk_rope_head_dim=rope)
    layer.W_UK_T = torch.randn(HEADS, nope, latent)
    layout = Layout.mla(1, latent, rope, RotaryScheme((1.0, 0.1), "neox"))
    compactor, pages = made([layer], layout, latent=True)
    query = torch.randn(3, HEADS, nope + rope)
    observed(compactor, [layer], [query], [Observing("link", Run(0, 3), 9, (7,))])
    expected = torch.zeros(TOKENS)
    for head in range(HEADS):
        keys = torch.cat([pages.kv[0, :, :latent] @ layer.W_UK_T[head].T, pages.kv[0, :, latent:]], dim=-1)
        scores = (query[:, head] @ keys.T * 0.3).masked_fill(
            torch.arange(TOKENS) > torch.arange(9, 12)[:, None], -torch.inf
        )
        expected += scores.softmax(-1).sum(0) / HEADS
    assert torch.allclose(compactor.take("link")[0], expected, atol=1e-5)


def test_what_is_observed_again_is_not_counted_twice_and_runs_of_one_forward_are_added():
    layers, layout = [Layer()], Layout.gqa(1, KV_HEADS, WIDTH, ROTARY)
    compactor, _ = made(layers, layout)
    queries = [torch.randn(4, HEADS * WIDTH)]
    parts = [Observing("link", Run(0, 2), 2, (7,)), Observing("link", Run(2, 4), 10, (7,))]
    for _ in range(2):
        observed(compactor, layers, queries, parts)
    found = compactor.take("link")
    assert found.shape == (1, TOKENS)
    assert float(found.sum()) == pytest.approx(4, abs=1e-4), "each of the four pays one in all"


def test_entries_go_to_their_slots_with_keys_moved_and_all_links_without_observers_keep_the_last():
    layers, layout = [Layer(), Layer()], Layout.gqa(LAYERS, KV_HEADS, WIDTH, ROTARY)
    slots = torch.arange(40, 46)
    for scores, expected in (
        (torch.tensor([[0.0, 0, 5, 0, 0, 0, 0, 0, 1, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0]]), ([2], [6])),
        (None, ([8], [8])),
    ):
        compactor, pages = made(layers, layout)
        if scores is not None:
            compactor.give("link", scores)
        compactor.compact("link", (7,), PLAN, slots)
        for layer, inner in enumerate(expected):
            rows, into = pages.written[layer]
            kept = pages.kv[layer : layer + 1, [0, 1, *inner, 9, 10, 11]]
            assert torch.equal(into, slots)
            assert torch.allclose(rows, relocate(kept, -6, layout.of_one_layer)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ({}, None),
        ({"sliding_window": -1, "logits_soft_cap": 0, "alibi_slopes": None}, None),
        ({"sliding_window": (-1, -1)}, None),
        ({"sliding_window": 4096}, "sliding window"),
        ({"logits_soft_cap": 30.0}, "logits soft cap"),
        ({"sinks": torch.ones(4)}, "sinks"),
    ],
)
def test_bounded_attention_is_refused_by_name(impl: dict[str, object], reason: str | None):
    compactor, _ = made([Layer(), Layer(**impl)], Layout.gqa(2, KV_HEADS, WIDTH, ROTARY))
    assert (compactor.refusal is None) if reason is None else (reason in str(compactor.refusal))
