"""Online fidelity: rolling KL of served from exact answers, and the points it disables.

A share of the requests that reused KV is computed again exactly (see `shadow_check`). Each check gives the KL
divergence of the served next-token distribution from the exact one, and whether both agree on the most likely token.
The mean KL of a point's last checks is its rolling KL. Once that passes the point's bound, the point is disabled: the
linker leaves its chunks to a forward, for every request, until an operator allows it again. Decisions are shared and
persisted by the library's keeper (`serving.replicas.fidelity`); what was measured stays in this process.

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

from prefill_workers.fidelity.disabled_points import PointDecision
from prefill_workers.modes import EXACT_POINTS, OperatingPoint
from prefill_workers.settings import FidelitySettings

logger = logging.getLogger(__name__)

KL_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # nats, upper edges
MAX_KL = 100.0  # nats; what served NaN counts as. A uniform distribution over 150,000 tokens is 12 nats from a sure one


class Comparison(NamedTuple):
    """Outcome of one check: mean KL(exact ‖ served) [nats], and equality of the last argmax."""

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
    """Measurements of one operating point.

    Counts are since the worker started, rolling values since `allow`.
    """

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


@dataclass
class _Record:
    """One operating point's checks."""

    window: deque[Comparison]
    allowed: bool = True
    changed: float = 0.0  # Unix seconds: when it was last disabled, or allowed by an operator; 0: never
    reason: str = ""  # why it was disabled
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
        on_disable: called on the recording thread when a rolling KL has just disabled points.
        chance: draws from [0, 1); a request below `share` is checked.
    """

    def __init__(
        self,
        settings: FidelitySettings,
        on_disable: Callable[[], object] = lambda: None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self._on_disable, self._chance = on_disable, chance
        self._before_allowing: list[Callable[[OperatingPoint], object]] = []
        self._lock = threading.Lock()
        self._records = {
            point: _Record(deque(maxlen=settings.window)) for point in OperatingPoint if point not in EXACT_POINTS
        }

    def draw(self, points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
        """Points that a check of a finished request counts for; none if it is not to be checked."""
        approximate = dict.fromkeys(point for point in points if point in self._records)
        if OperatingPoint.COMPOSED in approximate:
            approximate.pop(OperatingPoint.PATCHED, None)
        return tuple(approximate) if approximate and self._chance() < self.settings.share else ()

    def allows(self, point: OperatingPoint, made: float = math.inf) -> bool:
        """True if requests may be served at this point.

        `made` (Unix seconds): with KV of that time. What was made before the last decision may be what it was about.
        """
        record = self._records.get(point)
        return record is None or (record.allowed and (made > record.changed or not record.changed))

    def record(self, points: Iterable[OperatingPoint], found: Comparison, served_at: float = math.inf) -> None:
        """Count a check, and disable the points whose rolling KL it brought past their bound.

        `served_at` (`time.perf_counter`): when its request was served. A point that an operator allowed after that is
        not judged by it: it tells of what was wrong then.
        """
        has_disabled = False
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
                reason = f"its rolling KL is {rolling:.3g} nats over the last {count} checks, its bound is {bound:.3g}"
                record.allowed, record.changed, record.reason = False, time.time(), reason
                has_disabled = True
            logger.warning(
                "operating point %s is switched off: %s. Its chunks are computed exactly until an operator allows it: "
                "orbitserve fidelity allow %s",
                *(point, reason, point),
            )
        if has_disabled:
            self._on_disable()

    def skip(self, points: Iterable[OperatingPoint], reason: str) -> None:
        """Count a check that was drawn and could not be made."""
        with self._lock:
            for point in points:
                self._records[point].skipped[reason] += 1

    def disable(self, point: OperatingPoint, reason: str, since: float | None = None) -> None:
        """Do not serve at an approximate point until it is allowed again.

        `since`: of a decision made elsewhere, Unix seconds; ignored unless later than what is known here. None: now.
        """
        with self._lock:
            record = self._records[point]
            if since is not None and since <= record.changed:
                return
            was_allowed, record.allowed = record.allowed, False
            if was_allowed:
                record.changed, record.reason = time.time() if since is None else since, reason
        if was_allowed:
            logger.warning("operating point %s is switched off: %s", point, reason)

    def before_allowing(self, listener: Callable[[OperatingPoint], object]) -> None:
        """Call `listener` with a point before it is allowed again: caches made at it may be wrong."""
        self._before_allowing.append(listener)

    def allow(self, point: OperatingPoint, since: float | None = None) -> bool:
        """Serve at a point again, judged by later requests. Returns whether it was disabled.

        `since`: as of `disable`.
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
        logger.warning("operating point %s is allowed again by an operator", point)
        return True

    def decisions(self) -> list[PointDecision]:
        """Last decisions about all points that were ever disabled, or allowed by an operator."""
        with self._lock:
            return [
                PointDecision(point, record.allowed, record.changed, "" if record.allowed else record.reason)
                for point, record in self._records.items()
                if record.changed
            ]

    def apply(self, decisions: Iterable[PointDecision]) -> None:
        """Adopt decisions made elsewhere that are later than those made here."""
        for point, allowed, changed, reason in decisions:
            if allowed:
                self.allow(point, changed)
            else:
                self.disable(point, reason, changed)

    def status(self) -> list[PointStatus]:
        """Measurements of all approximate points, for metrics and operators."""
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
        )
