"""Two engines decode like one: linked KV, shifted so that position equals index, pulled by a stock engine over NIXL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.families import FAMILIES

pytestmark = pytest.mark.engine


# A tie in bf16 is near if its two logits are closer than this. It keeps 8 bits: logits of size 8 are 2**-5 apart, and
# the rounding of every layer before adds up to a few of these.
NEAR = 0.15


def hand_offs(*cases: Sequence[str]) -> list[dict[str, Any]]:
    """Run `hand_off.py` for every case at once, each in processes of its own: one process can hold one NIXL engine."""
    script = Path(__file__).parent / "hand_off.py"
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = pool.map(
            lambda case: subprocess.run(
                [sys.executable, script, *case], capture_output=True, text=True, timeout=400, check=False
            ),
            cases,
        )
    return [_report(run) for run in runs]


def _report(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    reports = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert reports, run.stderr
    return json.loads(reports[-1])


def assert_everything_was_handed_over(report: dict[str, Any]) -> None:
    assert report["linked"][1]["points"] == ["patched", "patched"]
    assert report["leases"] == 0


def assert_decodes_like_one_engine(report: dict[str, Any]) -> None:
    expected = report["expected"]
    for linked in report["linked"]:
        assert linked["tokens"] == expected["tokens"]
        assert linked["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert_everything_was_handed_over(report)


def assert_decodes_like_one_engine_but_for_near_ties(report: dict[str, Any]) -> None:
    expected = report["expected"]
    for linked in report["linked"]:
        tokens = zip(linked["tokens"], expected["tokens"], strict=True)
        apart = next((i for i, (ours, theirs) in enumerate(tokens) if ours != theirs), len(expected["tokens"]))
        assert expected["leads"][apart:][:1] < [NEAR]
        assert linked["logprobs"][:apart] == pytest.approx(expected["logprobs"][:apart], abs=NEAR)
    assert_everything_was_handed_over(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_engine_continues_from_linked_kv(family: str):
    fp32, bf16 = hand_offs((family, "float32"), (family, "bfloat16"))
    assert_decodes_like_one_engine(fp32)
    assert_decodes_like_one_engine_but_for_near_ties(bf16)


@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("qwen2_5_vl", 2, 1), ("qwen2_5_vl", 2, 2), ("kimi_vl", 2, 1)]
)
def test_tensor_parallel_ranks_answer_as_one_rank_does(family: str, prefill: int, decode: int):
    (report,) = hand_offs((family, "float32", str(prefill), str(decode)))
    assert_decodes_like_one_engine(report)
