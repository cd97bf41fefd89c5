"""Lazy layers in a forward over runs are those of the paper's equation, in torch."""

from __future__ import annotations

import pytest
import torch
from rig import QWEN2_5_VL, Rig, tiny_engine
from torch_reference import Lazy, TorchModel

from infra.families import FAMILIES
from prefill_workers.engine.attention_layers import UnsupportedEngine
from prefill_workers.sequence import LinkSequence, Run

pytestmark = pytest.mark.engine


def test_visual_queries_and_keys_are_the_leaders_and_all_else_a_layers_own(rig: Rig):
    """Also where text and images are computed as several runs."""
    engine = rig.engine
    plan = rig.plan(["See ", 1, " and ", 2, " and then say what follows."], "off")
    n, blocks = len(plan.sequence), range(1, 2 + len(plan.sequence) // engine.block_size)
    sequence = LinkSequence(plan.sequence.token_ids, plan.sequence.positions, blocks, plan.sequence.embedded)
    visual = sequence.embedding_rows(torch.arange(n))[1]
    runs = [Run(0, n // 3), Run(n // 3, n)]
    plain = engine.logits([(sequence, runs)])[-1].log_softmax(-1)
    engine.set_lazy([(0, 1)])
    try:
        lazy = engine.logits([(sequence, runs)])[-1].log_softmax(-1)
        kv = engine.read_kv(blocks, 0, n)
    finally:
        engine.set_lazy(())
    keys = engine.layout.slices()["keys"]
    assert torch.equal(kv[1, visual, keys], kv[0, visual, keys])
    assert not torch.isclose(kv[1, ~visual, keys], kv[0, ~visual, keys]).all(-1).any()
    expected = TorchModel(QWEN2_5_VL, Lazy({1: 0}, visual)).logprobs(sequence)
    off = float((lazy - expected).abs().max())
    assert off < 1e-4
    assert float((plain - expected).abs().max()) > 10 * off
    assert torch.equal(engine.logits([(sequence, runs)])[-1].log_softmax(-1), plain), "and nothing is left of it"


def test_layers_that_are_not_there_are_refused_by_name(rig: Rig):
    with pytest.raises(UnsupportedEngine, match=r"lazy_blocks: \[\(0, 99\)\] in a model of \d+ layers"):
        rig.engine.set_lazy([(0, 99)])


@pytest.mark.slow
def test_latent_attention_is_refused_with_the_reason():
    engine = tiny_engine("float32", FAMILIES["deepseek_v2"])
    try:
        with pytest.raises(UnsupportedEngine, match="one latent"):
            engine.set_lazy([(0, 1)])
    finally:
        engine.shutdown()
