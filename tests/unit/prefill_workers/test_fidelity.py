"""Rolling fidelity: what a check measures, when an operating point is switched off, and how it comes back."""

from __future__ import annotations

import itertools
import logging
import math
import time

import pytest
import torch
from pydantic import ValidationError

from prefill_workers.fidelity.disabled_points import PointDecision
from prefill_workers.fidelity.monitor import KL_BUCKETS, MAX_KL, Comparison, Fidelity, compare
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings

PATCHED, COMPOSED, RELOCATED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED, OperatingPoint.RELOCATED
GOOD, BAD = Comparison(0.001, True), Comparison(1.0, False)


def fidelity(**settings) -> Fidelity:
    return Fidelity(
        FidelitySettings(**{"share": 1.0, "window": 4, "minimum": 2, "bounds": {PATCHED: 0.05}, **settings})
    )


def status(of: Fidelity, point: OperatingPoint):
    return next(status for status in of.status() if status.point is point)


def test_kl_is_of_the_exact_from_the_served_in_nats_and_averaged_over_tokens():
    exact = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    served = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log() + 3.0  # logits are free of a constant
    expected = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert compare(exact, served) == (pytest.approx(expected), True)


def test_tokens_agree_when_the_last_ones_most_likely_is_the_same():
    a, b = torch.tensor([[5.0, 0.0], [5.0, 0.0]]), torch.tensor([[0.0, 5.0], [5.0, 0.0]])
    assert compare(a, b).agrees
    assert not compare(a, b.flip(0)).agrees


def test_equal_logits_are_no_divergence_even_with_tokens_ruled_out():
    logits = torch.randn(3, 50)
    logits[:, 7] = -torch.inf
    assert compare(logits, logits) == (0.0, True)


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_served_numbers_that_are_none_count_as_the_worst(poison: float):
    exact, served = torch.zeros(1, 4), torch.zeros(1, 4)
    served[0, 1] = poison
    assert compare(exact, served).kl == MAX_KL


@pytest.mark.parametrize("exact", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_an_exact_forward_that_gives_no_distribution_judges_nobody(exact: list[float]):
    with pytest.raises(RuntimeError, match="no distribution"):
        compare(torch.tensor([exact]), torch.zeros(1, 2))


def test_one_request_of_a_hundred_is_checked_by_default():
    assert FidelitySettings().share == 0.01


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_configured_share_of_reused_requests_is_drawn(share: float):
    draws = itertools.cycle([0.1, 0.3, 0.6, 0.9])
    drawing = Fidelity(FidelitySettings(share=share), chance=lambda: next(draws))
    drawn = [drawing.draw([PATCHED, OperatingPoint.RECOMPUTED, PATCHED]) for _ in range(8)]
    assert drawn.count((PATCHED,)) == 8 * share


def test_sums_that_err_are_switched_off_alone_and_patches_beside_them_are_judged_by_themselves():
    """Every request with a sum has patches too: a model that composes badly must not lose these."""
    watched = fidelity()
    for _ in range(2):
        watched.record(watched.draw([PATCHED, PATCHED, COMPOSED]), BAD)
    assert not watched.allows(COMPOSED)
    assert watched.allows(PATCHED)
    assert status(watched, PATCHED).checks == 0
    for _ in range(2):  # no request has sums any more: patches that err cannot hide
        watched.record(watched.draw([PATCHED, OperatingPoint.RECOMPUTED]), BAD)
    assert not watched.allows(PATCHED)


def test_the_bound_of_patches_holds_for_sums_of_them_unless_these_have_their_own():
    default = FidelitySettings().bounds
    assert 0 < default[COMPOSED] < default[PATCHED]
    assert FidelitySettings(bounds={"patched": 0.1}).bounds == {PATCHED: 0.1, COMPOSED: 0.1}
    assert FidelitySettings(bounds={"patched": 0.1, "composed": 0.2}).bounds == {PATCHED: 0.1, COMPOSED: 0.2}
    assert FidelitySettings(bounds={}).bounds == {}


def test_requests_that_reused_nothing_are_not_drawn():
    assert fidelity().draw([OperatingPoint.ENCODED, OperatingPoint.RECOMPUTED]) == ()


def test_a_point_is_switched_off_once_its_rolling_kl_passes_its_bound(caplog: pytest.LogCaptureFixture):
    told: list[PointDecision] = []
    settings = FidelitySettings(window=4, minimum=2, bounds={PATCHED: 0.05})
    watched = Fidelity(settings, on_disable=lambda: told.extend(watched.decisions()))
    with caplog.at_level(logging.WARNING, logger="prefill_workers.fidelity.monitor"):
        for _ in range(4):
            watched.record([PATCHED], GOOD)
        assert watched.allows(PATCHED)
        watched.record([PATCHED], BAD)
        watched.record([PATCHED], BAD)  # for the others, and for the log, it went off with the first
    assert not watched.allows(PATCHED)
    assert [(decision.point, decision.allowed) for decision in told] == [(PATCHED, False)]
    assert told[0].reason == "its rolling KL is 0.251 nats over the last 4 checks, its bound is 0.05"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "operating point patched is switched off" in line
    assert "rolling KL is 0.251 nats over the last 4 checks" in line
    assert "bound is 0.05" in line
    assert "orbitserve fidelity allow patched" in line


def test_too_few_checks_judge_nobody():
    watched = fidelity(minimum=3)
    watched.record([PATCHED], BAD)
    watched.record([PATCHED], BAD)
    assert watched.allows(PATCHED)
    watched.record([PATCHED], BAD)
    assert not watched.allows(PATCHED)


def test_a_point_without_a_bound_is_only_measured():
    watched = fidelity()
    for _ in range(8):
        watched.record([RELOCATED], BAD)
    assert watched.allows(RELOCATED)
    assert status(watched, RELOCATED).rolling_kl == 1.0
    assert status(watched, RELOCATED).bound is None


def test_old_checks_leave_the_window():
    watched = fidelity(bounds={})
    for found in [BAD, *[GOOD] * 4]:
        watched.record([PATCHED], found)
    now = status(watched, PATCHED)
    assert now.rolling_kl == pytest.approx(GOOD.kl)
    assert (now.checks, now.agreements, now.rolling_checks, now.rolling_agreement) == (5, 4, 4, 1.0)
    assert now.kl_sum == pytest.approx(BAD.kl + 4 * GOOD.kl)
    assert sum(now.kl_counts) == 5
    assert now.kl_counts[KL_BUCKETS.index(GOOD.kl)] == 4, "an edge belongs to the bucket that it ends"


def test_what_an_operator_allows_is_judged_anew(caplog: pytest.LogCaptureFixture):
    watched = fidelity()
    watched.record([PATCHED], BAD)
    watched.record([PATCHED], BAD)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="prefill_workers.fidelity.monitor"):
        assert watched.allow(PATCHED)
        assert not watched.allow(PATCHED), "it is allowed already"
    assert [record.getMessage() for record in caplog.records] == [
        "operating point patched is allowed again by an operator"
    ]
    assert watched.allows(PATCHED)
    watched.record([PATCHED], BAD)
    assert watched.allows(PATCHED), "one check does not judge"
    watched.record([PATCHED], BAD)
    assert not watched.allows(PATCHED)


def test_requests_served_before_an_operator_allowed_a_point_do_not_judge_it():
    watched = fidelity()
    served_at = time.perf_counter()
    watched.record([PATCHED], BAD, served_at)
    watched.record([PATCHED], BAD, served_at)
    assert not watched.allows(PATCHED)
    watched.allow(PATCHED)
    for _ in range(4):
        watched.record([PATCHED], BAD, served_at)
    assert watched.allows(PATCHED)
    assert status(watched, PATCHED).rolling_checks == 0
    assert status(watched, PATCHED).skipped == {"allowed": 4}
    for _ in range(2):
        watched.record([PATCHED], BAD, time.perf_counter())
    assert not watched.allows(PATCHED)


def test_of_two_decisions_the_later_one_holds():
    this, other = fidelity(), fidelity()
    other.disable(PATCHED, "a test")
    before = other.decisions()
    this.apply(before)
    assert not this.allows(PATCHED)
    assert this.decisions() == before, "the reason is handed on, and since when"
    assert this.allow(PATCHED)
    this.apply(before)
    assert this.allows(PATCHED), "an operator allowed it since"
    other.apply(this.decisions())
    assert other.allows(PATCHED)
    this.disable(COMPOSED, "a test")
    this.apply(fidelity().decisions())
    assert not this.allows(COMPOSED), "where nothing was ever decided nobody allowed anything"


def test_an_operator_allows_a_point_also_where_it_never_was_disabled():
    this, other = fidelity(), fidelity()
    other.disable(PATCHED, "a test")
    assert not this.allow(PATCHED)
    other.apply(this.decisions())
    assert other.allows(PATCHED)


def test_kv_that_was_made_before_a_point_was_last_decided_about_is_not_allowed():
    watched = fidelity()
    assert watched.allows(PATCHED, 0.0)
    watched.disable(PATCHED, "a test", since=5.0)
    watched.allow(PATCHED, since=7.0)
    assert [watched.allows(PATCHED, made) for made in (4.0, 6.0, 7.0, 8.0)] == [False, False, False, True]
    assert watched.allows(COMPOSED, 4.0)


def test_exact_points_are_always_allowed():
    watched = fidelity()
    assert watched.allows(OperatingPoint.RECOMPUTED, 0.0)
    assert not watched.allow(OperatingPoint.ENCODED)


def test_a_check_counts_for_every_point_that_its_request_used():
    watched = fidelity(bounds={PATCHED: 0.05, RELOCATED: 0.05})
    for _ in range(2):
        watched.record([PATCHED, RELOCATED], BAD)
    assert not watched.allows(PATCHED)
    assert not watched.allows(RELOCATED)


def test_skipped_checks_are_counted_by_reason_and_judge_nothing():
    watched = fidelity()
    watched.skip([PATCHED], "embeddings")
    watched.skip([PATCHED], "embeddings")
    assert status(watched, PATCHED).skipped == {"embeddings": 2}
    assert status(watched, PATCHED).checks == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bounds": {"recomputed": 0.1}}, "recomputed is exact"),
        ({"bounds": {"patched": 0}}, "must be positive"),
        ({"bounds": {"pached": 0.1}}, "pached"),
        ({"minimum": 9, "window": 8}, "never lie in a window of 8"),
        ({"share": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        FidelitySettings(**settings)
