"""KV kept in fewer bits than it is computed in: served where the backend can keep it, refused where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infra.families import FAMILIES
from prefill_workers.engine.self_check import require_self_check

pytestmark = pytest.mark.engine

needs_fp8 = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM keeps an fp8 cache on CPUs with AVX-512 or AMX only",
)


@needs_fp8
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_cache_is_relocated_to_the_rounding_of_its_numbers(make_rig, only_engines: Any, kind: str):
    engine = only_engines.get("bfloat16", kv_cache_dtype=kind)
    rig = make_rig(engine)
    assert engine.precision == f"bfloat16/{kind}"
    assert [o for o in require_self_check(engine) if not o.passed] == []
    parts = [1, 2, 3, "Compare them."]
    rig.link(parts, "auto")
    linked, exact, blind = (rig.link(parts, mode) for mode in ("auto", "exact", "full-reuse"))
    assert linked.points == ["patched"] * 3
    off = [float((arm.logprobs - exact.logprobs).abs().max()) for arm in (linked, blind)]
    assert off[0] < off[1]


@needs_fp8
def test_text_ahead_of_the_chunks_is_not_quantised_a_second_time(make_rig, only_engines: Any):
    """A prompt of two images stands in another frame than one of one: its text would have to be relocated."""
    rig = make_rig(only_engines.get("bfloat16", kv_cache_dtype="fp8_e4m3"), keeps_prefixes=True)
    system = "Read everything with care and answer in as few words as you can. "
    first = rig.link([system, 1, " What?"], "exact")
    assert rig.link([system, 1, " and ", 2, " Which?"], "exact").result.prefix_tokens_reused == 0
    again = rig.link([system, 1, " What now?"], "exact")
    known = again.result.prefix_tokens_reused
    assert known > 0
    assert torch.equal(again.kv[:, :known], first.kv[:, :known])


def test_a_cache_that_the_backend_cannot_keep_is_refused(only_engines: Any):
    with pytest.raises(Exception, match="CPU_MLA with KV cache dtype 'fp8' does not give back what is written"):
        only_engines.get("bfloat16", FAMILIES["deepseek_v2"], kv_cache_dtype="fp8")
