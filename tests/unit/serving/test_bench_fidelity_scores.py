"""What the fidelity benchmark makes of outcomes: scores, intervals, margins, false reuse, alarms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from infra.reference.families import FAMILIES
from infra.reference.scenes import Split
from prefill_workers.link.keys import contexts
from prefill_workers.protocol import ChunkSpan, LinkRequest
from prefill_workers.settings import FREE_TEXT, FidelitySettings
from serving.bench.fidelity import envelope, online
from serving.bench.fidelity.arms import TOKEN_ARMS
from serving.bench.fidelity.scores import Scores, figures, margin, median, share, summary
from serving.bench.fidelity.tables import margins


def answers(best: int, sure: float = 0.9) -> Tensor:
    """Log-probabilities [1, 4] with one likeliest token."""
    rest = (1 - sure) / 3
    return torch.tensor([[sure if token == best else rest for token in range(4)]]).log()


def scored(*tops: int, wanted: int = 1) -> Scores:
    scores = Scores()
    for top in tops:
        scores.add(answers(top), answers(wanted), (wanted,))
    return scores


def test_scores_of_arms_against_exact_and_blind():
    exact, blind = scored(*[1] * 40), scored(*[1, 2] * 20)
    half = scored(*[1, 1, 1, 2] * 10)
    found = figures(half, blind, exact)
    assert found["accuracy"].value == pytest.approx(0.75)
    assert found["eta"].value == pytest.approx(0.5)
    assert found["flip_recover"].value == pytest.approx(0.5)
    one = math.log(0.9 / (0.1 / 3)) * (0.9 - 0.1 / 3)  # KL between two of these distributions
    assert found["kl"].value == pytest.approx(one / 4, rel=1e-5)
    for interval in found.values():
        assert interval.low <= interval.value <= interval.high
    assert found["accuracy"].high - found["accuracy"].low == pytest.approx(
        2 * 1.96 * math.sqrt(0.75 * 0.25 / 40), rel=0.2
    )


def test_what_is_undefined_is_left_out():
    exact = scored(*[1] * 20)
    found = figures(exact, exact, exact)
    assert "eta" not in found
    assert "flip_recover" not in found


def test_an_answer_of_two_tokens_is_right_only_as_a_whole():
    scores = Scores()
    scores.add(torch.cat([answers(1), answers(2)]), torch.cat([answers(1), answers(3)]), (1, 3))
    assert scores.right == [False]


def test_a_summary_holds_what_is_defined_with_its_uncertainty():
    rows = summary({"exact": scored(*[1] * 40), "blind": scored(*[1, 2] * 20), "half": scored(*[1, 1, 1, 2] * 10)})
    assert rows["half"]["eta"] == pytest.approx(0.5)
    assert rows["half"]["eta ±"] > 0.0
    assert rows["half"]["computed"] == 0.0
    assert "eta" not in summary({"exact": scored(1), "blind": scored(1)})["blind"]


def test_shares_and_medians_have_intervals_over_items():
    outcomes = np.asarray([[True, False]] * 50 + [[False, False]] * 50)
    assert share(outcomes)["share"] == 0.25
    assert 0.03 < share(outcomes)["share ±"] < 0.07, "an item's two outcomes count as one"
    assert median([1.0] * 10 + [2.0] * 90) == {"median": 2.0, "median ±": 0.0}
    assert median([1.0] * 50 + [2.0] * 50)["median ±"] > 0.2


def test_entries_of_one_item_are_drawn_together():
    """Two items of 20 entries each, of which one is closed and one is not, tell no more than two entries."""
    closed = {"exact": scored(*[1] * 40), "blind": scored(*[2] * 40), "half": scored(*[1] * 20, *[2] * 20)}
    apart, together = (summary(closed, rows)["half"]["accuracy ±"] for rows in (1, 20))
    assert apart < 0.2
    assert together == pytest.approx(0.5)


def test_the_margin_is_over_the_best_tokens_and_only_where_blind_reuse_loses():
    arms = {f"{arm}_within_25": {"eta": eta} for arm, eta in zip(TOKEN_ARMS, (0.1, 0.7, 0.2, 0.4), strict=True)}
    arms |= {"patch_within_25": {"eta": 0.9, "margin ±": 0.01}, "exact": {"accuracy": 1.0}}
    left = {Split.multi: 0.9, Split.single: 0.95}
    cells = margins({split: {**arms, "blind": {"accuracy": accuracy}} for split, accuracy in left.items()}, 25)
    assert cells["multi"] == pytest.approx(0.2)
    assert cells["multi ±"] == 0.01
    assert math.isnan(cells["single"])
    assert "single ±" not in cells


def test_a_margins_interval_is_of_items_that_are_drawn_for_both_arms():
    """Both close the same share of every item but for a tenth: how much is lost of an item does not matter."""
    lost = [1.0, 2.0] * 20
    blind, tokens, others, patch = (Scores(kl=[share * one for one in lost]) for share in (1.0, 0.2, 0.5, 0.1))
    found = margin(patch, {"tokens": tokens, "others": others}, blind)
    assert found.value == pytest.approx(0.1)
    assert found.uncertainty == pytest.approx(0.0, abs=1e-9)
    uneven = margin(Scores(kl=[0.0, 0.4] * 20), {"tokens": tokens}, blind)
    assert uneven.value == pytest.approx(0.2 - 0.2 / 1.5)
    assert uneven.uncertainty > 0.01
    assert margin(patch, {"tokens": tokens}, Scores(kl=[0.0] * 40)) is None


def test_only_reuses_that_the_rule_allows_can_be_false():
    def scores(changed: bool) -> dict[str, Scores]:
        return {"exact": scored(1, 1), "stale": scored(1, 2 if changed else 1), "orbit": scored(1, 1)}

    allowed = [one.name for one in envelope.SITUATIONS if "stale" in one.served]
    assert 0 < len(allowed) < len(envelope.SITUATIONS)
    for wrong in (allowed, [one.name for one in envelope.SITUATIONS if one.name not in allowed]):
        false = dict(envelope.false_reuse({one.name: scores(one.name in wrong) for one in envelope.SITUATIONS}))
        found = {arm: share["share"] for arm, share in false.items()}
        assert found == {"own": 0.5 if wrong is allowed else 0.0, "orbit": 0.0}


def test_answers_are_right_or_wrong_only_where_the_pages_that_tell_them_are_there():
    gone = [one.name for one in envelope.SITUATIONS if not one.is_answerable]
    assert gone == ["one dropped", "one replaced", "all replaced"]


def test_the_rule_of_the_table_is_the_linkers():
    """What text a situation has where, and what it had when the patch was formed, decides in both alike."""
    tokens = FAMILIES["qwen2_5_vl"].recipe.tokenizer()

    def context(asked: dict[str, Any]) -> tuple[int, ...]:
        """Of the last of four pages of one token each."""
        texts = [*asked.get("before", ()), *[""] * 4][:4]
        prompt, spans = list[int](), []
        for text in texts:
            prompt += tokens(text)["input_ids"] if text else []
            spans.append(ChunkSpan("page", "image", len(prompt), len(prompt) + 1, len(prompt), 1))
            prompt.append(0)
        return contexts(LinkRequest("request", prompt, tuple(spans)), FREE_TEXT)[-1]

    alike = [one for one in envelope.SITUATIONS if one.pages("abc", "xyz") == "abc" and "system" not in one.text]
    assert len(alike) > 6
    for one in alike:
        assert ("stale" in one.served) == (context(one.text) == context(one.taught)), one.name


def test_what_checks_see_is_told_with_intervals_over_them():
    rows = online.table({"even": [0.2] * 100, "uneven": [0.1, 0.3] * 50})
    assert rows["even"]["mean"] == pytest.approx(rows["uneven"]["mean"]) == pytest.approx(0.2)
    assert rows["even"]["mean ±"] == pytest.approx(0.0)
    assert rows["uneven"]["mean ±"] == pytest.approx(1.96 * 0.1 / 10, rel=0.2)
    assert rows["uneven"]["median ±"] > rows["even"]["median ±"] == 0.0


def test_alarms_follow_the_rolling_mean_of_the_check():
    settings = FidelitySettings(window=64, minimum=8)
    assert online.alarms([0.01, 0.02], settings, bound=0.05)[0] == 0.0
    assert online.alarms([0.1, 0.2], settings, bound=0.05) == (1.0, 8.0)  # as soon as it may be judged
    rare = [3.0] + [0.0] * 59
    alone, after = online.alarms(rare, settings, bound=0.04)  # one of 3 nats in a whole window passes it
    assert alone > 0.99
    assert after > 8
    early, _ = online.alarms(rare, settings, bound=0.2)  # only among the first 15 checks, or with others
    assert 0.15 < early < 0.5
