"""Compacted links: other blocks, the same harvest, and the KV that torch would choose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rig import Rig, all_free
from torch_reference import Lazy, TorchModel

from kvstore.operator.apply import relocate
from prefill_workers.compaction.plan import OBSERVERS, SINKS, compaction_plan
from prefill_workers.compaction.reduction import anchors, buckets, coverage, means
from prefill_workers.protocol import Compaction, CompactionPolicy

pytestmark = pytest.mark.engine
PARTS = ["See ", 1, " and ", 2, " and then say what follows."]


def test_a_full_budget_hands_over_the_same_blocks_bit_for_bit(rig: Rig):
    plain, asked = (
        rig.link(PARTS, "off", compaction=c) for c in (Compaction(), Compaction(1.0, CompactionPolicy.MERGE))
    )
    assert torch.equal(plain.kv, asked.kv)
    for linked in (plain, asked):
        assert linked.result.kv.kept == linked.result.kv.tokens == len(linked.plan.sequence)
        assert "compact" not in linked.result.stages_ms
    rig.wait_until_free()
    assert all_free(rig)


@pytest.mark.parametrize(
    ("policy", "lazy_blocks"), [*((policy, ()) for policy in CompactionPolicy), (CompactionPolicy.EVICT, [(0, 1)])]
)
def test_entries_are_those_of_the_prompts_own_attention_in_blocks_of_their_own(
    rig: Rig, policy: CompactionPolicy, lazy_blocks: Sequence[tuple[int, int]]
):
    """With lazy layers it is their leaders' attention."""
    plan = rig.plan(PARTS, "off", compaction=Compaction(0.5, policy))
    pulled = []
    transfer = rig.engine.transfer_parameters
    rig.engine.transfer_parameters = lambda lease, blocks, tokens: (
        pulled.append((blocks, tokens)) or transfer(lease, blocks, tokens)
    )
    rig.engine.set_lazy(lazy_blocks)
    try:
        result = rig.loop.submit(plan).result(60)
    finally:
        rig.engine.set_lazy(())
        del rig.engine.transfer_parameters
    rig.settle()
    compaction = compaction_plan(plan.request, rig.engine.block_size)
    assert compaction is not None
    ((blocks, tokens),) = pulled
    n, kept = len(plan.sequence), compaction.kept
    assert (result.kv.tokens, result.kv.kept, tokens) == (n, kept, kept + 1)
    assert result.kv.bytes == kept * rig.engine.layout.bytes_per_token(torch.float32)
    assert not set(blocks) & set(plan.sequence.blocks)
    whole, compacted = rig.engine.read_kv(plan.sequence.blocks, 0, n), rig.engine.read_kv(blocks, 0, kept)

    visual = plan.sequence.embedding_rows(torch.arange(n))[1]
    lazy = Lazy({layer: leader for leader, layer in lazy_blocks}, visual) if lazy_blocks else None
    attention = TorchModel(rig.family, lazy).prompt(plan.sequence).attention
    scores = (attention if policy is CompactionPolicy.PAPER else attention[:, -OBSERVERS:]).sum(1)
    if policy is CompactionPolicy.COVER:
        parts = zip(rig.engine.layout.segments, rig.engine.layout.split(whole[0]), strict=True)
        content = torch.cat([part for segment, part in parts if not segment.rotary], dim=-1)
        scores = coverage(content, compaction, lambda part: part).expand(len(whole), -1)
    at = anchors(scores, compaction)
    if not compaction.merges:
        chosen = torch.stack([layer[index] for layer, index in zip(whole, at, strict=True)])
        assert at[:, :SINKS].tolist() == [list(range(SINKS))] * len(at)
    else:
        bucket = buckets(at, compaction)
        chosen = torch.stack([means(layer, index, kept) for layer, index in zip(whole, bucket, strict=True)])
    expected = relocate(chosen.to(whole.dtype), kept - n, rig.engine.layout)
    assert torch.allclose(compacted, expected, atol=1e-5)
    assert rig.loop.stats().leases == 1, "the whole KV is nobody's any more"
    rig.loop.abandon(result.lease)
    rig.wait_until_free()
    assert all_free(rig)


def test_what_is_learnt_of_a_compacted_link_is_what_would_be_learnt_of_a_whole_one(make_rig):
    learnt = []
    for compaction in (Compaction(), Compaction(0.4)):
        rig = make_rig()
        rig.link(PARTS, compaction=compaction)
        again = rig.link(PARTS)
        assert again.points == ["patched", "patched"]
        learnt.append(again.kv)
    assert torch.equal(*learnt)


def test_the_words_that_choose_are_computed_again_where_blocks_know_them(make_rig):
    rig, parts = make_rig(keeps_prefixes=True), [*PARTS, " Begin with the first one, and be brief."]
    _, again = (rig.link(parts, "exact", compaction=Compaction(0.5)) for _ in range(2))
    assert again.result.prefix_tokens_reused > 0
    assert again.result.tokens_computed >= OBSERVERS
