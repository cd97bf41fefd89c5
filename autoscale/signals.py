"""Signals of replicas, flat dictionaries of floats, and the demand that follows from them.

A replica gives counters since its start and a few numbers of the moment. Work that came is what counters and queues
have grown by, so that a late or lost sample costs precision, never truth. What is missing, NaN or negative is unknown,
which is not zero.

| role    | signals besides COMMON                                                                               |
|---------|------------------------------------------------------------------------------------------------------|
| prefill | links, compute_s, compute_s2, load_s, encode_s (counters); queued_s, waiting; hot_bytes,              |
|         | only_here_s: seconds that its end costs, to hand over or compute again what nothing else keeps         |
| decode  | blocks, blocks_total, sequences, max_sequences, waiting, itl_s                                        |
| vision  | links (images), compute_s, compute_s2 (counters); queued_s, waiting                                   |
| patch   | backlog, compile_s (counter), compiled (counter), value_s (prefill seconds saved by the backlog)       |
| ingress | open, lag_s (of its event loop), refused (counter)                                                    |
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

RECENT_S = 10.0
Flat = Mapping[str, float]

COMMON = ("clock", "age_s", "ready_s")  # seconds: the replica's clock, since it serves, that its start took


class Role(StrEnum):
    """Roles that may be scaled."""

    DECODE = "decode"
    PREFILL = "prefill"
    VISION = "vision"
    PATCH = "patch"
    INGRESS = "ingress"


NEEDED: dict[Role, tuple[str, ...]] = {
    Role.DECODE: (*COMMON, "blocks", "blocks_total", "sequences", "max_sequences"),
    Role.PREFILL: (*COMMON, "links", "compute_s", "compute_s2", "load_s", "queued_s", "waiting"),
    Role.VISION: (*COMMON, "links", "compute_s", "compute_s2", "queued_s", "waiting"),
    Role.PATCH: (*COMMON, "backlog", "compile_s", "compiled"),
    Role.INGRESS: (*COMMON, "open"),
}


def known(role: Role, flat: Mapping[str, object]) -> dict[str, float] | None:
    """Signals that are finite and not negative; None if a needed one is not among them."""
    values: dict[str, float] = {}
    for name, value in flat.items():
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
            values[name] = float(value)
    return values if all(name in values for name in NEEDED[role]) else None


@dataclass(frozen=True)
class Demand:
    """Demand of a role over a window.

    Attributes:
        load: replicas that the work keeps busy: seconds of work a second; of decode the share of a replica's KV blocks
            or sequences in use or awaited, whichever is more, summed up.
        rate: pieces of work a second; 0 where none came.
        mean_s: seconds of one piece on one replica.
        variability: squared coefficients of variation of arrivals and of service, summed; 2 for M/M.
        queues: seconds of work that wait or are under way, by replica.
        itl_s: time between two tokens as measured; None: not known.
        recent: load of the last `RECENT_S` seconds alone: noisy, and soon.
        has_fallen: the window begins where the load fell by more than chance.
        is_partial: some replicas' signals are missing or stale; those are taken for the mean of the others.
        window_s: seconds that `load` is measured over.
        noise: standard deviation of means over `RECENT_S`, where a load is sampled; 0: it is counted by pieces.
    """

    load: float
    rate: float = 0.0
    mean_s: float = 0.0
    variability: float = 2.0
    queues: tuple[float, ...] = ()
    itl_s: float | None = None
    recent: float = 0.0
    has_fallen: bool = False
    is_partial: bool = False
    window_s: float = 0.0
    noise: float = 0.0

    def error(self, seconds: float) -> float:
        """Standard error of the load of a steady stream of such work, measured over so many seconds."""
        if seconds <= 0:
            return 0.0
        counted = self.mean_s * math.sqrt(self.variability * self.rate / seconds)
        return max(counted, self.noise * math.sqrt(RECENT_S / seconds))

    @property
    def has_jumped(self) -> bool:
        """True if the load of the last seconds is higher than chance would have it."""
        return self.recent > self.load + _JUMP * self.error(RECENT_S)

    @property
    def backlog_s(self) -> float:
        """Seconds of work that wait or are under way."""
        return sum(self.queues)


_MOST_VARIABILITY = 20.0
_FEW = 8  # pieces of work, or samples, from which a variance says something
_JUMP = 5.0  # standard errors: in an hour of plans chance brings none
_BEFORE_FALL_S = 30.0
_SAMPLED_S = 60.0  # of decode's pools, of which samples are kept
_FEW_BLOCKS = 3
_SAMPLED_JUMP = 5.0  # standard deviations
_WORK = {Role.PATCH: ("compile_s", "compiled")}  # counters of seconds and pieces, where not those of the others


class _Growth(NamedTuple):
    """Work that came and was done between two observations, of all replicas."""

    now: float
    came_s: float = 0.0
    came: float = 0.0
    load_s: float = 0.0
    done_s: float = 0.0
    done: float = 0.0
    squares: float = 0.0

    @classmethod
    def between(cls, role: Role, now: float, before: Flat, after: Flat) -> _Growth:
        """Growth of one replica, from two of its samples."""
        seconds, pieces = _WORK.get(role, ("compute_s", "links"))

        def more(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        done_s = more(seconds) + more("encode_s")
        done = more(pieces)
        return cls(
            now,
            came_s=done_s + more("queued_s"),
            came=done + more("waiting"),
            load_s=more("load_s"),
            done_s=done_s,
            done=done,
            squares=more("compute_s2"),
        )

    def plus(self, other: _Growth) -> _Growth:
        """Growth of both, at the time of this one."""
        return _Growth(
            self.now,
            came_s=self.came_s + other.came_s,
            came=self.came + other.came,
            load_s=self.load_s + other.load_s,
            done_s=self.done_s + other.done_s,
            done=self.done + other.done,
            squares=self.squares + other.squares,
        )


class Window:
    """Signals of one role over the last `window_s` seconds.

    Args:
        stale_s: a replica whose last new sample is older is not known.
    """

    def __init__(self, role: Role, window_s: float = 120.0, stale_s: float = 6.0) -> None:
        self.role, self._window_s, self._stale_s = role, window_s, stale_s
        self._replicas: dict[str, tuple[float, dict[str, float]] | None] = {}  # arrival, signals; None: not known
        self._growth: deque[_Growth] = deque()
        self._shares: deque[tuple[float, float]] = deque()
        self._fell = -math.inf  # when the load did
        self._demand: Demand | None = None

    def observe(self, now: float, replicas: Mapping[str, Mapping[str, object]]) -> None:
        """Take up the signals of all replicas that there are."""
        for gone in self._replicas.keys() - replicas.keys():
            del self._replicas[gone]
        grown = _Growth(now)
        for name, flat in replicas.items():
            before, values = self._replicas.get(name), known(self.role, flat)
            if values is None or (before is not None and values["clock"] <= before[1]["clock"]):
                self._replicas.setdefault(name, None)
                continue  # nothing, or the same again
            if before is not None:
                grown = grown.plus(_Growth.between(self.role, now, before[1], values))
            self._replicas[name] = now, values
        self._growth.append(grown)
        while self._growth[0].now < now - self._window_s:
            self._growth.popleft()
        self._demand = self._measured(now)

    def latest(self, now: float) -> dict[str, dict[str, float]]:
        """The last signals of each replica that are not stale."""
        return {
            name: sample[1]
            for name, sample in self._replicas.items()
            if sample is not None and now - sample[0] <= self._stale_s
        }

    @property
    def demand(self) -> Demand | None:
        """Demand at the last observation; None while it is not known."""
        return self._demand

    def _measured(self, now: float) -> Demand | None:
        latest = self.latest(now)
        if not latest:
            return None
        if self.role is Role.DECODE:
            demand = self._decoding(latest, now)
        elif self.role is Role.INGRESS:
            count = sum(values["open"] for values in latest.values())
            demand = Demand(load=count, recent=count)
        else:
            demand = self._working(latest)
        lacking = len(self._replicas) / len(latest)
        if demand is None or lacking == 1:
            return demand
        return replace(
            demand,
            load=demand.load * lacking,
            recent=demand.recent * lacking,
            rate=demand.rate * lacking,
            is_partial=True,
        )

    def _decoding(self, latest: Mapping[str, Flat], now: float) -> Demand | None:
        if any(not values["blocks_total"] or not values["max_sequences"] for values in latest.values()):
            return None
        share = sum(
            max(values["blocks"] / values["blocks_total"], values["sequences"] / values["max_sequences"])
            for values in latest.values()
        )
        self._shares.append((now, share))
        while self._shares[0][0] < now - _SAMPLED_S:
            self._shares.popleft()
        slots = sum(values["max_sequences"] for values in latest.values()) / len(latest)
        load, recent, noise = self._sampled(now, slots)
        weighed = [(values["itl_s"], values["sequences"]) for values in latest.values() if values.get("itl_s")]
        weight = sum(sequences for _, sequences in weighed)
        return Demand(
            load=load,
            recent=recent,
            noise=noise,
            window_s=now - self._shares[0][0],
            itl_s=sum(itl * sequences for itl, sequences in weighed) / weight if weight else None,
        )

    def _sampled(self, now: float, slots: float) -> tuple[float, float, float]:
        """Load, load of the last `RECENT_S`, and the standard deviation of such means before it.

        Sequences come and go within seconds, a start takes longer: the load is the mean of a minute, unless the last
        seconds are higher than the ones before differ by chance.
        """
        blocks: dict[int, list[float]] = {}
        for at, share in self._shares:
            blocks.setdefault(int((now - at) / RECENT_S), []).append(share)
        means = [statistics.fmean(block) for block in blocks.values()]  # the oldest first
        recent, before = means[-1], means[:-1]
        if len(before) < _FEW_BLOCKS:
            return recent, recent, math.sqrt(recent / slots)  # as of sequences that come by chance
        noise = statistics.stdev(before)
        jumped = recent > statistics.fmean(before) + _SAMPLED_JUMP * noise
        return (recent if jumped else statistics.fmean(means)), recent, noise

    def _working(self, latest: Mapping[str, Flat]) -> Demand | None:
        demand = self._worked(latest)
        if demand is not None and self._forget_before_fall(demand):
            demand = self._worked(latest)
        return demand

    def _forget_before_fall(self, demand: Demand) -> bool:
        """Let the window begin where the load fell by more than chance; False if it did not.

        Of all ways to part it in two, the one whose means lie farthest apart, in standard errors: an adaptive window
        (ADWIN, Bifet and Gavaldà 2007). By chance a few seconds have much more than their share of the work, and never
        much less than none: rises are left to `Demand.has_jumped`, and what came before is measured over some time.
        """
        growth = list(self._growth)
        began, now = growth[0].now, growth[-1].now
        total, worked = sum(one.came_s for one in growth[1:]), 0.0
        farthest, cut, last = _JUMP, 0, 0
        for number, one in enumerate(growth[1:-1], 1):
            worked += one.came_s
            before, after = one.now - began, now - one.now
            if before < _BEFORE_FALL_S or after < RECENT_S:
                continue
            error = math.hypot(demand.error(before), demand.error(after))
            fall = (worked / before - (total - worked) / after) / error if error else 0.0
            if fall > farthest:
                farthest, cut = fall, number
            last = number
        if cut in (0, last):  # there is none, or it may lie later than can be told yet
            return False
        for _ in range(cut):
            self._growth.popleft()
        self._fell = self._growth[0].now
        return True

    def _worked(self, latest: Mapping[str, Flat]) -> Demand | None:
        """Work over the window: the first observation in it is where it begins."""
        began, now = self._growth[0].now, self._growth[-1].now
        if now - began < RECENT_S:  # of a few seconds a single request makes a burst
            return None
        growth = list(self._growth)[1:]
        recent = [one for one in growth if one.now > now - RECENT_S]
        done_s, done = sum(one.done_s for one in growth), sum(one.done for one in growth)
        came_s, came = sum(one.came_s for one in growth), sum(one.came for one in growth)
        mean = done_s / done if done else (came_s / came if came > 0 else 0.0)
        served = sum(one.squares for one in growth) / done / mean**2 - 1 if done >= _FEW and mean else 1.0
        return Demand(
            load=_over(growth, now - began),
            recent=_over(recent, now - max(began, now - RECENT_S)),
            rate=max(came, 0.0) / (now - began),
            mean_s=mean,
            variability=min(_MOST_VARIABILITY, max(0.0, served) + max(1.0, self._arrivals(growth))),
            window_s=now - began,
            queues=tuple(values.get("queued_s", 0.0) for values in latest.values()),
            has_fallen=began == self._fell,
        )

    def _arrivals(self, growth: Sequence[_Growth]) -> float:
        """Squared coefficient of variation of arrivals: the variance of their number in an interval over its mean."""
        counts = [one.came for one in growth]
        mean = statistics.fmean(counts)
        if self.role is Role.PATCH or len(counts) < _FEW or mean <= 0:
            return 1.0
        # Of differences of neighbours, so that a rate that rises or falls does not count as variable.
        return statistics.fmean((a - b) ** 2 for a, b in pairwise(counts)) / 2 / mean


def _over(growth: Sequence[_Growth], seconds: float) -> float:
    """Replicas kept busy by what came, in computing or in loading, whichever is more."""
    return max(sum(one.came_s for one in growth), sum(one.load_s for one in growth), 0.0) / seconds
