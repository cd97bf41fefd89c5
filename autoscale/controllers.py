"""Policies for the simulator: ours, and those of others as their sources have them.

| name       | after                                                              | tuned by                           |
|------------|--------------------------------------------------------------------|------------------------------------|
| ours       | `autoscale.scaler`, the same as the service's                      | -                                  |
| static     | as many replicas as the largest load needs, all the time           | -                                  |
| ray        | Ray Serve's default: ongoing requests a replica, 30 s up, 600 s down | target                           |
| hpa        | Kubernetes' HPA on running and queued requests, 240 s both ways    | target                             |
| knative    | AIBrix' KPA: stable 180 s, panic 60 s windows                      | target                             |
| saturation | llm-d WVA V1: spare KV and queue, one replica at a time            | queue                              |
| sla-means  | Dynamo's SLA planner: means every 180 s, load every 5 s            | share of an engine's measured rate |
| oracle     | instant starts, and knows the work of the next minutes             | utilisation, minutes               |
| foresight  | the same knowledge, with starts that take their time               | utilisation                        |
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscale.policies import Bounds, Goals
from autoscale.scaler import Counts, Scaler
from autoscale.signals import Role
from autoscale.simulator import SCALED, Limits, View

_HPA_TOLERANCE = 0.1


class Ours:
    """The service's planner."""

    period_s = 2.0
    is_instant = False

    def __init__(self, goals: Goals, bounds: Bounds, name: str = "ours", uses_forecast: bool = True) -> None:
        self.name = name
        self._scaler = Scaler(dict.fromkeys(SCALED, bounds), goals, uses_forecast=uses_forecast)

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        self._scaler.observe(now, view.signals)
        counts = {role: Counts(view.target[role], view.ready[role]) for role in SCALED}
        return {role: decision.target for role, decision in self._scaler.plan(now, counts).items()}


@dataclass
class Static:
    """The same replicas all the time."""

    counts: Mapping[Role, int]
    name: str = "static"
    period_s: float = 600.0
    is_instant: bool = True

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        return self.counts


@dataclass
class Oracle:
    """Replicas for the load that will come.

    Args:
        loads: by role and interval of `period_s`; replicas are as many as keep the `utilisation`.
        ahead_s: for the largest load from now until then.
        is_instant: replicas start at once; else starts take their time, and the load is known that much ahead.
    """

    loads: Mapping[Role, Sequence[float]]
    utilisation: float
    ahead_s: float = 0.0
    is_instant: bool = True
    period_s: float = 10.0
    name: str = "oracle"

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        first, more = round(now / self.period_s), round(self.ahead_s / self.period_s)
        return {
            role: max(1, math.ceil(max(loads[first : first + 1 + more], default=0.0) / self.utilisation - 1e-9))
            for role, loads in self.loads.items()
        }


def ongoing(view: View, role: Role) -> float:
    """Requests that wait or run on a role's replicas."""
    key = "waiting" if role is Role.PREFILL else "sequences"
    return sum(flat[key] for flat in view.signals[role].values())


@dataclass
class _Series:
    """Values of the last seconds."""

    window_s: float
    values: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, value: float) -> None:
        self.values.append((now, value))
        while self.values[0][0] <= now - self.window_s:
            self.values.popleft()

    def mean(self) -> float:
        return sum(value for _, value in self.values) / len(self.values)

    def largest(self) -> float:
        return max(value for _, value in self.values)

    def smallest(self) -> float:
        return min(value for _, value in self.values)


class RayDefault:
    """Ray Serve's default policy, each role by itself."""

    name, period_s, is_instant = "ray", 10.0, False

    def __init__(self, target: Mapping[Role, float]) -> None:
        self._target = target
        self._seen = {role: _Series(30.0) for role in SCALED}
        self._since: dict[Role, tuple[int, float]] = {}

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        found = {}
        for role in SCALED:
            self._seen[role].add(now, ongoing(view, role))
            wanted, current = math.ceil(self._seen[role].mean() / self._target[role]), view.target[role]
            direction = (wanted > current) - (wanted < current)
            if role not in self._since or self._since[role][0] != direction:
                self._since[role] = direction, now
            waited = now - self._since[role][1]
            if direction and waited >= (30.0 if direction > 0 else 600.0):
                found[role] = max(1, wanted)
                del self._since[role]
        return found


class Hpa:
    """HPA on the mean of running and queued requests, stabilised over 240 s in both directions."""

    name, period_s, is_instant = "hpa", 15.0, False

    def __init__(self, target: Mapping[Role, float], window_s: float = 240.0) -> None:
        self._target = target
        self._wanted = {role: _Series(window_s) for role in SCALED}

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        found = {}
        for role in SCALED:
            current = view.target[role]
            ratio = ongoing(view, role) / max(view.ready[role], 1) / self._target[role]
            wanted = current if abs(ratio - 1) <= _HPA_TOLERANCE else max(1, math.ceil(view.ready[role] * ratio))
            series = self._wanted[role]
            if not series.values:
                series.add(now - self.period_s, current)
            series.add(now, wanted)
            if (up := series.smallest()) > current:
                found[role] = int(up)
            elif (down := series.largest()) < current:
                found[role] = int(down)
        return found


class Knative:
    """KPA: a stable and a panic window over ongoing requests; no shrink in panic."""

    name, period_s, is_instant = "knative", 10.0, False

    def __init__(self, target: Mapping[Role, float]) -> None:
        self._target = target
        self._stable = {role: _Series(180.0) for role in SCALED}
        self._panic = {role: _Series(60.0) for role in SCALED}
        self._panicked: dict[Role, float] = {}
        self._lowered: dict[Role, float] = {}

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        found = {}
        for role in SCALED:
            current, value = view.target[role], ongoing(view, role)
            self._stable[role].add(now, value)
            self._panic[role].add(now, value)
            stable = math.ceil(self._stable[role].mean() / self._target[role])
            panic = math.ceil(self._panic[role].mean() / self._target[role])
            if panic / max(view.ready[role], 1) >= 2.0:
                self._panicked[role] = now
            panics = now - self._panicked.get(role, -math.inf) <= 180.0
            wanted = max(panic, current) if panics else stable
            wanted = max(1, min(wanted, 2 * max(view.ready[role], 1)), math.ceil(current / 2))
            if wanted > current or (wanted < current and now - self._lowered.get(role, -math.inf) >= 300.0):
                if wanted < current:
                    self._lowered[role] = now
                found[role] = wanted
        return found


class Saturation:
    """WVA V1: spare KV and queue of unsaturated replicas, one replica at a time."""

    name, period_s, is_instant = "saturation", 30.0, False

    def __init__(self, queue: float = 5.0, fill: float = 0.8) -> None:
        self._queue, self._fill = queue, fill

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        found = {}
        for role in SCALED:
            current, ready = view.target[role], view.ready[role]
            if ready < current:
                continue
            used = [self._used(role, flat) for flat in view.signals[role].values()]
            spare = [1 - share for share in used if share < 1]
            if not spare or sum(spare) / len(spare) < 0.2:
                found[role] = current + 1
            elif current > 1 and 1 - sum(used) / (ready - 1) >= 0.3:
                found[role] = current - 1
        return found

    def _used(self, role: Role, flat: Mapping[str, float]) -> float:
        if role is Role.PREFILL:
            return flat["waiting"] / self._queue
        return max(flat["blocks"] / flat["blocks_total"] / self._fill, flat["waiting"] / self._queue)


class SlaMeans:
    """Dynamo's SLA planner: a floor from mean rates and a scalar hit rate, one step by load.

    Args:
        share: of the rate that one replica has by its mean time, which is planned with.
    """

    name, period_s, is_instant = "sla-means", 5.0, False

    def __init__(self, limits: Limits, share: float = 1.0) -> None:
        self._limits, self._share = limits, share
        self._before: dict[str, Mapping[str, float]] = {}
        self._floor = dict.fromkeys(SCALED, 1)
        self._planned = -math.inf
        self._load = 0.0

    def targets(self, view: View, now: float) -> Mapping[Role, int]:
        """See `Controller`."""
        if now - self._planned >= 180.0:
            self._throughput(view, now)
        found = {}
        for role in SCALED:
            current, ready = view.target[role], view.ready[role]
            if ready == current:
                found[role] = max(self._floor[role], current + self._step(role, view, ready))
        return found

    def _throughput(self, view: View, now: float) -> None:
        links = work = 0.0
        for name, flat in view.signals[Role.PREFILL].items():
            before = self._before.get(name, {"links": 0.0, "compute_s": 0.0})
            links += flat["links"] - before["links"]
            work += flat["compute_s"] - before["compute_s"]
        self._before = dict(view.signals[Role.PREFILL])
        passed, self._planned = now - self._planned, now
        if math.isfinite(passed):
            rate, mean = links / passed, work / links if links else 0.0
            self._floor[Role.PREFILL] = max(1, math.ceil(rate * mean / self._share))
            used = [flat["blocks"] / flat["blocks_total"] for flat in view.signals[Role.DECODE].values()]
            self._floor[Role.DECODE] = max(1, math.ceil(sum(used) / self._share))

    def _step(self, role: Role, view: View, ready: int) -> int:
        if role is Role.PREFILL:
            times = [flat["queued_s"] for flat in view.signals[role].values()]
            if min(times) > self._limits.ttft_s:
                return 1
            return -1 if ready > 1 and max(times) * ready / (ready - 1) < 0.8 * self._limits.ttft_s * 0.5 else 0
        used = [flat["blocks"] / flat["blocks_total"] for flat in view.signals[role].values()]
        if min(used) > 1.0:
            return 1
        return -1 if ready > 1 and max(used) * ready / (ready - 1) < 0.6 else 0
