"""Policies compared on one trace: static peak, oracle, ours, others at several settings.

| name       | replicas                                                                                           |
|------------|----------------------------------------------------------------------------------------------------|
| static     | enough for the busiest minute, by the same formula as ours, all the time                             |
| oracle     | instant, from the work of the next seconds or minutes, or as many all the time; what goes hands all   |
|            | over; the cheapest of a grid whose attainment is still `KEEPS` of static's: nothing causal reaches it |
| foresight  | the same knowledge, but starts take their time, and are paid: a bound for all that must start replicas |
| others     | at the cheapest setting of a grid whose attainment is `KEEPS` of static's, else at the one with most |
|            | attainment: tuned on the very trace they are judged by, which ours is not                            |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from autoscale.controllers import Hpa, Knative, Oracle, Ours, RayDefault, Saturation, SlaMeans, Static
from autoscale.policies import DECODE_FILL, Bounds, Goals, within_limit
from autoscale.signals import Role
from autoscale.simulated import Job, Library, Machine, Prefill
from autoscale.simulator import Controller, Limits, Result, Simulation
from autoscale.traces import Request
from serving.scaling.routers import routers

KEEPS = 0.99  # of static's attainment
ATTAINMENT = 0.99
_INTERVAL_S = 10.0
_AHEAD_S = (0.0, 120.0)  # that oracles look ahead
_UTILISATIONS = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45)
_HANDS_OVER = ("ours", "oracle", "foresight")
OTHERS = ("ray", "hpa", "knative", "saturation", "sla-means")
POLICIES = ("static", "oracle", "foresight", "ours", "ours-no-forecast", "ours-no-hand-over", *OTHERS)


@dataclass(frozen=True)
class Loads:
    """Work of a trace after reuse, by role and interval: replicas that it keeps busy."""

    by_role: Mapping[Role, Sequence[float]]
    mean_s: float
    variability: float

    def peak(self, role: Role, seconds: float = 60.0) -> float:
        """The busiest stretch's mean."""
        loads, width = self.by_role[role], max(1, round(seconds / _INTERVAL_S))
        return max(sum(loads[i : i + width]) / width for i in range(max(1, len(loads) - width + 1)))


def loads_of(requests: Iterable[Request], machine: Machine) -> Loads:
    """Loads of a trace on a library that forgets nothing."""
    library, ignored = Library(machine, True), lambda *_: None
    replica = Prefill("all", machine, None, library, ignored, ignored)  # type: ignore[arg-type]
    work: dict[Role, list[float]] = {Role.PREFILL: [], Role.DECODE: []}
    seconds: list[float] = []
    for request in requests:
        job = Job(request, "")
        replica.weigh(job)
        library.keep("all", request.chunks)
        own = job.work_s + machine.forward.added_seconds(machine.forward.fixed_tokens)
        seconds.append(own)
        _spread(work[Role.PREFILL], request.at, own, 1.0)
        share = max(request.blocks(machine.block_size) / machine.blocks_total, 1 / machine.max_sequences)
        step_s = machine.step_s + machine.step_s_per_sequence * machine.max_sequences / 2
        _spread(work[Role.DECODE], request.at, request.output * step_s, share)
    length = max(len(loads) for loads in work.values())
    mean = sum(seconds) / len(seconds)
    spread = sum((one - mean) ** 2 for one in seconds) / len(seconds) / mean**2
    by_role = {
        role: [one / _INTERVAL_S for one in loads] + [0.0] * (length - len(loads)) for role, loads in work.items()
    }
    return Loads(by_role, mean, 1 + spread)


def _spread(loads: list[float], at: float, seconds: float, share: float) -> None:
    """Add `share` of a replica for so long, to the intervals that it falls into."""
    until = at + seconds
    while at < until:
        number = int(at / _INTERVAL_S)
        loads.extend([0.0] * (number + 1 - len(loads)))
        stop = min(until, (number + 1) * _INTERVAL_S)
        if stop <= at:
            return
        loads[number] += share * (stop - at)
        at = stop


def enough(loads: Loads, limits: Limits, attainment: float = ATTAINMENT) -> dict[Role, int]:
    """Replicas for the busiest minute."""
    prefill = within_limit(
        loads.peak(Role.PREFILL), loads.mean_s, loads.variability, limits.ttft_s - loads.mean_s, attainment
    )
    return {Role.PREFILL: max(1, prefill), Role.DECODE: max(1, int(loads.peak(Role.DECODE) / DECODE_FILL) + 1)}


@dataclass
class Study:
    """Runs of policies on one trace.

    Args:
        requests: gives the trace from its start, every time.
        grids: settings that others are tried at; None: those of the module.
        progress: is told of every run as it ends.
    """

    requests: Callable[[], Iterator[Request]]
    machine: Machine
    limits: Limits
    most: int = 64
    shared: bool = False
    progress: Callable[[Result, str], None] = lambda result, setting: None
    settle_s: float = 300.0
    results: dict[str, Result] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loads = loads_of(self.requests(), self.machine)
        first = {role: loads[: round(300 / _INTERVAL_S)] for role, loads in self.loads.by_role.items()}
        begin = Loads(first, self.loads.mean_s, self.loads.variability)
        self._initial = enough(begin, self.limits)
        self.peak = enough(self.loads, self.limits)

    def run(self, policy: str) -> Result:
        """Run a policy of `POLICIES`, at its best setting.

        Raises:
            KeyError: there is no such policy.
        """
        if policy in self.results:
            return self.results[policy]
        if policy == "static":
            self._keep(policy, self._simulated(Static(self.peak), initial=self.peak), "")
        elif policy == "oracle":
            self._oracle()
        elif policy == "foresight":
            ahead, loads = self.machine.start_s + _INTERVAL_S, self.loads.by_role
            made = {f"{u:g}": partial(Oracle, loads, u, ahead, False, name=policy) for u in _UTILISATIONS}
            self._cheapest(policy, made, True)
        elif policy.startswith("ours"):
            ours = Ours(self._goals(), Bounds(1, self.most), policy, policy != "ours-no-forecast")
            self._keep(policy, self._simulated(ours, hands_over=policy != "ours-no-hand-over"), "")
        else:
            self._cheapest(policy, self._others()[policy], False)
        return self.results[policy]

    def _oracle(self) -> None:
        """Cheapest enough run with hindsight.

        Short intervals follow the load closest, and move chunks the most often: where disks of nodes are the library,
        what follows less closely may cost less, and as many all the time still less.
        """
        found: list[tuple[Result, str]] = []
        for ahead in _AHEAD_S:
            made = {f"{u:g}, {ahead:g} s": partial(Oracle, self.loads.by_role, u, ahead) for u in _UTILISATIONS}
            self._cheapest("oracle", made, True)
            found.append((self.results["oracle"], self.settings["oracle"]))
        needed = KEEPS * self.run("static").attainment
        counts = dict(self.peak)
        while counts[Role.PREFILL] > 1:  # fewer, as long as they are enough
            counts[Role.PREFILL] -= 1
            result = self._simulated(Static(dict(counts), "oracle"), initial=counts)
            if result.attainment < needed:
                break
            found.append((result, f"{counts[Role.PREFILL]} all the time"))
        enough = [one for one in found if one[0].attainment >= needed] or found
        self._keep("oracle", *min(enough, key=lambda one: one[0].total_replica_seconds))

    def _goals(self) -> Goals:
        return Goals(self.limits.ttft_s, self.limits.itl_s, ATTAINMENT, settle_s=self.settle_s)

    def _others(self) -> dict[str, dict[str, Callable[[], Controller]]]:
        """Constructors by policy and setting. Targets are requests a replica at which a share of it is in use."""
        in_time = max(1.0, self.limits.ttft_s / self.loads.mean_s)
        found: dict[str, dict[str, Callable[[], Controller]]] = {name: {} for name in OTHERS}
        for share in (0.3, 0.6):
            sequences = share * self.machine.max_sequences
            target = {Role.PREFILL: max(0.5, share * in_time), Role.DECODE: sequences}
            found["ray"][f"{share:g}"] = partial(RayDefault, target)
            found["hpa"][f"{share:g}"] = partial(Hpa, target)
            found["knative"][f"{share:g}"] = partial(Knative, target)
        found["saturation"]["5"] = Saturation
        for share in (0.7, 0.9):
            found["sla-means"][f"{share:g}"] = partial(SlaMeans, self.limits, share)
        return found

    def _cheapest(self, policy: str, made: Mapping[str, Callable[[], Controller]], stops: bool) -> None:
        """Keep the cheapest run that attains enough, else the one that attains most. `stops`: at the first enough."""
        needed = KEEPS * self.run("static").attainment
        best: tuple[bool, float] | None = None
        for setting, make in made.items():
            result = self._simulated(make())
            self.progress(result, setting)
            is_enough = result.attainment >= needed
            rank = (is_enough, -result.total_replica_seconds if is_enough else result.attainment)
            if best is None or rank > best:
                best = rank
                self.results[policy], self.settings[policy] = result, setting
            if stops and is_enough:
                return

    def _keep(self, policy: str, result: Result, setting: str) -> None:
        self.progress(result, setting)
        self.results[policy], self.settings[policy] = result, setting

    def _simulated(
        self, controller: Controller, hands_over: bool = True, initial: Mapping[Role, int] | None = None
    ) -> Result:
        simulation = Simulation(
            controller,
            self.machine,
            self.limits,
            routers,
            initial=initial or self._initial,
            bounds=(1, self.most),
            shared=self.shared,
            hands_over=hands_over and controller.name.startswith(_HANDS_OVER),
        )
        return simulation.run(self.requests())
