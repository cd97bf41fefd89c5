"""The planner's state: windows, forecasts and memories, from signals to a plan.

The service's planner and the simulator run this same class, each with its own clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscale.forecast import Forecast
from autoscale.policies import Bounds, Decision, Goals, Memory, RoleState, plan
from autoscale.signals import Demand, Role, Window

START_S = 60.0  # what a start is taken for before one was seen
_STARTS = 32  # that are remembered
_RATIO_S = 900.0
_REGAINED = 1.002  # a plan, of a decode replica's load: twice as much in about twelve minutes
_NEXT_S = 15.0  # between a plan and Serve's acting on it, and the replica's first request


@dataclass(frozen=True)
class Counts:
    """Replicas of a role: asked for, and serving."""

    target: int
    ready: int


@dataclass
class _Role:
    bounds: Bounds
    gpus: float
    window: Window
    forecast: Forecast
    memory: Memory = field(default_factory=Memory)
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=_STARTS))
    seen: set[str] = field(default_factory=set)
    per_replica: float = 1.0
    total_s: float = 0.0  # load times time, fading

    def start_s(self) -> float:
        """p90 of the starts."""
        if not self.starts:
            return START_S
        if len(self.starts) == 1:
            return self.starts[0]
        return statistics.quantiles(self.starts, n=10, method="inclusive")[-1]  # never longer than any was


class Scaler:
    """Plans for roles by what their replicas tell.

    Args:
        bounds: of each role that may be scaled.
        gpus: of one replica of each role.
        window_s: over which work is averaged; `stale_s`: signals that are older are not known.
        uses_forecast: False: by the load of now alone (an ablation).
    """

    def __init__(
        self,
        bounds: Mapping[Role, Bounds],
        goals: Goals,
        *,
        gpus: Mapping[Role, float] | None = None,
        window_s: float = 120.0,
        stale_s: float = 6.0,
        uses_forecast: bool = True,
    ) -> None:
        self._goals, self._uses_forecast = goals, uses_forecast
        self._observed = 0.0
        self._roles = {
            role: _Role(each, (gpus or {}).get(role, 0.0), Window(role, window_s, stale_s), Forecast())
            for role, each in bounds.items()
        }

    def bound(self, role: Role, bounds: Bounds) -> None:
        """Plan for a role within these bounds from now on."""
        self._roles[role].bounds = bounds

    def observe(self, now: float, signals: Mapping[Role, Mapping[str, Mapping[str, object]]]) -> None:
        """Take up the signals of the replicas of every role; a role that is left out has none."""
        for name, role in self._roles.items():
            replicas = signals.get(name, {})
            role.window.observe(now, replicas)
            for replica, flat in replicas.items():
                ready_s = flat.get("ready_s")
                if replica not in role.seen and isinstance(ready_s, int | float) and ready_s > 0:
                    role.seen.add(replica)
                    role.starts.append(float(ready_s))
            role.forecast.horizon_s = role.start_s() + _NEXT_S
            demand = role.window.demand
            role.forecast.observe(now, None if demand is None else demand.load)
            self._learn_rate(role, demand, len(replicas))
        self._learn_ratio(now)

    def _learn_rate(self, role: _Role, demand: Demand | None, replicas: int) -> None:
        """Load a decode replica at which tokens come as fast as promised: less where they came slower.

        What a busy minute taught is doubted from then on: else no load that is planned by it would ever show better.
        """
        limit = self._goals.itl_s
        if limit is None or demand is None or demand.itl_s is None or not replicas:
            return
        each = demand.load / replicas
        if demand.itl_s > limit:
            role.per_replica = max(0.1, min(role.per_replica, each * limit / demand.itl_s))
        elif each > role.per_replica / 2:  # tokens come fast enough at such a load: it may carry more
            role.per_replica = min(1.0, max(each, role.per_replica * _REGAINED))

    def _learn_ratio(self, now: float) -> None:
        """Learn how much load prefill's work brings decode, over the last minutes."""
        passed, self._observed = now - self._observed, now
        roles = [self._roles[name] for name in (Role.PREFILL, Role.DECODE) if name in self._roles]
        loads = [role.window.demand.load for role in roles if role.window.demand is not None]
        if len(loads) == 2:  # both are known
            for role, load in zip(roles, loads, strict=True):
                role.total_s = role.total_s * math.exp(-passed / _RATIO_S) + load * passed

    def _following(self) -> float:
        """Load of decode if prefill's replicas do all work that has come."""
        prefill, decode = self._roles.get(Role.PREFILL), self._roles.get(Role.DECODE)
        if prefill is None or decode is None or not prefill.total_s or prefill.window.demand is None:
            return 0.0
        demand = prefill.window.demand
        work = demand.recent if demand.has_jumped else demand.load
        return work * decode.total_s / prefill.total_s

    def plan(self, now: float, counts: Mapping[Role, Counts]) -> dict[Role, Decision]:
        """Decisions for the roles whose counts are known."""
        states = {role: self._state(role, counts[role], now) for role in self._roles if role in counts}
        decisions = plan(states, self._goals, now)
        for role, decision in decisions.items():
            self._roles[role].memory = decision.memory
        return decisions

    def _state(self, name: Role, counts: Counts, now: float) -> RoleState:
        role = self._roles[name]
        return RoleState(
            bounds=role.bounds,
            target=counts.target,
            ready=counts.ready,
            demand=role.window.demand,
            forecast=role.forecast.upper() if self._uses_forecast else None,
            following=self._following() if name is Role.DECODE else 0.0,
            start_s=role.start_s(),
            reload_s=self._reload_s(role, now),
            gpus=role.gpus,
            per_replica=role.per_replica,
            memory=role.memory,
        )

    def _reload_s(self, role: _Role, now: float) -> float:
        """Seconds that the end of the newest replica costs, as it says itself; Serve stops that first."""
        latest = role.window.latest(now)
        youngest = min(latest.values(), key=lambda values: values["age_s"], default=None)
        return 0.0 if youngest is None else youngest.get("only_here_s", 0.0)
