"""Video clips as chunks, under both layouts of M-RoPE: one run of tokens, timestamps between frames included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig import Clip, Rig, apart, lone

from infra.families import FAMILIES
from kvstore.operator.apply import relocate

pytestmark = pytest.mark.engine
PROMPT = ["See ", Clip(1), " and ", 1, " and ", Clip(2, frames=6, start=4), " and then say what follows."]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def make_video_rig(request: pytest.FixtureRequest, only_engines: Any) -> Callable[..., Rig]:
    family = FAMILIES[request.param]
    engine = only_engines.get("float32", family)
    return lambda make_rig: make_rig(engine, family=family)


@pytest.fixture
def rig(make_video_rig: Callable[..., Rig], make_rig: Callable[..., Rig]) -> Rig:
    return make_video_rig(make_rig)


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


@pytest.mark.parametrize("shift", [64, 1017])
def test_a_clip_relocates_exactly(rig: Rig, shift: int):
    alone, there = lone(rig, Clip(1), 0), lone(rig, Clip(1), shift)
    assert apart(relocate(alone, shift, rig.engine.layout), there) < max(1e-5, shift * 2.0**-24)
    assert apart(alone, there) > 1e-2, "the shift must matter, or this test shows nothing"
