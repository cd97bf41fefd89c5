"""Simulator of prefill and decode replicas that a policy scales under a trace, on SimPy.

Routing is what the caller gives: the service's own (`serving.scaling`). A start takes as long as the machine's says,
and is paid from the moment it is asked for. A replica that is to go takes no further request, ends what it has, and
hands over what only it has; it is paid until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy

from autoscale.signals import Role
from autoscale.simulated import Decode, Job, Library, Machine, Prefill
from autoscale.traces import Request

SCALED = (Role.PREFILL, Role.DECODE)
_REPORT_S = 1.0
_AFTER_S = 300.0  # that requests may take after the last one has come
_REUSE_S = 300.0  # before and after a shrink, whose shares of reused tokens are compared


class Router(Protocol):
    """Choice of a replica."""

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""

    def report(self, replica: Any) -> None:
        """Take up how a replica is."""

    def choose(self, job: Job, replicas: Collection[str]) -> str:
        """The replica for a request, which is then under way there."""

    def completed(self, replica: str, job: Job) -> None:
        """A request has ended there."""


class Routers(Protocol):
    """Routers of one run. `clock` gives the virtual time."""

    def __call__(self, clock: Callable[[], float], machine: Machine) -> tuple[Router, Router]:
        """Build the routers of prefill and of decode."""


@dataclass(frozen=True)
class View:
    """View of a policy: replicas asked for and serving, and their signals by name."""

    target: Mapping[Role, int]
    ready: Mapping[Role, int]
    signals: Mapping[Role, Mapping[str, Mapping[str, float]]]


class Controller(Protocol):
    """A policy under simulation.

    Attributes:
        period_s: between two decisions.
        is_instant: replicas start at once (the oracle).
    """

    name: str
    period_s: float
    is_instant: bool

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """Replicas of each role from now on; a role that is left out stays."""


@dataclass(frozen=True)
class Limits:
    """Limits of a good answer, in seconds."""

    ttft_s: float
    itl_s: float


@dataclass
class Result:
    """One run.

    Attributes:
        ttft_s, itl_s: by request in the order of the trace; inf where none came.
        timeline: by minute: load by role, replicas by role, share of good answers.
        shrinks: share of reused tokens of chunks before and after each shrink of prefill.
    """

    policy: str
    requests: int
    seconds: float
    replica_seconds: dict[str, float]
    ttft_s: np.ndarray
    itl_s: np.ndarray
    at: np.ndarray
    limits: Limits
    refused: int
    turns: int
    reused_share: float
    shrinks: list[tuple[float, float]] = field(default_factory=list)
    timeline: dict[str, list[float]] = field(default_factory=dict)
    starts: int = 0

    @property
    def good(self) -> np.ndarray:
        """Which requests were answered within the limits."""
        return (self.ttft_s <= self.limits.ttft_s) & (self.itl_s <= self.limits.itl_s)

    @property
    def attainment(self) -> float:
        """Share of good answers."""
        return float(np.mean(self.good)) if self.requests else 1.0

    @property
    def total_replica_seconds(self) -> float:
        """Of all roles."""
        return sum(self.replica_seconds.values())

    @property
    def goodput(self) -> float:
        """Good answers a replica-second."""
        return float(np.sum(self.good)) / self.total_replica_seconds

    def reuse_kept(self) -> float:
        """Reused share in the minutes after shrinks over that before; NaN where there was none."""
        before, after = (sum(side) for side in zip(*self.shrinks, strict=True)) if self.shrinks else (0.0, 0.0)
        return after / before if before else math.nan

    def summary(self) -> dict[str, Any]:
        """The figures, for JSON."""
        came = np.isfinite(self.ttft_s)
        quantiles = np.quantile(self.ttft_s[came], (0.5, 0.99)) if came.any() else (math.nan, math.nan)
        return {
            "policy": self.policy,
            "requests": self.requests,
            "attainment": self.attainment,
            "replica_seconds": self.replica_seconds,
            "goodput": self.goodput,
            "ttft_p50_s": float(quantiles[0]),
            "ttft_p99_s": float(quantiles[1]),
            "refused": self.refused,
            "turns": self.turns,
            "starts": self.starts,
            "reused_share": self.reused_share,
            "reuse_kept": self.reuse_kept(),
            "timeline": self.timeline,
        }


class _Pool:
    """Replicas of one role: starting, serving, draining."""

    def __init__(self, role: Role, env: simpy.Environment, make: Callable[[str], Any], router: Router) -> None:
        self.role, self._env, self._make, self.router = role, env, make, router
        self.serving: dict[str, Any] = {}
        self.starting: dict[str, float] = {}
        self.draining: dict[str, Any] = {}
        self.paid, self._since = 0.0, 0.0
        self._number = self.starts = self.turns = 0
        self._direction = 0
        self.on_leave: Callable[[Any, list[str]], float] = lambda replica, others: 0.0

    @property
    def target(self) -> int:
        return len(self.serving) + len(self.starting)

    def pay(self) -> None:
        """Count replica-seconds up to now."""
        replicas = len(self.serving) + len(self.starting) + len(self.draining)
        self.paid += replicas * (self._env.now - self._since)
        self._since = self._env.now

    def scale(self, target: int, start_s: float) -> None:
        """Ask for so many replicas: the newest start is cancelled first, then the newest replica drains."""
        change = target - self.target
        if not change:
            return
        self.pay()
        direction = 1 if change > 0 else -1
        self.turns += self._direction == -direction
        self._direction = direction
        for _ in range(change):
            self._number += 1
            name = f"{self.role}-{self._number}"
            self.starts += 1
            if start_s <= 0:
                self._serve(name)
            else:
                self.starting[name] = self._env.now
                self._env.timeout(start_s, name).callbacks.append(self._started)
        for _ in range(-change):
            if self.starting:
                self.starting.popitem()
            elif len(self.serving) > 1:
                self._drain()

    def _started(self, event: simpy.Event) -> None:
        if event.value in self.starting:
            self.pay()
            del self.starting[event.value]
            self._serve(event.value)

    def _serve(self, name: str) -> None:
        self.serving[name] = self._make(name)
        self.router.keep(list(self.serving))
        self.router.report(self.serving[name])

    def _drain(self) -> None:
        name, replica = self.serving.popitem()
        self.router.keep(list(self.serving))
        self.draining[name] = replica
        self.emptied(replica)

    def emptied(self, replica: Any) -> None:
        """A replica may have ended all that it had: one that drains hands over, and goes."""
        if replica.name in self.draining and not replica.load:
            seconds = self.on_leave(replica, list(self.serving))
            self._env.timeout(seconds).callbacks.append(lambda _: self._gone(replica))

    def _gone(self, replica: Any) -> None:
        self.pay()
        del self.draining[replica.name]
        if self.role is Role.PREFILL:
            replica.library.lose(replica.name)


class Simulation:
    """One run of a trace under a policy.

    Args:
        initial: replicas at the beginning, by role.
        bounds: least and most replicas of a role.
        shared: see `Library`; `hands_over`: replicas that go give what only they have to others first.
    """

    def __init__(
        self,
        controller: Controller,
        machine: Machine,
        limits: Limits,
        routers: Routers,
        *,
        initial: Mapping[Role, int],
        bounds: tuple[int, int] = (1, 64),
        shared: bool = False,
        hands_over: bool = True,
        hand_over_s: float = 30.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.controller, self.machine, self.limits, self._bounds = controller, machine, limits, bounds
        self.env = simpy.Environment()
        self.library = Library(machine, shared)
        prefill_router, decode_router = routers(lambda: float(self.env.now), machine)
        self.prefill = _Pool(Role.PREFILL, self.env, self._prefill, prefill_router)
        self.decode = _Pool(Role.DECODE, self.env, self._decode, decode_router)
        self._pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        self._hand_over_s = hand_over_s if hands_over else 0.0
        self.prefill.on_leave = self._leave
        self._initial, self._progress = initial, progress
        self._jobs: list[Job] = []
        self._came_s = 0.0  # of work for prefill, so far
        self._open = self.refused = 0
        self._ended = False
        self._linked: list[tuple[float, int, int]] = []  # time, reused, tokens of chunks
        self._shrinks: list[float] = []
        self._timeline: dict[str, list[float]] = {
            name: [] for name in ("at", "prefill", "decode", "prefill_load", "decode_load")
        }

    def _prefill(self, name: str) -> Prefill:
        pool = self.prefill
        return Prefill(name, self.machine, self.env, self.library, self._has_linked, pool.emptied, self.env.now)

    def _decode(self, name: str) -> Decode:
        return Decode(name, self.machine, self.env, self._has_ended, self.env.now, changed=self.env.now)

    def run(self, requests: Iterable[Request]) -> Result:
        """Simulate until all requests have ended, or some minutes after the last has come."""
        for role, pool in self._pools.items():
            pool.scale(self._initial[role], 0.0)
            pool.starts = pool.turns = pool._direction = 0
        arrivals = self.env.process(self._arrivals(requests))
        self.env.process(self._reports())
        self.env.process(self._control())
        self.env.process(self._watch())
        self.env.run(until=arrivals)
        self._last = self.env.now
        self._ended = True
        until = self.env.now + _AFTER_S
        while self._open and self.env.now < until:
            self.env.run(until=min(until, self.env.now + 1.0))
        return self._result()

    def _arrivals(self, requests: Iterable[Request]) -> Any:
        number = 0
        for number, request in enumerate(requests):
            if request.at > self.env.now:
                yield self.env.timeout(request.at - self.env.now)
            job = Job(request, f"r{number}")
            self._jobs.append(job)
            self._arrive(job)

    def _arrive(self, job: Job) -> None:
        name = self.prefill.router.choose(job, list(self.prefill.serving))
        self._open += 1
        if not self.prefill.serving[name].submit(job):
            self.prefill.router.completed(name, job)
            self.refused += 1
            self._open -= 1
        self._came_s += job.work_s

    def _has_linked(self, replica: Prefill, job: Job) -> None:
        self.prefill.router.completed(replica.name, job)
        job.first_token = self.env.now + self.machine.overhead_s
        chunks = sum(chunk.tokens for chunk in job.request.chunks)
        if chunks:
            self._linked.append((self.env.now, job.reused, chunks))
        name = self.decode.router.choose(job, list(self.decode.serving))
        self.decode.serving[name].submit(job)

    def _has_ended(self, replica: Decode, job: Job) -> None:
        self.decode.router.completed(replica.name, job)
        job.ended = self.env.now
        self._open -= 1
        self.decode.emptied(replica)

    def _leave(self, replica: Prefill, others: list[str]) -> float:
        """Seconds that a replica of prefill takes to hand over."""
        self._shrinks.append(self.env.now)
        return self.library.hand_over(replica.name, others, self._hand_over_s)

    def _reports(self) -> Any:
        while not self._ended:
            for pool in self._pools.values():
                for replica in pool.serving.values():
                    pool.router.report(replica)
            yield self.env.timeout(_REPORT_S)

    def _control(self) -> Any:
        while not self._ended:
            yield self.env.timeout(self.controller.period_s)
            view = View(
                {role: pool.target for role, pool in self._pools.items()},
                {role: len(pool.serving) for role, pool in self._pools.items()},
                {
                    role: {name: replica.signals() for name, replica in pool.serving.items()}
                    for role, pool in self._pools.items()
                },
            )
            least, most = self._bounds
            start_s = 0.0 if self.controller.is_instant else self.machine.start_s
            for role, target in self.controller.targets(view, float(self.env.now)).items():
                self._pools[role].scale(max(least, min(most, target)), start_s)

    def _watch(self) -> Any:
        before_s = 0.0
        while not self._ended:
            yield self.env.timeout(60.0)
            if self._progress is not None:
                self._progress(float(self.env.now))
            loads = [
                max(one.reserved + one.awaited, 0) / self.machine.blocks_total for one in self.decode.serving.values()
            ]
            came = (self._came_s - before_s) / 60.0
            values = (self.env.now, self.prefill.target, self.decode.target, came, sum(loads))
            for series, value in zip(self._timeline.values(), values, strict=True):
                series.append(round(float(value), 4))
            before_s = self._came_s

    def _result(self) -> Result:
        for pool in self._pools.values():
            pool.pay()
        at = np.array([job.request.at for job in self._jobs])
        first = np.array([job.first_token for job in self._jobs])
        ended = np.array([job.ended for job in self._jobs])
        output = np.array([max(job.request.output - 1, 1) for job in self._jobs])
        ttft = np.where(np.isnan(first), np.inf, first - at)
        itl = np.where(np.isnan(ended), np.inf, (ended - first + self.machine.overhead_s) / output)
        tokens = sum(total for _, _, total in self._linked)
        result = Result(
            policy=self.controller.name,
            requests=len(self._jobs),
            seconds=self._last,
            replica_seconds={str(role): pool.paid for role, pool in self._pools.items()},
            ttft_s=ttft,
            itl_s=itl,
            at=at,
            limits=self.limits,
            refused=self.refused,
            turns=sum(pool.turns for pool in self._pools.values()),
            starts=sum(pool.starts for pool in self._pools.values()),
            reused_share=sum(reused for _, reused, _ in self._linked) / tokens if tokens else 0.0,
            shrinks=self._around_shrinks(),
            timeline=self._timeline,
        )
        minutes = (at // 60).astype(int)
        good = np.bincount(minutes, result.good, minlength=len(self._timeline["at"])) if len(at) else np.zeros(0)
        came = np.bincount(minutes, minlength=len(self._timeline["at"])) if len(at) else np.zeros(0)
        result.timeline["attainment"] = [round(float(g / c), 4) if c else 1.0 for g, c in zip(good, came, strict=True)][
            : len(self._timeline["at"])
        ]
        return result

    def _around_shrinks(self) -> list[tuple[float, float]]:
        """Reused shares before and after each shrink of prefill, where both sides have enough to compare."""
        if not self._linked:
            return []
        times, reused, tokens = (np.array(column, dtype=float) for column in zip(*self._linked, strict=True))
        pairs = []
        for at in self._shrinks:
            shares = []
            for low, high in ((at - _REUSE_S, at), (at, at + _REUSE_S)):
                within = slice(*np.searchsorted(times, (low, high)))
                shares.append(reused[within].sum() / tokens[within].sum() if tokens[within].sum() else math.nan)
            if all(map(math.isfinite, shares)) and at >= _REUSE_S:
                pairs.append((shares[0], shares[1]))
        return pairs
