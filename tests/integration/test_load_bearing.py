"""Load-bearing chunks on a real engine: what is told of a chunk is what links without it give."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rig import Linked, Rig
from test_loop import all_free, wait_for
from test_sessions import ACTIONS, SESSION, computed_behind, window
from torch import Tensor

from kvstore.operator.apply import relocate
from prefill_workers.fidelity.monitor import compare
from prefill_workers.protocol import LoadBearing, LoadBearingState, Loss
from prefill_workers.sequence import LinkSequence, Run, complement

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " beside ", 3, " and then say what follows."]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A worker whose patches leave something out."""
    return make_rig(rank=4, orbit_chunks=0)


def told(rig: Rig) -> LoadBearing:
    found = rig.loop.load_bearing("local", "test")
    assert found is not None
    assert found.state is LoadBearingState.MEASURED, found.reason
    return found


NOISE = 5e-5  # of log-probabilities in fp32: measured 5e-6 between forwards in the same frame, 2e-5 in another


def loss(as_linked: Tensor, changed: Tensor) -> Loss:
    """Loss by forwards of their own, as near as rounding lets them come to those of the check.

    The check computes its rows together, in the link's frame; here each is computed alone, where the model counts
    positions, so that angles round otherwise. The KV is the same. A KL is of second order: noise e in log-probabilities
    changes it by up to e times their own distance, the root of 2 KL. So small losses differ by more of themselves.
    """
    found = compare(as_linked[None], changed[None])
    return Loss(pytest.approx(found.kl, rel=0, abs=NOISE * (math.sqrt(2 * found.kl) + NOISE)), not found.agrees)


def spans(linked: Linked) -> list[Run]:
    return [Run(span.start, span.stop) for span in linked.plan.request.chunks]


def without(rig: Rig, linked: Linked, gone: int) -> Tensor:
    """Next-token log-probabilities of the prompt without a chunk, the others relocated to where the model counts."""
    whole, chunks = linked.plan.sequence, linked.plan.request.chunks
    out, size = spans(linked)[gone], len(chunks[gone])
    tokens = torch.cat([whole.token_ids[: out.start], whole.token_ids[out.stop :]])
    moved = [(span, span.start - size * (i > gone)) for i, span in enumerate(chunks) if i != gone]
    items = [(span.modality, span.grid, start + span.first - span.start, span.count) for span, start in moved]
    positions, lag = rig.engine.positions(tokens.tolist(), items)
    positions = positions + lag
    blocks = range(1, 2 + len(tokens) // rig.engine.block_size)
    for span, start in moved:
        delta = int((positions[..., start] - whole.positions[..., span.start]).flatten()[0])
        kv = relocate(linked.kv[:, span.start : span.stop], delta, rig.engine.layout)
        rig.engine.write_kv(kv, rig.engine.slots(blocks, start, start + len(span)))
    runs = complement([Run(start, start + len(span)) for span, start in moved], len(tokens))
    return rig.engine.logits([(LinkSequence(tokens, positions, blocks), runs)])[-1].log_softmax(-1)


def test_losses_are_those_of_links_without_a_patch_and_without_a_chunk(rig: Rig):
    rig.link(PAGES)
    asked = rig.link(PAGES, load_bearing=True)
    assert asked.points == ["patched"] * 3
    found = told(rig)
    wait_for(lambda: all_free(rig))
    blind = rig.link(PAGES, "full-reuse")
    for i, chunk in enumerate(found.chunks):
        kept = [(run, (blind if j == i else asked).kv[:, run.start : run.stop]) for j, run in enumerate(spans(asked))]
        _, off = computed_behind(rig, asked, kept)
        assert chunk.patch_off == loss(asked.logprobs, off)
        assert chunk.left_out == loss(asked.logprobs, without(rig, asked, i))
        assert min(chunk.left_out.kl, chunk.patch_off.kl) > 1e-5, "enough to compare"

    alone = ["See ", 4, " and say what it shows."]
    rig.link(alone)
    patched = rig.link(alone, load_bearing=True)
    (chunk,) = told(rig).chunks
    assert patched.points == ["patched"]
    assert chunk.patch_off == loss(patched.logprobs, rig.link(alone, "full-reuse").logprobs)


def test_survivors_and_what_is_new_are_weighed_too(rig: Rig):
    rig.link(window(0), session=SESSION)
    slid = rig.link([*window(1), ACTIONS[3]], session=SESSION, load_bearing=True)
    assert slid.points == ["prefix", "prefix", "encoded"]
    found = told(rig)
    assert [chunk.operating_point for chunk in found.chunks] == slid.points
    for i, chunk in enumerate(found.chunks):
        assert chunk.patch_off is not None
        assert chunk.left_out == loss(slid.logprobs, without(rig, slid, i))
    assert rig.loop.stats().harvest_failures == 0
