"""The engine over runs against vLLM's own prefill, and relocation against computing in place."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from rig import BLOCK_SIZE, Rig, apart, lone, unit_in_the_last_place
from torch import Tensor

from kvstore.operator.apply import relocate
from prefill_workers.engine.attention import paid
from prefill_workers.engine.attention_layers import UnsupportedEngine
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.self_check import SelfCheckError, require_self_check
from prefill_workers.engine.worker_extension import WorkerExtension
from prefill_workers.sequence import LinkSequence, Run

pytestmark = pytest.mark.engine


def test_self_check_passes_in_both_precisions(fp32: PrefillEngine, bf16: PrefillEngine):
    for engine in (fp32, bf16):
        assert [o for o in require_self_check(engine) if not o.passed] == []


def test_self_check_refuses_an_engine_whose_rotation_is_wrong(fp32: PrefillEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "prefill_workers.engine.self_check.relocate", lambda kv, delta, layout: relocate(kv, delta + 1, layout)
    )
    with pytest.raises(SelfCheckError, match="relocated KV equals computed KV"):
        require_self_check(fp32)


def test_self_check_refuses_an_engine_that_reads_other_than_it_wrote(
    fp32: PrefillEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fp32, "write_kv", lambda kv, slots: None)
    with pytest.raises(SelfCheckError, match="KV written equals KV read"):
        require_self_check(fp32)


def test_self_check_refuses_an_engine_whose_forward_does_not_write_what_comes_in(
    fp32: PrefillEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WorkerExtension, "_writing", lambda self, arriving, deadline: nullcontext())
    with pytest.raises(SelfCheckError, match="KV written by layer equals KV written before"):
        require_self_check(fp32)


def test_self_check_refuses_an_engine_whose_partial_forward_does_not_end(
    fp32: PrefillEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WorkerExtension, "_ending_behind", lambda self, layers, slots, queries: nullcontext())
    with pytest.raises(SelfCheckError, match="a partial forward equals a forward's first layers"):
        require_self_check(fp32)


def test_self_check_refuses_an_engine_that_tells_another_attention_than_it_pays(
    fp32: PrefillEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("prefill_workers.engine.attention.paid", lambda queries, *others: paid(1.1 * queries, *others))
    with pytest.raises(SelfCheckError, match="attention told equals the first layer's attention"):
        require_self_check(fp32)


PROMPTS = {
    "text": ["What is the answer to everything, and why is it forty-two?"],
    "one image": ["Look at ", 1, " closely."],
    "three images": [1, 2, 3, "Compare them."],
    "interleaved, different sizes": ["First ", 3, " then ", 0, " and again ", 3, " now what?"],
}


@pytest.mark.parametrize("name", PROMPTS)
def test_exact_link_equals_vllms_own_prefill(rig: Rig, name: str):
    reference = rig.vllm_logprobs(PROMPTS[name])
    ours = rig.link(PROMPTS[name], "exact").logprobs
    assert max(abs(float(ours[token]) - logprob) for token, logprob in reference.items()) < 1e-4
    assert int(ours.argmax()) == max(reference, key=reference.__getitem__)


def test_split_runs_in_one_forward_equal_an_unsplit_prefill(rig: Rig):
    plan = rig.plan(PROMPTS["interleaved, different sizes"], "off")
    n = len(plan.sequence)
    needed = -(-n // BLOCK_SIZE)
    cuts = [0, 1, 7, n // 3, n // 2, n - 1, n]  # inside text, inside images, a single token at either end

    def compute(blocks: range, runs: list[Run]) -> tuple[Tensor, Tensor]:
        s = plan.sequence
        sequence = LinkSequence(s.token_ids, s.positions, blocks, s.embedded)
        logits = rig.engine.logits([(sequence, runs)])
        return logits[-1], rig.engine.read_kv(blocks, 0, n)

    whole_logits, whole = compute(range(1, 1 + needed), [Run(0, n)])
    split_logits, split = compute(range(100, 100 + needed), [Run(a, b) for a, b in pairwise(cuts)])
    assert apart(split, whole) < 1e-5
    assert float((split_logits - whole_logits).abs().max()) < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_written_kv_is_read_back_bit_for_bit(precision: str, request: pytest.FixtureRequest):
    engine: PrefillEngine = request.getfixturevalue(precision)
    layers, tokens = engine.layout.layers, 3 * BLOCK_SIZE + 5
    kv = torch.randn(layers, tokens, engine.layout.features, dtype=torch.float32).to(engine.dtype)
    blocks, first = [9, 4, 77, 12, 5], 11  # scattered, and beginning inside a block
    before = engine.read_kv(blocks, 0, first)
    engine.write_kv(kv, engine.slots(blocks, first, first + tokens))
    assert torch.equal(engine.read_kv(blocks, first, tokens), kv)
    assert torch.equal(engine.read_kv(blocks, 0, first), before)


@pytest.mark.parametrize("shift", [1, 64, 1017])
def test_relocating_equals_computing_the_lone_chunk_at_the_shifted_position(rig: Rig, shift: int):
    # vLLM's table holds cos(fl32(position * frequency)): its own phase is off by up to position * 2**-24.
    rounding_of_the_engines_phase = shift * 2.0**-24
    moved = relocate(lone(rig, 1, 0), shift, rig.engine.layout)
    computed = lone(rig, 1, shift)
    assert apart(moved, computed) < max(1e-5, rounding_of_the_engines_phase)
    assert apart(relocate(moved, -shift, rig.engine.layout), lone(rig, 1, 0)) < 1e-6
    assert apart(moved, lone(rig, 1, 0)) > 1e-2, "the shift must matter, or this test shows nothing"


def test_relocation_in_bf16_errs_as_the_engine_itself_does(make_rig, bf16: PrefillEngine):
    """Against exact rotation: one unit in the last place. Against fp32: no further off than computing in place."""
    shift = 1017
    half, full = make_rig(bf16), make_rig()
    stored = lone(half, 1, 0)
    moved, computed, truth = relocate(stored, shift, bf16.layout), lone(half, 1, shift), lone(full, 1, shift)

    exact = relocate(stored.double(), shift, bf16.layout)
    assert bool(((moved.double() - exact).abs() <= unit_in_the_last_place(exact)).all())

    def error(kv: Tensor) -> Tensor:  # per layer
        return (kv.float() - truth).abs().mean((1, 2))

    assert bool((error(moved) <= 1.05 * error(computed)).all())
    keys = bf16.layout.slices()["keys"]
    assert torch.equal(moved[0, :, keys.stop :], computed[0, :, keys.stop :])  # layer 0's values see no position


def test_kv_of_another_precision_is_another_chunk(rig: Rig, make_rig, bf16: PrefillEngine):
    keys = {rig.linker.keys(rig.plan([1]).request)[0].canonical for rig in (rig, make_rig(bf16))}
    assert len(keys) == 2


def test_rotary_embeddings_that_are_no_plain_rotation_are_refused(fp32: PrefillEngine):
    worker = fp32._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    rotary = worker._attention.rotary()
    like, table = copy.copy(rotary), rotary.cos_sin_cache.clone()
    like._buffers = {**rotary._buffers, "cos_sin_cache": table}
    assert worker._attention.inverse_frequencies(like) == list(fp32.layout.rotary.inverse_frequencies)
    table[1000:] = table[1000:].roll(1, 0)  # as dynamic NTK does: other angles from some position on
    with pytest.raises(UnsupportedEngine, match="fixed angle per position"):
        worker._attention.inverse_frequencies(like)
