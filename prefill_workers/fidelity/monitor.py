"""Online fidelity: how far what is served is from exact, per operating point, and which points are switched off for it.

A share of the requests that reused KV is computed again exactly (see `recheck`). Each check gives the KL divergence of
the served next-token distribution from the exact one, and whether both agree on the most likely token. The mean KL of a
point's last checks is its rolling KL. Once that passes the point's bound, the point is switched off: the linker leaves
its chunks to a forward, for every request, until an operator allows it again. That outlives the process, as far as
`switched_off` says; what was measured does not.

A check counts for every approximate point that its request used. It sees their sum and cannot tell which of them erred;
blaming only one would let another hide behind it. Except patches beside sums of patches: such a check counts for the
sums alone. A model that composes badly so loses its sums and keeps its patches. These cannot hide for ever: if it is
they that err, the sums go first, and every check after that is of patches alone.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prefill_workers.fidelity.disabled_points import DisabledPoints
from prefill_workers.modes import EXACT_POINTS, OperatingPoint
from prefill_workers.settings import FidelitySettings

logger = logging.getLogger(__name__)

KL_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # nats, upper edges
MAX_KL = 100.0  # nats; what served NaN counts as. A uniform distribution over 150,000 tokens is 12 nats from a sure one


class Comparison(NamedTuple):
    """What one check found: mean KL(exact ‖ served) in nats, and whether the last token's argmax is the same."""

    kl: float
    agrees: bool


def compare(exact: Tensor, served: Tensor) -> Comparison:
    """Compare logits [tokens, vocabulary] of a prompt's last tokens.

    Raises:
        RuntimeError: the exact logits make no distribution: there is nothing to compare with.
    """
    p, q = exact.double().log_softmax(-1), served.double().log_softmax(-1)
    if p.isnan().any():
        raise RuntimeError("the exact forward gave no distribution")
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    kl = terms.sum(-1).mean().nan_to_num(MAX_KL, posinf=MAX_KL).clamp(0.0, MAX_KL)
    return Comparison(float(kl), bool(exact[-1].argmax() == served[-1].argmax()))


@dataclass(frozen=True)
class PointStatus:
    """What is known of one operating point. Counts are since the worker started, the rolling values since `allow`."""

    point: OperatingPoint
    allowed: bool
    bound: float | None  # nats; None: measured only
    checks: int
    agreements: int
    kl_sum: float  # nats
    kl_counts: tuple[int, ...]  # checks per bucket of KL_BUCKETS, and one for what lies above
    rolling_checks: int
    rolling_kl: float | None  # nats; None before the first check
    rolling_agreement: float | None  # 0 to 1
    skipped: dict[str, int]  # checks that were drawn and not made, by reason
    changed: float  # Unix seconds: when it was last switched off, or allowed by an operator; 0: never


@dataclass
class _Record:
    """One operating point's checks."""

    window: deque[Comparison]
    allowed: bool = True
    changed: float = 0.0  # see PointStatus
    allowed_at: float = -math.inf  # by an operator, the last time; `time.perf_counter`
    checks: int = 0
    agreements: int = 0
    kl_sum: float = 0.0
    kl_counts: list[int] = field(default_factory=lambda: [0] * (len(KL_BUCKETS) + 1))
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def rolling_kl(self) -> float | None:
        return sum(check.kl for check in self.window) / len(self.window) if self.window else None

    def add(self, found: Comparison) -> None:
        self.window.append(found)
        self.checks += 1
        self.agreements += found.agrees
        self.kl_sum += found.kl
        self.kl_counts[bisect_left(KL_BUCKETS, found.kl)] += 1


class Fidelity:
    """Rolling fidelity of every approximate operating point. Thread-safe.

    Args:
        on_switch_off: called with a point that its rolling KL has just switched off, and when that was (Unix seconds),
            on the recording thread.
        kept: where it is kept which points are switched off; those that are there already are.
        chance: draws from [0, 1); a request below `share` is checked.
    """

    def __init__(
        self,
        settings: FidelitySettings,
        on_switch_off: Callable[[OperatingPoint, float], object] = lambda point, since: None,
        chance: Callable[[], float] = random.random,
        kept: DisabledPoints | None = None,
    ) -> None:
        self.settings = settings
        self._on_switch_off, self._chance = on_switch_off, chance
        self._before_allowing: list[Callable[[OperatingPoint], object]] = []
        self._lock = threading.Lock()
        self._records = {
            point: _Record(deque(maxlen=settings.window)) for point in OperatingPoint if point not in EXACT_POINTS
        }
        self._kept = kept or DisabledPoints(None, "")
        for point, (reason, since) in self._kept.read().items():
            self._records[point].allowed, self._records[point].changed = False, since
            logger.warning("operating point %s is switched off, and was before this process started: %s", point, reason)

    def draw(self, points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
        """The points that a check of a finished request counts for, if it is to be checked; else none."""
        approximate = dict.fromkeys(point for point in points if point in self._records)
        if OperatingPoint.COMPOSED in approximate:
            approximate.pop(OperatingPoint.PATCHED, None)
        return tuple(approximate) if approximate and self._chance() < self.settings.share else ()

    def allows(self, point: OperatingPoint) -> bool:
        """Whether requests may be served at this point."""
        record = self._records.get(point)
        return record is None or record.allowed

    def record(self, points: Iterable[OperatingPoint], found: Comparison, served_at: float = math.inf) -> None:
        """Count a check, and switch off the points whose rolling KL it brought past their bound.

        `served_at` (`time.perf_counter`): when its request was served. A point that an operator allowed after that is
        not judged by it: it tells of what was wrong then.
        """
        failed: list[tuple[OperatingPoint, float]] = []
        for point in points:
            with self._lock:
                record, bound = self._records[point], self.settings.bounds.get(point)
                if served_at < record.allowed_at:
                    record.skipped["allowed"] += 1
                    continue
                record.add(found)
                rolling, count = record.rolling_kl, len(record.window)
                passes = bound is not None and rolling is not None and rolling > bound
                if not (passes and count >= self.settings.minimum and record.allowed):
                    continue
                record.allowed, record.changed = False, time.time()
                reason = f"its rolling KL is {rolling:.3g} nats over the last {count} checks, its bound is {bound:.3g}"
                self._kept.add(point, reason, record.changed)
                failed.append((point, record.changed))
            logger.warning(
                "operating point %s is switched off: %s. Its chunks are computed exactly until an operator allows it: "
                "orbitserve fidelity allow %s",
                *(point, reason, point),
            )
        for point, since in failed:
            self._on_switch_off(point, since)

    def skip(self, points: Iterable[OperatingPoint], reason: str) -> None:
        """Count a check that was drawn and could not be made."""
        with self._lock:
            for point in points:
                self._records[point].skipped[reason] += 1

    def switch_off(self, point: OperatingPoint, reason: str, since: float | None = None) -> None:
        """Do not serve at an approximate point until it is allowed again.

        `since`: of news from elsewhere, Unix seconds; nothing happens if what is known here is later. None: now.
        """
        with self._lock:
            record = self._records[point]
            if since is not None and since <= record.changed:
                return
            was_allowed, record.allowed = record.allowed, False
            if was_allowed:
                record.changed = time.time() if since is None else since
                self._kept.add(point, reason, record.changed)
        if was_allowed:
            logger.warning("operating point %s is switched off: %s", point, reason)

    def hear(self, name: str, points: Iterable[PointStatus]) -> None:
        """Take over what has changed on another worker, of that name, later than here."""
        for status in points:
            if status.allowed:
                self.allow(status.point, status.changed)
            else:
                self.switch_off(status.point, f"it is on prefill replica {name}", status.changed)

    def before_allowing(self, listener: Callable[[OperatingPoint], object]) -> None:
        """Have `listener` called with a point just before it is allowed again: what was learnt at it may be wrong."""
        self._before_allowing.append(listener)

    def allow(self, point: OperatingPoint, since: float | None = None) -> bool:
        """Serve at a point again, judged by requests served from now on. Returns whether it was switched off.

        `since`: as of `switch_off`.
        """
        with self._lock:
            record = self._records.get(point)
            if record is None or (since is not None and since <= record.changed):
                return False
            record.changed = time.time() if since is None else since
            if record.allowed:
                return False
            for listener in self._before_allowing:
                listener(point)
            record.allowed, record.allowed_at = True, time.perf_counter()
            record.window.clear()
            self._kept.remove(point)
        logger.warning("operating point %s is allowed again by an operator", point)
        return True

    def status(self) -> list[PointStatus]:
        """All approximate points, for metrics and operators."""
        with self._lock:
            return [self._status(point, record) for point, record in self._records.items()]

    def _status(self, point: OperatingPoint, record: _Record) -> PointStatus:
        window = record.window
        return PointStatus(
            point=point,
            allowed=record.allowed,
            bound=self.settings.bounds.get(point),
            checks=record.checks,
            agreements=record.agreements,
            kl_sum=record.kl_sum,
            kl_counts=tuple(record.kl_counts),
            rolling_checks=len(window),
            rolling_kl=record.rolling_kl,
            rolling_agreement=sum(check.agrees for check in window) / len(window) if window else None,
            skipped=dict(record.skipped),
            changed=record.changed,
        )
