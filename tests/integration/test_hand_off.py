"""Two engines decode like one: linked KV, shifted so that position equals index, pulled by a stock engine over NIXL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.families import FAMILIES
from prefill_workers.prefix_digests import GRAIN

pytestmark = pytest.mark.engine


# A tie in bf16 is near if its two logits are closer than this. It keeps 8 bits: logits of size 8 are 2**-5 apart, and
# the rounding of every layer before adds up to a few of these.
NEAR = 0.15
COMPACTED = ("qwen2_5_vl", "llava", "deepseek_v2")  # grouped queries with M-RoPE, all heads, latents
COMPACTED_BY_RANKS = ("qwen2_5_vl", 2, 1)


class Pair:
    """The two processes of `hand_off.py`, which take one case after the other; started again when a case ends them."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._reports: dict[tuple[str | int, ...], dict[str, Any]] = {}

    def report(self, family: str, dtype: str, prefill_ranks: int = 1, decode_ranks: int = 1) -> dict[str, Any]:
        """Outcome of a case, which is run once; in fp32 some families' with compacted KV."""
        ranks = (prefill_ranks, decode_ranks)
        compacts = dtype == "float32" and (
            (family in COMPACTED and ranks == (1, 1)) or (family, *ranks) == COMPACTED_BY_RANKS
        )
        case = family, dtype, prefill_ranks, decode_ranks, compacts
        if case not in self._reports:
            self._reports[case] = self._run(*case)
        return self._reports[case]

    def _run(self, *case: str | int) -> dict[str, Any]:
        if self._process is None:
            script = Path(__file__).parent / "hand_off.py"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log.open("w"), "text": True}
            self._process = subprocess.Popen([sys.executable, script], start_new_session=True, **pipes)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(case), file=stdin, flush=True)
        line = next((line for line in stdout if line.startswith("{")), None)
        if line is None:
            self.close()
            pytest.fail(f"the processes ended: {self._log.read_text()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # whatever a case that failed left
            self._process = None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("hand-off") / "log")
    yield pair
    pair.close()


def assert_everything_was_handed_over(report: dict[str, Any]) -> None:
    linked = report["linked"]
    assert [case["points"] for case in linked[1:]] == [["patched", "patched"]] * 3
    assert [len(case["first"]) for case in linked] == [0, 0, 1, 0]
    assert [case["length"] % report["block_size"] for case in linked[2:]] == [0, 0]
    assert report["leases"] == 0


def answers(report: dict[str, Any]) -> Iterator[tuple[list[int], list[float], dict[str, Any]]]:
    """Tokens and log-probabilities of every linked prompt, with what one engine answers to it.

    The first token's log-probability stays on the prefill worker; the decode engine says one token more behind it.
    """
    for linked in report["linked"]:
        expected, first = report["expected"][linked["prompt"]], linked["first"]
        count = len(expected["tokens"])
        yield (
            [*first, *linked["tokens"]][:count],
            [*expected["logprobs"][: len(first)], *linked["logprobs"]][:count],
            expected,
        )


def assert_decodes_like_one_engine(report: dict[str, Any]) -> None:
    for tokens, logprobs, expected in answers(report):
        assert tokens == expected["tokens"]
        assert logprobs == pytest.approx(expected["logprobs"], abs=1e-4)
    assert_everything_was_handed_over(report)


def assert_decodes_like_one_engine_but_for_near_ties(report: dict[str, Any]) -> None:
    for tokens, logprobs, expected in answers(report):
        pairs = enumerate(zip(tokens, expected["tokens"], strict=True))
        apart = next((i for i, (ours, theirs) in pairs if ours != theirs), len(tokens))
        assert expected["leads"][apart:][:1] < [NEAR]
        assert logprobs[:apart] == pytest.approx(expected["logprobs"][:apart], abs=NEAR)
    assert_everything_was_handed_over(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_engine_continues_from_linked_kv(pair: Pair, family: str):
    assert_decodes_like_one_engine(pair.report(family, "float32"))


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_in_the_kv_is_an_error_of_that_request_alone(pair: Pair, family: str):
    report = pair.report(family, "float32")
    spoiled, next_one = report["spoiled"]
    assert spoiled == {"error": "the model gave logits that are not numbers"}
    assert next_one["tokens"] == report["linked"][1]["tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_engine_continues_from_linked_kv_in_bf16(pair: Pair, family: str):
    assert_decodes_like_one_engine_but_for_near_ties(pair.report(family, "bfloat16"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_read_back_as_one_forward_computes_it(pair: Pair, family: str):
    assert_handed_back(pair.report(family, "float32"))


def assert_handed_back(report: dict[str, Any]) -> None:
    back = report["handed_back"]
    prompt, whole, known = back["tokens"]
    assert known > whole - 2 * GRAIN
    assert known - prompt <= back["pulled"] <= known - prompt + 2 * GRAIN
    assert back["computed"] == 0
    assert back["off"] < 1e-4
    assert back["freed"], "the decode engine holds nothing any more"
    assert back["leases"] == 0


@pytest.mark.parametrize("family", COMPACTED)
def test_decode_goes_on_from_compacted_kv_and_with_windows_as_torch_does_over_the_same_entries(pair: Pair, family: str):
    assert_decodes_compacted_kv_as_torch_does(pair.report(family, "float32"))


def assert_decodes_compacted_kv_as_torch_does(report: dict[str, Any]) -> None:
    assert len(report["compacted"]) >= 3
    for case in report["compacted"]:
        ours, theirs = case["tokens"]
        assert ours == theirs, case
        assert case["off"] <= 3e-4, case
        _, budget, window, _ = case["case"]
        assert case["mistaken"].keys() == ({"shift", "window"} if window is not None else {"shift"})
        assert min(case["mistaken"].values()) > 0.1, "a shift or window that is wrong would be seen"
        kept, tokens = case["kept"]
        assert kept < tokens if budget < 1 else kept == tokens
        seen, there = case["seen"]
        assert seen < there if window is not None else seen == there
    assert report["leases"] == 0


@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("qwen2_5_vl", 2, 1), ("qwen2_5_vl", 2, 2), ("kimi_vl", 2, 1)]
)
def test_tensor_parallel_ranks_answer_as_one_rank_does(pair: Pair, family: str, prefill: int, decode: int):
    report = pair.report(family, "float32", prefill, decode)
    assert_decodes_like_one_engine(report)
    assert_handed_back(report)
    if (family, prefill, decode) == COMPACTED_BY_RANKS:
        assert_decodes_compacted_kv_as_torch_does(report)
    alone = pair.report(family, "float32")["attention"]
    assert report["attention"] == (alone if alone is None else pytest.approx(alone, abs=1e-5))
