"""Video clips as chunks, under both layouts of M-RoPE: one run of tokens, timestamps between frames included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig import Clip, Part, Rig, apart, lone, unit_in_the_last_place

from infra.families import FAMILIES, Family
from kvstore.operator.apply import relocate
from prefill_workers.protocol import SessionRef, Survivors

pytestmark = pytest.mark.engine
NEAR = 0.15  # log-probability; see `test_hand_off`
PROMPT = ["See ", Clip(1), " and ", 1, " and ", Clip(2, frames=6, start=4), " and then say what follows."]


@pytest.fixture(scope="module", params=[name for name, family in FAMILIES.items() if family.video])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def rig(family: Family, only_engines: Any, make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(only_engines.get("float32", family), family=family)


@pytest.fixture
def bf16_rig(family: Family, only_engines: Any, make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(only_engines.get("bfloat16", family), family=family)


def test_a_clip_is_one_chunk_and_its_exact_link_equals_vllms_prefill(rig: Rig):
    spans = rig.render(PROMPT).chunks
    assert [span.modality for span in spans] == ["video", "image", "video"]
    reference = rig.vllm_logprobs(PROMPT)
    first, second = rig.link(PROMPT, "exact"), rig.link(PROMPT, "exact")
    assert second.points == ["recomputed"] * 3
    for linked in (first, second):
        assert max(abs(float(linked.logprobs[token]) - value) for token, value in reference.items()) < 1e-4


def test_a_full_rank_patch_of_a_clip_is_exact(rig: Rig):
    rig.link(PROMPT)
    patched, exact, blind = (rig.link(PROMPT, mode) for mode in ("auto", "exact", "full-reuse"))
    assert patched.points == ["patched"] * 3
    assert all(apart(patched.chunk_kv(i), exact.chunk_kv(i)) < 1e-5 for i in range(3))
    assert float((patched.logprobs - exact.logprobs).abs().max()) < 1e-4
    assert float((blind.logprobs - exact.logprobs).abs().max()) > 1e-2, "blind reuse must lose something"


def test_full_rank_patches_of_a_set_of_clips_are_exact_in_another_order(rig: Rig):
    one, other = Clip(1), Clip(2, frames=6, start=4)
    segments = rig.render([one, other, "What happens?"])
    head = segments.chunks[0].start
    rig.link(segments, head=head)
    patched, exact = (rig.link([other, one, "And then?"], mode, head=head) for mode in ("auto", "exact"))
    assert patched.points == ["patched"] * 2
    assert [str(chunk.kind) for chunk in patched.result.chunks] == ["orbit", "pair"], "behind none, and behind one"
    assert all(apart(patched.chunk_kv(i), exact.chunk_kv(i)) < 1e-4 for i in range(2))
    assert float((patched.logprobs - exact.logprobs).abs().max()) < 1e-4


@pytest.mark.parametrize("shift", [64, 1017])
def test_a_clip_relocates_exactly(rig: Rig, shift: int):
    alone, there = lone(rig, Clip(1), 0), lone(rig, Clip(1), shift)
    assert apart(relocate(alone, shift, rig.engine.layout), there) < max(1e-5, shift * 2.0**-24)
    assert apart(alone, there) > 1e-2, "the shift must matter, or this test shows nothing"


def test_in_bf16_a_clip_is_exact_by_margin_and_rounded_once_when_it_moves(bf16_rig: Rig):
    reference = bf16_rig.vllm_logprobs(PROMPT)
    bf16_rig.link(PROMPT)
    exact, patched = bf16_rig.link(PROMPT, "exact"), bf16_rig.link(PROMPT)
    assert patched.points == ["patched"] * 3
    for linked in (exact, patched):
        assert max(abs(float(linked.logprobs[token]) - value) for token, value in reference.items()) < NEAR
    layout = bf16_rig.engine.layout
    alone = lone(bf16_rig, Clip(1), 0)
    rotated = relocate(alone.double(), 1017, layout)
    off = (relocate(alone, 1017, layout).double() - rotated).abs()
    assert bool((off <= unit_in_the_last_place(rotated)).all())


def window(first: int) -> list[Part]:
    """Three segments of a stream, and a question."""
    return [*(Clip(n, start=2 * n) for n in range(first, first + 3)), " What has just happened?"]


def test_segments_that_stay_survive_in_a_session(family: Family, only_engines: Any, make_rig: Callable[..., Rig]):
    rig = make_rig(only_engines.get("float32", family), family=family, orbit_chunks=0)  # it compiles nothing ahead
    session = SessionRef("camera", survivors=Survivors.KEEP)
    before, after = (rig.link(window(first), session=session) for first in (1, 2))
    assert after.points == ["survived", "survived", "encoded"]
    for i in (0, 1):
        there, here = before.plan.chunks[i + 1].start_position, after.plan.chunks[i].start_position
        moved = relocate(before.chunk_kv(i + 1), here - there, rig.engine.layout)
        assert apart(after.chunk_kv(i), moved) < 1e-6
    exact = rig.link(window(2), "exact")
    assert apart(after.chunk_kv(0), exact.chunk_kv(0)) > 1e-3, "a survivor knows what left"


def test_what_idle_time_refreshed_of_a_window_is_exact(family: Family, only_engines: Any, make_rig: Callable[..., Rig]):
    rig = make_rig(only_engines.get("float32", family), family=family, orbit_chunks=0)
    rig.link(window(1), session=SessionRef("camera"))
    slid, exact = rig.link(window(2), session=SessionRef("camera")), rig.link(window(2), "exact")
    assert slid.points == ["prefix", "prefix", "encoded"]
    assert float((slid.logprobs - exact.logprobs).abs().max()) < 1e-4
