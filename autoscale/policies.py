"""Plans: replicas of each role, with reasons; pure functions of a state and a time.

    Window, Forecast ── RoleState ──┐
    ttft_s, itl_s, gpus, settle_s ──┴─▶ plan(state, now) ─▶ {role: Decision(target, reason, memory)}

| step     | what                                                                                               |
|----------|----------------------------------------------------------------------------------------------------|
| size     | replicas for the load of now and for the forecast's upper quantile at the role's start time; the    |
|          | larger counts. With a limit: the least n with P(wait > limit - own time) <= 1 - attainment          |
|          | (M/G/n, Allen-Cunneen's approximation); without: load + headroom * sqrt(load) (Halfin-Whitt)        |
| react    | replicas whose queue is too long for the limit, and still will be when one that starts now is ready |
|          | do not count: as many more are needed meanwhile                                                     |
| shrink   | only to what was enough all the time for as long as a start takes (ski rental: idle seconds that    |
|          | were paid must have been worth a start), longer after each shrink that was taken back; and some     |
|          | time after a growth (`settle_s`), unless the load fell by more than chance                          |
| together | decode does not shrink while prefill grows; one change of a role at a time; a budget of GPUs goes    |
|          | where it gains the most attainment                                                                  |
| safety   | what is not known or stale: the target stays, and the reason says so; while some replicas do not    |
|          | tell, the others' mean stands for them, and none goes                                              |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoscale.signals import Demand, Role

DECODE_FILL = 0.9  # of the KV blocks or sequences of a pool: beyond, sequences wait for others to end
BUSIEST = 0.95  # load a replica at most: beyond, queues are long whatever the formula says
SURE = 2.0  # standard errors by which a load must be larger, for a replica more
SHRINK_MARGIN = 1.08  # by which the load may grow at once after a shrink without a new replica
OPEN_PER_INGRESS = 128.0  # requests that one ingress replica carries well
MOST_HOLD = 8.0  # times the start: longest wait before a shrink, after many that were taken back
_MOST_REPLICAS = 10_000
_GROWS_AT_ONCE = 4.0  # times the replicas there are: bad data must not ask for a hundred


@dataclass(frozen=True)
class Bounds:
    """Least and most replicas of a role."""

    min: int
    max: int

    def clamp(self, count: int) -> int:
        """The nearest allowed number."""
        return max(self.min, min(self.max, count))


@dataclass(frozen=True)
class Goals:
    """Promises to clients and their costs, as in `AutoscaleSettings`."""

    ttft_s: float | None = None
    itl_s: float | None = None
    attainment: float = 0.99
    headroom: float = 1.0
    settle_s: float = 300.0
    gpus: float | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of earlier decisions, for a role's next one.

    Attributes:
        enough: replicas that were enough at a time, where no later number is as large: the first is the largest.
        since: from when on the demand was known without a gap; inf: it is not.
        grown, shrunk: times of the last change upwards and downwards; -inf: none yet.
        hold: how many times its start a role waits before it shrinks; doubles when a shrink is taken back.
        turns: changes of direction so far.
    """

    enough: tuple[tuple[float, int], ...] = ()
    since: float = math.inf
    grown: float = -math.inf
    shrunk: float = -math.inf
    hold: float = 1.0
    turns: int = 0


@dataclass(frozen=True)
class RoleState:
    """A role as the planner sees it.

    Attributes:
        target: replicas that are asked for now.
        ready: those that serve; the others are starting, and count as soon as they are asked for.
        demand: None: not known, or stale.
        forecast: load that comes in `start_s`, an upper quantile; None: not known yet.
        following: load that follows from what the role before has to do, now.
        start_s: what a start takes, p90.
        reload_s: what the end of the likely victim costs, in seconds of work: to hand over, or compute again, what only
            it has.
        gpus: GPUs of one replica.
        per_replica: load that one replica carries within the time between tokens that is promised; 1: all.
    """

    bounds: Bounds
    target: int
    ready: int
    demand: Demand | None
    forecast: float | None = None
    following: float = 0.0
    start_s: float = 60.0
    reload_s: float = 0.0
    gpus: float = 0.0
    per_replica: float = 1.0
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Decision:
    """Target of a role, with its reason in a word and in a sentence."""

    target: int
    reason: str
    because: str
    memory: Memory


def waits_longer(load: float, mean_s: float, variability: float, replicas: int, limit_s: float) -> float:
    """Share of the work that waits longer than `limit_s`; 1 where the replicas cannot keep up.

    M/G/n by Allen and Cunneen: Erlang's C, times an exponential whose mean is that of M/M/n times half of the
    variability.
    """
    if replicas <= load or replicas < 1:
        return 1.0
    blocked = 1.0  # Erlang's B
    for n in range(1, replicas + 1):
        blocked = load * blocked / (n + load * blocked)
    return _tail(blocked, load, mean_s, variability, replicas, limit_s)


def _tail(blocked: float, load: float, mean_s: float, variability: float, replicas: int, limit_s: float) -> float:
    waits = blocked / (1 - load / replicas * (1 - blocked))
    if limit_s < 0:
        return 1.0
    if mean_s <= 0:
        return 0.0
    return waits * math.exp(-limit_s * (replicas - load) / (mean_s * variability / 2))


def within_limit(load: float, mean_s: float, variability: float, limit_s: float, attainment: float) -> int:
    """Fewest replicas with which a share `attainment` of the work meets the limit.

    Where the own time alone takes it, as many as keep `BUSIEST`.
    """
    least = math.ceil(load / BUSIEST)
    if load <= 0:
        return 0
    blocked = 1.0
    for n in range(1, _MOST_REPLICAS):
        blocked = load * blocked / (n + load * blocked)
        if n >= least and n > load:
            late = _tail(blocked, load, mean_s, variability, n, max(limit_s, mean_s))
            if late <= 1 - attainment:
                return n
    return _MOST_REPLICAS


def with_headroom(load: float, headroom: float) -> int:
    """Square-root staffing (Halfin and Whitt): load + headroom * sqrt(load)."""
    return max(math.ceil(load / BUSIEST), math.ceil(load + headroom * math.sqrt(load) - 1e-9)) if load > 0 else 0


def size(role: Role, load: float, state: RoleState, goals: Goals) -> int:
    """Replicas that a load needs, bounds aside."""
    demand = state.demand
    if role is Role.DECODE:
        return math.ceil(load / (DECODE_FILL * min(1.0, state.per_replica)) - 1e-9)
    if role is Role.INGRESS:
        return math.ceil(load / OPEN_PER_INGRESS)
    if role is Role.PATCH:
        return math.ceil(load / BUSIEST)
    if goals.ttft_s is None or demand is None or not demand.mean_s:
        return with_headroom(load, goals.headroom)
    return within_limit(load, demand.mean_s, demand.variability, goals.ttft_s - demand.mean_s, goals.attainment)


def plan(roles: Mapping[Role, RoleState], goals: Goals, now: float) -> dict[Role, Decision]:
    """Targets of all roles, each with a reason."""
    decisions = {role: _decide(role, state, goals, now) for role, state in roles.items()}
    prefill, decode = roles.get(Role.PREFILL), roles.get(Role.DECODE)
    if prefill is not None and decode is not None:
        grows = decisions[Role.PREFILL].target > prefill.ready
        if grows and decisions[Role.DECODE].target < decode.target:
            decisions[Role.DECODE] = _stay(decode, "together", "prefill grows, whose answers decode will get")
    return decisions if goals.gpus is None else _within_budget(decisions, roles, goals)


def _stay(state: RoleState, reason: str, because: str, memory: Memory | None = None) -> Decision:
    return Decision(state.target, reason, because, state.memory if memory is None else memory)


def _decide(role: Role, state: RoleState, goals: Goals, now: float) -> Decision:
    demand, memory = state.demand, state.memory
    if not state.bounds.min <= state.target <= state.bounds.max:
        target = state.bounds.clamp(state.target)
        return Decision(target, "bounds", f"{state.target} is outside {state.bounds.min} to {state.bounds.max}", memory)
    if demand is None:
        gap = replace(memory, enough=(), since=math.inf)
        return _stay(state, "unknown", "signals are missing or stale: the target stays", gap)
    by_load = size(role, max(demand.load, state.following), state, goals)
    by_forecast = 0 if state.forecast is None else size(role, state.forecast, state, goals)
    doubt = SURE * demand.error(demand.window_s)  # a role does not grow by chance
    if by_load > state.target:
        by_load = max(state.target, size(role, max(demand.load - doubt, state.following), state, goals))
    if state.forecast is not None and by_forecast > state.target:
        by_forecast = max(state.target, size(role, max(0.0, state.forecast - doubt), state, goals))
    by_queue = _reacting(role, state, demand, goals, now)
    needed = max(by_load, by_forecast, by_queue)
    largest = max((by_load, "load"), (by_forecast, "forecast"), (by_queue, "queue"))[1]
    # A shrink must leave enough for a load that is a little larger than measured, and for the victim's chunks.
    again = state.reload_s / max(goals.settle_s, state.start_s, 1.0)
    floor = max(needed, size(role, demand.load * SHRINK_MARGIN + doubt + again, state, goals))
    memory = _remembering(state, now, floor)
    words = f"load {demand.load:.2f}, forecast {_shown(state.forecast)}, {demand.backlog_s:.1f} s wait"
    needed, enough = state.bounds.clamp(needed), state.bounds.clamp(memory.enough[0][1])
    if needed > state.target:
        return _grow(state, memory, goals, now, needed, largest, words)
    if enough < state.target and demand.is_partial:
        return _stay(state, "unknown", f"some replicas do not tell how they are: none goes; {words}", memory)
    if enough < state.target:
        return _shrink(state, memory, goals, now, enough, words)
    return _stay(state, "steady", words, memory)


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _reacting(role: Role, state: RoleState, demand: Demand, goals: Goals, now: float) -> int:
    """Replicas for the load, without those that are late now and still will be when one that starts now is ready.

    What waits at a replica stays there, so that further ones help those who come, and not those who wait: until a
    replica has cleared its queue down to the limit, it is no help to them either. Replicas that start already will
    take their share of what comes.
    """
    if role in (Role.DECODE, Role.INGRESS, Role.PATCH) or not state.ready or not demand.queues:
        return 0
    limit = max(goals.ttft_s - demand.mean_s, 0.0) if goals.ttft_s is not None else state.start_s
    doubt = 0.0 if demand.has_jumped else SURE * demand.error(demand.window_s)
    load = demand.recent if demand.has_jumped else demand.load
    until = min(state.start_s, max(0.0, state.memory.grown + state.start_s - now))  # the last that start are ready
    alone = until if state.target > state.ready else state.start_s
    serving = max(state.target, state.ready)
    grows = (load / state.ready - 1) * alone + (load / serving - 1) * (state.start_s - alone)  # of every queue
    late = sum(queue > limit and queue + grows > limit for queue in demand.queues)
    return size(role, max(0.0, load - doubt), state, goals) + late if late else 0


def _remembering(state: RoleState, now: float, count: int) -> Memory:
    """Memory with what is enough now: the largest of a window that slides."""
    memory, first = state.memory, now - _look_back(state)
    kept = tuple((at, n) for at, n in memory.enough if n > count and at >= first)
    return replace(memory, enough=(*kept, (now, count)), since=min(memory.since, now))


def _look_back(state: RoleState) -> float:
    # A look that is shorter than the measure sees the same seconds again, but for what came since a fall.
    measured = 0.0 if state.demand is None or state.demand.has_fallen else state.demand.window_s
    return state.memory.hold * (max(state.start_s, measured) + state.reload_s)


def _grow(
    state: RoleState, memory: Memory, goals: Goals, now: float, needed: int, largest: str, words: str
) -> Decision:
    target = min(needed, math.ceil(_GROWS_AT_ONCE * max(state.target, 1)))
    turned = memory.shrunk > memory.grown
    hold = memory.hold
    if turned:  # a shrink is taken back: the sooner, the longer the next one waits
        soon = now - memory.shrunk < goals.settle_s + 4 * _look_back(state)
        hold = min(MOST_HOLD, 2 * hold) if soon else max(1.0, hold / 2)
    memory = replace(memory, grown=now, hold=hold, turns=memory.turns + turned)
    return Decision(target, largest, words, memory)


def _shrink(state: RoleState, memory: Memory, goals: Goals, now: float, enough: int, words: str) -> Decision:
    if now - memory.since < _look_back(state):
        return _stay(state, "holding", words, memory)
    by_chance = state.demand is None or not state.demand.has_fallen
    if by_chance and now - memory.grown < goals.settle_s:
        return _stay(state, "settling", words, memory)
    turned = memory.grown > memory.shrunk
    memory = replace(memory, shrunk=now, turns=memory.turns + turned)
    return Decision(enough, "shrink", words, memory)


def _within_budget(
    decisions: dict[Role, Decision], roles: Mapping[Role, RoleState], goals: Goals
) -> dict[Role, Decision]:
    """Decisions cut to the budget of GPUs: from the least of each role on, the next goes where it gains the most."""
    budget = goals.gpus or 0.0
    if sum(decision.target * roles[role].gpus for role, decision in decisions.items()) <= budget:
        return decisions
    given = {role: min(roles[role].bounds.min, decision.target) for role, decision in decisions.items()}
    given |= {role: decision.target for role, decision in decisions.items() if not roles[role].gpus}
    left = budget - sum(count * roles[role].gpus for role, count in given.items())
    while True:
        gains = {
            role: _gain(role, roles[role], given[role], decision.target, goals) / roles[role].gpus
            for role, decision in decisions.items()
            if given[role] < decision.target and 0 < roles[role].gpus <= left
        }
        if not gains:
            break
        best = max(gains, key=lambda role: gains[role])
        given[best] += 1
        left -= roles[best].gpus
    return {
        role: decision
        if given[role] == decision.target
        else replace(
            decision, target=given[role], reason="budget", because=f"{decision.target} wanted; {decision.because}"
        )
        for role, decision in decisions.items()
    }


def _gain(role: Role, state: RoleState, count: int, wanted: int, goals: Goals) -> float:
    """Attainment that one more replica brings."""
    demand = state.demand
    if role is Role.PREFILL and demand is not None and demand.mean_s and goals.ttft_s is not None:
        limit = max(goals.ttft_s - demand.mean_s, 0.0)
        late = [waits_longer(demand.load, demand.mean_s, demand.variability, n, limit) for n in (count, count + 1)]
        if late[0] < 1.0 or late[1] < 1.0:
            return late[0] - late[1]
    return 1.0 / max(wanted, 1)  # served: the share of those that are wanted
