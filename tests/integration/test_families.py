"""The operator on every registered family, in fp32 and bf16: what must be exact is, what is approximate improves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import LayerTier, cold_rig, parts_of, teach
from rig import Page, Part, Rig, apart, lone, unit_in_the_last_place
from torch import Tensor

from infra.families import FAMILIES, Family
from kvstore.operator.apply import relocate
from kvstore.operator.patch import deficit, form_patch
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.self_check import require_self_check
from prefill_workers.prefix_digests import GRAIN
from prefill_workers.protocol import SessionRef, Survivors
from prefill_workers.sequence import LinkSequence, Run
from prefill_workers.settings import FidelitySettings

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Engines:
    """A family's model in both precisions."""

    family: Family
    fp32: PrefillEngine
    bf16: PrefillEngine

    def chunk(self, number: int) -> Part:
        """An image where the family sees images, else a document."""
        return number if self.family.image else Page(number)

    @property
    def pages(self) -> list[Part]:
        return ["See ", self.chunk(1), " and ", self.chunk(2), " and then say what follows."]


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest, only_engines: Any) -> Engines:
    family = FAMILIES[request.param]
    return Engines(family, only_engines.get("float32", family), only_engines.get("bfloat16", family))


@pytest.fixture
def rigs(engines: Engines, make_rig: Callable[..., Rig]) -> dict[str, Rig]:
    return {name: make_rig(getattr(engines, name), family=engines.family) for name in ("fp32", "bf16")}


PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference in log-probability."""
    return float((a - b).abs().max())


@PRECISIONS
def test_the_layout_is_the_families_and_the_self_check_passes(engines: Engines, precision: str):
    engine: PrefillEngine = getattr(engines, precision)
    assert engine.layout.family == engines.family.layout
    assert [outcome for outcome in require_self_check(engine) if not outcome.passed] == []


def test_a_forward_padded_to_a_bucket_equals_an_unpadded_one(
    engines: Engines, rigs: dict[str, Rig], monkeypatch: pytest.MonkeyPatch
):
    """And writes nothing else, least of all at the ends of the pool."""
    engine, plan = engines.fp32, rigs["fp32"].plan(engines.pages, "off")
    s, n, size = plan.sequence, len(plan.sequence), engine.block_size
    runs, ends = [Run(0, n // 3), Run(n // 3, n - 9), Run(n - 9, n)], [0, engine.num_blocks - 1]
    sequence = LinkSequence(s.token_ids, s.positions, range(1, 2 + n // size), s.embedded)
    engine.write_kv(torch.ones(engine.layout.layers, 2 * size, engine.layout.features), engine.slots(ends, 0, 2 * size))

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        logits = engine.forward([(sequence, runs)], ends=[0])
        assert logits is not None
        return logits, engine.read_kv(sequence.blocks, 0, n), engine.read_kv(ends, 0, 2 * size)

    expected = compute()
    assert n < 512
    monkeypatch.setattr(engine, "spec", replace(engine.spec, buckets=(64, 512)))
    for ours, theirs in zip(compute(), expected, strict=True):
        assert torch.equal(ours, theirs)


@PRECISIONS
def test_a_forward_over_runs_equals_vllms_own_prefill(engines: Engines, rigs: dict[str, Rig], precision: str):
    rig = rigs[precision]
    reference = rig.vllm_logprobs(engines.pages)
    ours = rig.link(engines.pages, "exact").logprobs
    # vLLM's CPU_MLA prefills with another kernel than it decodes with: in 16 bits their sums round differently
    rounding = 0.15 if precision == "bf16" else 1e-4
    assert max(abs(float(ours[token]) - logprob) for token, logprob in reference.items()) < rounding


@PRECISIONS
def test_a_forward_that_is_asked_for_no_logits_stores_the_same_kv(
    engines: Engines, rigs: dict[str, Rig], precision: str
):
    """It ends where the last layer's KV is known."""
    rig, engine = rigs[precision], getattr(engines, precision)
    sequence = rig.plan(engines.pages, "off").sequence
    n = len(sequence)

    def stored(first: int, forward: Callable[..., object]) -> Tensor:
        blocks = range(first, first + -(-n // engine.block_size))
        forward([(LinkSequence(sequence.token_ids, sequence.positions, blocks, sequence.embedded), [Run(0, n)])])
        return engine.read_kv(blocks, 0, n)

    assert torch.equal(stored(1, engine.forward), stored(100, engine.logits))


def test_a_forward_that_fails_leaves_nothing_to_the_next_one(engines: Engines, rigs: dict[str, Rig]):
    """Models may keep what they hand their layers, as Qwen3-VL its deepstack features."""
    rig, engine = rigs["fp32"], engines.fp32
    failing = rig.plan(engines.pages, "off").sequence
    text = rig.plan(["Nothing but words, of which there are some, and then a few more."], "off").sequence
    n = len(text)

    def stored() -> Tensor:
        blocks = range(1, 1 + -(-n // engine.block_size))
        engine.forward([(LinkSequence(text.token_ids, text.positions, blocks, text.embedded), [Run(0, n)])])
        return engine.read_kv(blocks, 0, n)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    expected = stored()
    worker = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    hook = worker._attention.walker.layers[1].register_forward_pre_hook(fail)
    blocks = range(100, 100 + -(-len(failing) // engine.block_size))
    sequence = LinkSequence(failing.token_ids, failing.positions, blocks, failing.embedded)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward([(sequence, [Run(0, len(failing))])])
    finally:
        hook.remove()
    assert torch.equal(stored(), expected)


@pytest.mark.parametrize("shift", [1, 64, 1017])
def test_relocation_is_exact(engines: Engines, rigs: dict[str, Rig], shift: int):
    """fp32: within the rounding of the engine's own phases. bf16: as far from fp32 as computing in place, and one
    rounding (on average a quarter of a unit in the last place); against exact rotation of what is stored, one unit."""
    alone = {name: lone(rig, engines.chunk(1), 0) for name, rig in rigs.items()}
    there = {name: lone(rig, engines.chunk(1), shift) for name, rig in rigs.items()}
    moved = {name: relocate(kv, shift, engines.fp32.layout) for name, kv in alone.items()}
    assert apart(moved["fp32"], there["fp32"]) < max(1e-5, shift * 2.0**-24)
    assert apart(moved["fp32"], alone["fp32"]) > 1e-2, "the shift must matter, or this test shows nothing"

    exact = relocate(alone["bf16"].double(), shift, engines.bf16.layout)
    assert bool(((moved["bf16"].double() - exact).abs() <= unit_in_the_last_place(exact)).all())

    def error(kv: Tensor) -> Tensor:  # per layer
        return (kv.float() - there["fp32"]).abs().mean((1, 2))

    rounding = unit_in_the_last_place(there["fp32"]).mean((1, 2)) / 4
    assert bool((error(moved["bf16"]) <= 1.05 * error(there["bf16"]) + rounding).all())


@PRECISIONS
def test_a_later_turn_computes_only_what_is_new(engines: Engines, make_rig: Callable[..., Rig], precision: str):
    """Also where an image moves the frame (M-RoPE), and equal to a prompt that is computed whole."""
    engine: PrefillEngine = getattr(engines, precision)
    cached = make_rig(engine, family=engines.family, keeps_prefixes=True)
    plain = make_rig(engine, family=engines.family)
    first = ["Read everything with care and answer in few words. ", engines.chunk(1), " What?"]
    second = [*first, "<|im_end|>\n<|im_start|>assistant\nThis.<|im_end|>\n<|im_start|>user\nWhy?"]
    third = [*second, " And what is ", engines.chunk(2), " then?"]
    whole, before = [plain.link(parts, "off") for parts in (first, second, third)], 0  # on the same engine's blocks
    for parts, expected in zip((first, second, third), whole, strict=True):
        linked = cached.link(parts, "exact")
        n = len(linked.plan.sequence)
        assert linked.result.tokens_computed == n - linked.result.prefix_tokens_reused <= n - before + 2 * GRAIN
        rounding, far = (1e-5, 1e-4) if precision == "fp32" else (0.02, 0.15)
        assert apart(linked.kv, expected.kv) < rounding
        assert difference(linked.logprobs, expected.logprobs) < far
        before = n


@PRECISIONS
def test_a_full_rank_patch_restores_what_neighbours_add(engines: Engines, rigs: dict[str, Rig], precision: str):
    rig = rigs[precision]
    rig.link(engines.pages)
    patched, exact, blind = (rig.link(engines.pages, mode) for mode in ("auto", "exact", "full-reuse"))
    assert patched.points == ["patched", "patched"]
    if precision == "fp32":
        assert all(apart(patched.chunk_kv(i), exact.chunk_kv(i)) < 1e-5 for i in range(2))
        assert difference(patched.logprobs, exact.logprobs) < 1e-4
    else:  # the factors are rounded to bf16
        assert difference(patched.logprobs, exact.logprobs) < 0.2 * difference(blind.logprobs, exact.logprobs)
    assert difference(blind.logprobs, exact.logprobs) > 1e-2, "blind reuse must lose something"


@PRECISIONS
def test_a_check_finds_honest_patches_near_exact_and_blind_reuse_far(
    engines: Engines, make_rig: Callable[..., Rig], precision: str
):
    """In bf16 what is left is rounding: of the patch's factors, and of forwards over other runs."""
    fidelity = FidelitySettings(share=1.0, bounds={})
    rig = make_rig(getattr(engines, precision), family=engines.family, fidelity=fidelity)
    for mode in ("auto", "auto", "full-reuse"):
        rig.link(engines.pages, mode)
    kl = {str(status.point): status.rolling_kl for status in rig.fidelity.status() if status.checks == 1}
    assert kl["patched"] < (1e-3 if precision == "bf16" else 1e-8)
    assert kl["relocated"] > 10 * kl["patched"]


def test_more_rank_never_restores_less(engines: Engines, rigs: dict[str, Rig]):
    rig, layout = rigs["fp32"], engines.fp32.layout
    linked = rig.link(engines.pages)
    chunk = linked.plan.chunks[1]
    canonical = rig.library.get_canonical(chunk.keys.canonical, "local")
    assert canonical is not None
    delta = deficit(relocate(linked.chunk_kv(1), -chunk.start_position, layout), canonical.kv)
    ranks = [1, 2, 4, 8, 16, 32, None]
    lost = [float((form_patch(delta, layout, rank=rank).dense() - delta).norm()) for rank in ranks]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > lost[4] > lost[-1] == 0.0


def test_a_chunk_computed_once_serves_any_position(engines: Engines, rigs: dict[str, Rig]):
    rig = rigs["fp32"]
    rig.link([engines.chunk(1), "?"])
    far = [" ".join(["far"] * 40), engines.chunk(1), "What is this?"]
    linked, exact = rig.link(far, "full-reuse"), rig.link(far, "exact")
    assert (linked.points, exact.points) == (["relocated"], ["recomputed"]), "from embeddings that are stored"
    ahead, wanted = (one.kv[:, : one.plan.chunks[0].span.start] for one in (linked, exact))
    if engines.fp32.layout.family == "mla":  # its products over more rows at once round otherwise (infra.cpu.latent)
        assert apart(ahead, wanted) < 1e-5
    else:
        assert torch.equal(ahead, wanted)


def test_layers_that_are_written_while_they_come_in_equal_a_full_prefill(
    engines: Engines, make_rig: Callable[..., Rig], tmp_path: Path
):
    taught, reference = teach(engines.fp32, engines.family, tmp_path)
    rig = cold_rig(make_rig, engines.fp32, engines.family, LayerTier(taught))
    linked = rig.link(parts_of(engines.family))
    assert rig.loop.stats().forwards_by_layer == 1
    assert linked.points == ["patched"] * 3
    assert max(abs(float(linked.logprobs[token]) - logprob) for token, logprob in reference.items()) < 1e-4


def test_a_window_slides_in_a_session(engines: Engines, make_rig: Callable[..., Rig]):
    rig = make_rig(engines.fp32, family=engines.family, orbit_chunks=0)
    words = " and so one step was taken after the other, until nothing was left to be done. "
    first, slid = ([part for n in range(at, at + 3) for part in (engines.chunk(n), words)] for at in (0, 1))
    kept, refreshed = SessionRef("kept", survivors=Survivors.KEEP), SessionRef("refreshed")
    before, after = rig.link(first, session=kept), rig.link(slid, session=kept)
    assert after.points[:2] == ["survived"] * 2
    for i in (0, 1):
        delta = after.plan.chunks[i].start_position - before.plan.chunks[i + 1].start_position
        there = relocate(before.chunk_kv(i + 1), delta, rig.engine.layout)
        assert apart(after.chunk_kv(i), there) < 1e-6

    rig.link(first, session=refreshed)
    linked, exact = rig.link(slid, session=refreshed), rig.link(slid, "exact")
    assert linked.points[:2] == ["prefix"] * 2, "idle time has computed them anew"
    assert apart(linked.kv, exact.kv) < 1e-5
    assert difference(linked.logprobs, exact.logprobs) < 1e-4
