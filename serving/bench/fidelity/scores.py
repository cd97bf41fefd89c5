"""Scores of arms: accuracy, KL to exact, η, flips recovered and bytes, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prefill_workers.fidelity.monitor import compare
from serving.bench.harness import UNCERTAINTY

RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% bootstrap interval over items.

    Where all items agree it has no width: of 500 of them the true share is then within 0.006 of theirs, 19 times of 20.
    """

    value: float
    low: float
    high: float

    @property
    def uncertainty(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


@dataclass
class Scores:
    """Outcomes of one arm, one entry an item (`reorder`: one an order), in equal lists.

    `right`: whether the whole answer is right; `kl`: KL(exact ‖ arm) in nats, mean over the answer's tokens; `top`: the
    tokens that the arm answers; `bytes_fraction`: bytes stored beside the canonical KV, as a share of that KV;
    `computed`: the share of the pages that forwards compute, in tokens times layers.
    """

    right: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top: list[tuple[int, ...]] = field(default_factory=list)
    bytes_fraction: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    def add(
        self, answers: Tensor, exact: Tensor, wanted: Sequence[int], kept: float = 0.0, computed: float = 0.0
    ) -> None:
        """Take an item's answer log-probabilities [tokens, vocabulary] and the exact prefill's."""
        best = answers.argmax(-1)
        self.right.append(bool((best == torch.tensor(wanted)).all()))
        self.kl.append(compare(exact, answers).kl)
        self.top.append(tuple(best.tolist()))
        self.bytes_fraction.append(kept)
        self.computed.append(computed)


def figures(arm: Scores, blind: Scores, exact: Scores, rows: int = 1) -> dict[str, Interval]:
    """Accuracy, KL, η and recovered flips of an arm.

    `eta`: share of the blind loss that the arm closes (kamera.md §5); `flip_recover`: how often the arm agrees with
    exact where blind reuse does not. Undefined figures are left out.

    `rows`: entries of an item, which follow one another and are drawn together.
    """
    draws = (_drawn(len(arm.right) // rows)[..., None] * rows + np.arange(rows)).reshape(RESAMPLES, -1)
    right, kl = np.asarray(arm.right, float), np.asarray(arm.kl)
    lost = np.asarray(blind.kl)
    agrees = _agrees(arm, exact)
    flipped = ~_agrees(blind, exact)
    found = {
        "accuracy": _interval(right.mean(), right[draws].mean(1)),
        "kl": _interval(kl.mean(), kl[draws].mean(1)),
    }
    if lost.mean() > 1e-6:
        found["eta"] = _interval(1 - kl.mean() / lost.mean(), 1 - kl[draws].mean(1) / lost[draws].mean(1).clip(1e-9))
    if flipped.sum() >= 10:
        among = flipped[draws]
        share = (agrees[draws] & among).sum(1) / among.sum(1).clip(1)
        found["flip_recover"] = _interval(agrees[flipped].mean(), share)
    return found


def margin(arm: Scores, others: Mapping[str, Scores], blind: Scores) -> Interval | None:
    """η of an arm less that of the best of some others, resampled over the same items.

    None where blind reuse loses nothing.
    """
    lost = np.asarray(blind.kl)
    if lost.mean() <= 1e-6:
        return None
    best = min(others.values(), key=lambda other: statistics.mean(other.kl))
    more = np.asarray(best.kl) - np.asarray(arm.kl)
    draws = _drawn(len(more))
    return _interval(more.mean() / lost.mean(), more[draws].mean(1) / lost[draws].mean(1).clip(1e-9))


def changed(scores: Mapping[str, Scores], arm: str) -> np.ndarray:
    """True per item if an arm's answer differs from that of `exact`."""
    return ~_agrees(scores[arm], scores["exact"])


def share(outcomes: np.ndarray) -> dict[str, float]:
    """Share of true outcomes [items] or [items, situations], and half its interval over items."""
    found = average(outcomes.reshape(len(outcomes), -1).mean(1))
    return {"share": found.value, f"share {UNCERTAINTY}": found.uncertainty}


def average(by_item: Sequence[float] | np.ndarray) -> Interval:
    """The mean of a value per item."""
    values = np.asarray(by_item)
    return _interval(values.mean(), values[_drawn(len(values))].mean(1))


def median(values: Sequence[float]) -> dict[str, float]:
    """The median of a value per item, and half of its interval over items."""
    by_item = np.asarray(values)
    found = _interval(np.median(by_item), np.median(by_item[_drawn(len(by_item))], axis=1))
    return {"median": found.value, f"median {UNCERTAINTY}": found.uncertainty}


def _drawn(items: int) -> np.ndarray:
    """Items drawn anew, [RESAMPLES, items]."""
    return np.random.default_rng(0).integers(items, size=(RESAMPLES, items))


def _agrees(arm: Scores, exact: Scores) -> np.ndarray:
    return np.asarray([answered == wanted for answered, wanted in zip(arm.top, exact.top, strict=True)])


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def summary(scores: Mapping[str, Scores], rows: int = 1) -> dict[str, dict[str, float]]:
    """Every defined figure by arm; `x ±` is half of the 95% interval of `x`.

    `rows`: entries of an item.
    """
    table: dict[str, dict[str, float]] = {}
    for arm, one in scores.items():
        table[arm] = {name: statistics.mean(getattr(one, name)) for name in ("bytes_fraction", "computed")}
        for name, found in figures(one, scores["blind"], scores["exact"], rows).items():
            table[arm] |= {name: found.value, f"{name} {UNCERTAINTY}": found.uncertainty}
    return table
