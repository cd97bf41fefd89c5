"""Planner actor: signals of all replicas to plans, with a log of decisions.

Beside the library's keeper, which makes it. Each deployment's policy (`autoscale.serve`) asks for its role's target; a
planner that is gone has none, and the targets stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from autoscale.nodes import Bundle, NodeRequests
from autoscale.policies import Bounds, Decision, Goals
from autoscale.scaler import Counts, Scaler
from autoscale.settings import AutoscaleSettings, Mode
from autoscale.signals import Role

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

NAMESPACE = "serve"
_LATE_PERIODS = 3  # without an answer: a replica's signals are stale, and so is what a policy said of its counts
_LOG_SECONDS = 60.0  # between two lines of the decision log where nothing changes
_MOST_LOG_BYTES = 64 << 20
_LOOK_S = 5.0  # between two looks whether the planner plans


@dataclass(frozen=True)
class Scaled:
    """A role that is planned for: deployment, bounds, GPUs of a replica, all that one reserves."""

    deployment: str
    bounds: Bounds
    gpus: float = 0.0
    bundle: Bundle = field(default_factory=Bundle)


def actor_name(app_name: str) -> str:
    """Name of an application's planner."""
    return f"{app_name}-planner"


class DecisionLog:
    """JSONL file of decisions; a file that is full is put aside, and the one before it goes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, document: Mapping[str, Any]) -> None:
        """Add a line. A disk that is full costs lines, and no plan."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                if self._path.stat().st_size > _MOST_LOG_BYTES:
                    self._path.replace(self._path.with_suffix(".1.jsonl"))
            with self._path.open("a") as file:
                file.write(json.dumps(document) + "\n")
        except OSError as error:
            logger.warning("%s: a decision is not logged: %s", self._path, error)


@dataclass
class _Last:
    """State of a role beside its signals."""

    decision: Decision | None = None
    counts: Counts | None = None
    counted: float = float("-inf")  # when a policy told them
    logged: float = float("-inf")
    signals: dict[str, Mapping[str, object]] = field(default_factory=dict)


class Plans:
    """Plans from signals, with their log and counters.

    `clock` is the wall's, for the log; all else goes by `now`.
    """

    def __init__(self, roles: Mapping[Role, Scaled], settings: AutoscaleSettings) -> None:
        self._roles, self._settings = roles, settings
        self._bounds = {role: each.bounds for role, each in roles.items()}
        goals = Goals(
            settings.ttft_s, settings.itl_s, settings.attainment, settings.headroom, settings.settle_s, settings.gpus
        )
        self._scaler = Scaler(
            self._bounds,
            goals,
            gpus={role: each.gpus for role, each in roles.items()},
            stale_s=_LATE_PERIODS * settings.period_s,
        )
        self._last = {role: _Last() for role in roles}
        self._log = DecisionLog(settings.log)
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._planned = float("-inf")

    def target(self, role: Role, running: int, target: int, now: float) -> int | None:
        """Target of a role for its Serve policy; None: there is no fresh plan.

        `running` and `target`: replicas that run, and that Serve is to keep.
        """
        last = self._last.get(role)
        if last is None:
            return None
        last.counts, last.counted = Counts(target, running), now
        if last.decision is None or now - self._planned > _LATE_PERIODS * self._settings.period_s:
            return None
        return last.decision.target

    def bound(self, role: Role, bounds: Bounds) -> None:
        """Plan for a role within these bounds from now on.

        Raises:
            ValueError: they are not within those that its deployment has, or it is not planned for.
        """
        if role not in self._roles:
            raise ValueError(f"{role} is not planned for; {', '.join(self._roles)} are")
        most = self._roles[role].bounds
        if not most.min <= bounds.min <= bounds.max <= most.max:
            raise ValueError(f"{bounds.min} to {bounds.max} replicas of {role} are not within {most.min} to {most.max}")
        self._bounds[role] = bounds
        self._scaler.bound(role, bounds)

    def plan(self, signals: Mapping[Role, Mapping[str, Mapping[str, object]]], now: float, wall: float) -> None:
        """Plan by the signals of now."""
        self._scaler.observe(now, signals)
        counts = {}
        for role, last in self._last.items():
            last.signals = dict(signals.get(role, {}))
            there = len(last.signals)
            told = last.counts if now - last.counted <= _LATE_PERIODS * self._settings.period_s else None
            if self._settings.mode is not Mode.ACT or self._roles[role].bounds.min == self._roles[role].bounds.max:
                told = Counts(there, there)
            if told is not None and told.target:
                counts[role] = told
        for role, decision in self._scaler.plan(now, counts).items():
            self._take(role, decision, counts[role], wall)
        self._planned = now

    def _take(self, role: Role, decision: Decision, counts: Counts, wall: float) -> None:
        last = self._last[role]
        self._reasons[role, decision.reason] += 1
        before = last.decision
        is_news = before is None or (before.target, before.reason) != (decision.target, decision.reason)
        last.decision = decision
        if is_news or wall - last.logged >= _LOG_SECONDS:
            last.logged = wall
            self._log.write(
                {"time": round(wall, 3), "role": role, **self._described(role, counts), "signals": last.signals}
            )

    def _described(self, role: Role, counts: Counts) -> dict[str, Any]:
        decision = self._last[role].decision
        if decision is None:
            return {}
        return {
            "target": decision.target,
            "asked_for": counts.target,
            "ready": counts.ready,
            "reason": decision.reason,
            "because": decision.because,
            "turns": decision.memory.turns,
        }

    def bundles(self) -> list[Bundle]:
        """Of all replicas that are planned, or there are; a role without a plan keeps its least."""
        found = []
        for role, last in self._last.items():
            asked = last.counts.target if last.counts is not None else self._roles[role].bounds.min
            planned = last.decision.target if last.decision is not None else asked
            found += [self._roles[role].bundle] * max(asked, planned)
        return found

    def status(self) -> dict[str, Any]:
        """Mode, and per role the last decision and counters of reasons."""
        roles = {}
        for role, last in self._last.items():
            counts = last.counts or Counts(len(last.signals), len(last.signals))
            bounds = self._bounds[role]
            roles[str(role)] = {
                "min": bounds.min,
                "max": bounds.max,
                "ready": len(last.signals),
                **self._described(role, counts),
                "reasons": {reason: count for (name, reason), count in self._reasons.items() if name == role},
            }
        return {"mode": str(self._settings.mode), "roles": roles}


class Planner:
    """The actor. Its methods run on one event loop."""

    def __init__(
        self, app_name: str, roles: Mapping[Role, Scaled], settings: AutoscaleSettings, fixed: Sequence[Bundle] = ()
    ) -> None:
        """`fixed`: what the replicas of all other roles reserve."""
        self._nodes = NodeRequests(request_nodes) if settings.nodes and settings.mode is Mode.ACT else None
        self._fixed = fixed
        self._plans, self._settings = Plans(roles, settings), settings
        self._app_name, self._roles = app_name, roles
        self._handles: dict[Role, DeploymentHandle] = {}
        self._known: dict[Role, set[str]] = {}  # replicas at the last round
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to plan, once."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        while True:
            began = time.monotonic()
            try:
                answers = await asyncio.gather(*(self._ask(role) for role in self._roles))
                signals = dict(zip(self._roles, answers, strict=True))
                self._plans.plan(signals, time.monotonic(), time.time())
                if self._nodes is not None:
                    wanted = [*self._fixed, *self._plans.bundles()]
                    await asyncio.to_thread(self._nodes.want, wanted, time.monotonic())
            except Exception:
                logger.exception("no plan this time")
            await asyncio.sleep(max(0.1, self._settings.period_s - (time.monotonic() - began)))

    async def _ask(self, role: Role) -> dict[str, Mapping[str, object]]:
        """Signals by replica; of one that does not answer in time, none."""
        from ray.serve.handle import DeploymentHandle

        if role not in self._handles:
            self._handles[role] = DeploymentHandle(self._roles[role].deployment, self._app_name)
        patience = self._settings.period_s
        try:
            async with asyncio.timeout(patience):
                calls = await self._handles[role].broadcast("signals")._fetch_replica_results_async()
        except DeploymentUnavailableError:  # it has no replica
            self._known[role] = set()
            return {}
        except TimeoutError:
            return {name: {} for name in self._known.get(role, ())}
        answers = (asyncio.wait_for(call.get_async(), patience) for call in calls)
        found = await asyncio.gather(*answers, return_exceptions=True)
        signals = by_replica(found, self._known.get(role, ()))
        self._known[role] = set(signals)
        return signals

    async def target(self, role: str, running: int, target: int) -> int | None:
        """See `Plans.target`."""
        return self._plans.target(Role(role), running, target, time.monotonic())

    async def bound(self, role: str, least: int, most: int) -> None:
        """Keep a role between so many replicas, until told otherwise or the planner starts anew.

        For maintenance, and for measurements: `least` = `most` steers it there whatever its load. See `Plans.bound`.
        """
        self._plans.bound(Role(role), Bounds(least, most))

    async def end(self) -> None:
        """Make no further plans, and want no nodes."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
            self._asking = None
        if self._nodes is not None:
            await asyncio.to_thread(self._nodes.withdraw)

    async def status(self) -> dict[str, Any]:
        """See `Plans.status`."""
        return self._plans.status()


def by_replica(answers: Sequence[object], known: Collection[str]) -> dict[str, Mapping[str, object]]:
    """Signals by replica, {} of one that did not answer.

    An answer that is late does not tell whose it is: it is taken for one of a known replica's that told nothing, so
    that what this one has counted before goes on.

    Args:
        answers: (name, signals) or an exception, by replica.
        known: replicas at the last round.
    """
    signals: dict[str, Mapping[str, object]] = dict(answer for answer in answers if isinstance(answer, tuple))
    silent = iter([name for name in sorted(known) if name not in signals])
    for number in range(len(answers) - len(signals)):
        signals[next(silent, f"lost-{number}")] = {}
    return signals


def request_nodes(bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
    """Ask Ray's autoscaler for room for these bundles, in place of those of the last time."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles, bundle_label_selectors=labels)


def start_planner(
    app_name: str, roles: Mapping[Role, Scaled], settings: AutoscaleSettings, fixed: Sequence[Bundle] = ()
) -> Any:
    """The application's planner; it lives as long as the caller's process keeps this handle."""
    planner = (
        ray.remote(Planner)
        .options(name=actor_name(app_name), namespace=NAMESPACE, num_cpus=0, get_if_exists=True, max_restarts=-1)
        .remote(app_name, dict(roles), settings, list(fixed))
    )
    planner.start.remote()
    return planner


class PlannerKeeper:
    """The application's planner, which plans again whatever becomes of its process.

    One that Ray has started anew is told to plan, one that has ended is made again. It ends with the process that made
    it: while a keeper's replica moves to another node, two keep the same one.

    Args:
        start: makes the planner, or finds it; see `start_planner`.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start, self._planner = start, start()
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._planner.start.remote()
            except RayActorError:
                try:
                    self._planner = self._start()
                except Exception as error:  # the one that ended may still have its name
                    logger.warning("no planner yet: %s", error)

    async def end(self) -> None:
        """End the plans, so that nodes may go."""
        self._looking.cancel()
        await self._planner.end.remote()
