"""Two engines decode like one: linked KV, shifted so that position equals index, pulled by a stock engine over NIXL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.families import FAMILIES

pytestmark = pytest.mark.engine


def hand_off(*arguments: str) -> dict[str, Any]:
    """Run `hand_off.py` in processes of its own: one process can hold one NIXL engine."""
    script = Path(__file__).parent / "hand_off.py"
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=400, check=False
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports, done.stderr
    return json.loads(reports[-1])


def assert_decodes_like_one_engine(report: dict[str, Any]) -> None:
    expected = report["expected"]
    for linked in report["linked"]:
        assert linked["tokens"] == expected["tokens"]
        assert linked["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert report["linked"][1]["points"] == ["patched", "patched"]
    assert report["leases"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_engine_continues_from_linked_kv(family: str):
    assert_decodes_like_one_engine(hand_off(family, "float32"))


@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("qwen2_5_vl", 2, 1), ("qwen2_5_vl", 2, 2), ("kimi_vl", 2, 1)]
)
def test_tensor_parallel_ranks_answer_as_one_rank_does(family: str, prefill: int, decode: int):
    assert_decodes_like_one_engine(hand_off(family, "float32", str(prefill), str(decode)))
