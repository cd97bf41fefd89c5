"""Figures of benchmark `elastic` from what its parts measured, and its parts without an engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from prefill_workers.compaction.reduction import anchors
from prefill_workers.protocol import ChunkSpan, LinkRequest
from tests.benchmarks import elastic, elastic_answers, elastic_speed, elastic_text
from tests.benchmarks.elastic_arms import ARMS, OTHERS, Importance, arms_of

FULL = [True] * 10


def outcomes(**right: int) -> dict[str, dict[str, list[bool]]]:
    """Ten items a arm at budget 0.2, of which so many are right; those that are not named have none."""
    arms = {arm: {"0.2": [i < right.get(arm, 0) for i in range(10)]} for arm in ARMS}
    return {"full": {"0.2": FULL}, **arms}


def test_ours_is_the_policy_that_documents_advise_and_the_worst_family_counts():
    by_kind = {
        "gqa": {"before": outcomes(evict=10, cover=2, h2o=8), "after": outcomes(cover=9, evict=1, random=10)},
        "mha": {"before": outcomes(evict=9, merge=10, eq1=9), "after": outcomes(cover=10, h2o=5)},
    }
    found = elastic_answers.figures(by_kind, 0.2)
    assert (found["gqa.before_over_full"], found["before_over_full"]) == (1.0, 0.9)
    assert (found["gqa.before_over_best"], found["before_over_best"]) == (1.25, 1.0)
    assert (found["after_over_full"], found["after_over_best"]) == (0.9, 0.9)
    table = elastic_answers.shares(by_kind["gqa"]["before"])
    assert table["h2o"]["0.2"] == 0.8
    assert 0.1 < table["h2o"]["0.2 ±"] < 0.4
    assert table["full"]["0.2 ±"] == 0


def test_perplexity_over_others_is_paired_by_document():
    hard = [1.0, 2.0, 3.0, 4.0]
    losses = {arm: {"0.2": [loss + more for loss in hard]} for arm, more in
              {"evict": 0.1, "h2o": 0.2, "local": 0.3, "paper": 1.0, "full": 0.0}.items()}  # fmt: skip
    over = elastic_text.ratios(losses, 0.2)
    assert over["over h2o"]["ratio"] == pytest.approx(math.exp(-0.1))
    assert over["over h2o"]["ratio ±"] == pytest.approx(0, abs=1e-9), "documents differ, distances do not"
    assert over["over full"]["ratio"] == pytest.approx(math.exp(0.1))
    table = elastic_text.perplexity_table(losses)
    assert table["evict"]["0.2"] == pytest.approx(math.exp(2.6))
    losses["h2o"]["0.2"][0] += 1
    assert elastic_text.ratios(losses, 0.2)["over h2o"]["ratio ±"] > 0.05


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [("abcd", "abcd", 1.0), ("abcd", "axcxdx", 0.6), ("abcd", "dcba", 0.25), ("ab", "xy", 0.0), ("", "", 0.0)],
)
def test_rouge_l_is_the_longest_common_subsequence(one: str, other: str, alike: float):
    assert elastic_text.rouge_l(*([ord(letter) for letter in text] for text in (one, other))) == pytest.approx(alike)


def test_an_arm_has_as_many_entries_as_another_and_text_is_not_merged():
    n = 100
    seen = Importance(*torch.rand(2, 3, n, generator=torch.Generator().manual_seed(1)))
    image = ChunkSpan("a", "image", 10, 80, 12, 66, grid=(1, 6, 11))
    pages = LinkRequest("r", list(range(n)), (image,))
    found = {arm: (plan, scores) for arm, plan, scores in arms_of(pages, 0.4, seen)}
    assert found.keys() == set(ARMS)
    for plan, scores in found.values():
        assert plan.kept == 40
        assert anchors(scores, plan).shape == (3, 40)
    last = anchors(found["local"][1], found["local"][0])
    assert last[0].tolist() == [*range(4), *range(64, 100)]
    text = {arm for arm, _, _ in arms_of(LinkRequest("r", list(range(n))), 0.4, seen)}
    assert text == set(ARMS) - {"merge"}
    assert {*OTHERS, "evict", "cover"} == text
    assert list(arms_of(pages, 1.0, seen)) == []


def test_a_pool_admits_four_times_as_many_answers():
    whole, kept = 266, 61  # blocks of an answer
    assert elastic_speed.admitted(8192 + 257) == elastic_speed._BLOCKS // whole
    assert elastic_speed.concurrency(0.2) == pytest.approx(whole / kept, rel=0.01)


def test_targets_are_those_of_the_parts_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(elastic_speed, "throughput", lambda *_: {"full": 3.0, "budget": 2.0})
    monkeypatch.setattr(elastic, "vllm_environment", lambda **_: {})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    outcome = elastic.run(True, Console(quiet=True), only=["speed"])
    assert outcome.figures["throughput_8k"] == 1.5
    assert elastic.BENCHMARK.targets_of(outcome.figures).keys() == {"throughput_8k", "concurrency"}
    assert outcome.workload["parts"] == ["speed"]
    monkeypatch.setattr(elastic_text, "MODEL", tmp_path)
    with pytest.raises(FileNotFoundError, match="orbitserve fetch smollm2"):
        elastic.run(True, Console(quiet=True))
