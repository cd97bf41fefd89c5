"""What arms scored: accuracy, KL to exact, η, flips recovered and bytes, with bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prefill_workers.fidelity import compare
from serving.bench.harness import UNCERTAINTY

RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% bootstrap interval over items."""

    value: float
    low: float
    high: float


@dataclass
class Scores:
    """Every item's outcome by one arm; lists of equal length, one entry an item (`reorder`: one an order of it).

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


def figures(arm: Scores, blind: Scores, exact: Scores, rows: int = 1, seed: int = 0) -> dict[str, Interval]:
    """Accuracy, `kl`, `eta` (the share of the blind loss that the arm closes, kamera.md §5) and `flip_recover` (how
    often the arm agrees with exact where blind reuse does not). What is undefined is left out.

    `rows`: entries of an item, which follow one another and are drawn together.
    """
    items = np.random.default_rng(seed).integers(len(arm.right) // rows, size=(RESAMPLES, len(arm.right) // rows))
    draws = (items[..., None] * rows + np.arange(rows)).reshape(RESAMPLES, -1)
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


def _agrees(arm: Scores, exact: Scores) -> np.ndarray:
    return np.asarray([answered == wanted for answered, wanted in zip(arm.top, exact.top, strict=True)])


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def summary(scores: Mapping[str, Scores], rows: int = 1) -> dict[str, dict[str, float]]:
    """Every figure of every arm that is defined, by arm; `x ±` is half of the 95% interval of `x`.

    `rows`: entries of an item.
    """
    table: dict[str, dict[str, float]] = {}
    for arm, one in scores.items():
        table[arm] = {name: statistics.mean(getattr(one, name)) for name in ("bytes_fraction", "computed")}
        for name, found in figures(one, scores["blind"], scores["exact"], rows).items():
            table[arm] |= {name: found.value, f"{name} {UNCERTAINTY}": (found.high - found.low) / 2}
    return table
