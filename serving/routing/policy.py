"""Which replica should serve a request: what replicas report, and what follows from it.

Nothing here knows Ray: `ray_router` asks these policies inside Ray Serve.

    replica ── report, every period ──▶ Ledger ◀── sent, completed ── router
                                          │
    request ──▶ ask ──▶ rank: replicas by cost, the lowest first

| policy  | the cost of a replica                                                                         |
|---------|-----------------------------------------------------------------------------------------------|
| prefill | seconds: queued tokens + tokens to compute at its pace, + bytes to load from tiers, and to a GPU |
| decode  | share of its KV blocks, or of its sequences if that is more, in use with the request there     |

Reports are about a period old. What this process has sent meanwhile it knows by itself, and adds: else all requests
of a period would go to the replica that was the least busy at its beginning.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter

from serving.routing.ledger import Ledger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REGISTRY = CollectorRegistry()  # of this process, which is one replica of the ingress
CHOICES = Counter(
    "orbitserve_routing_choices",
    "Replicas chosen, by role and reason: hot (holds most of the chunks in memory), spread (another holds more, but is "
    "busier), least_loaded (nobody holds any), least_pressure (KV is free), waits (it is not), only (there is one), "
    "stale (no replica reported lately: power of two choices).",
    ("role", "reason"),
    registry=REGISTRY,
)

Report = TypeVar("Report", bound="DataclassInstance")


def parsed(kind: type[Report], stats: Mapping[str, Any]) -> Report | None:
    """A report from what Ray Serve brought; None if it is none, or another version's."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: stats[name] for name in names}) if names <= stats.keys() else None


class Ranked(NamedTuple):
    """A replica that could serve a request: cost, reason, and tokens in its memory for it."""

    replica: str
    cost: float
    reason: str
    held: int = 0


class Policy(ABC, Generic[Report]):
    """Ranking of the replicas of one role. Belongs to one thread."""

    role: str
    kind: type[Report]
    resolution: float  # costs that differ by less count as equal

    def __init__(self, period_s: float, **clock: Callable[[], float]) -> None:
        self.ledger: Ledger[Report] = Ledger(period_s, **clock)

    def reported(self, replica: str, stats: Mapping[str, Any]) -> None:
        """Take up what Ray Serve brought of a replica."""
        report = parsed(self.kind, stats)
        if report is not None and self.ledger.is_news(replica, stats["sequence"]):
            self.learn(replica, report, stats["sequence"])

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        self.ledger.keep(replicas)

    @abstractmethod
    def learn(self, replica: str, report: Report, sequence: int) -> None:
        """A new report."""

    @abstractmethod
    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Demand of a call on a replica; None for calls that any replica answers as well."""

    def rank(
        self, ask: Any, replicas: Collection[str], distance: Callable[[str], int] = lambda replica: 0
    ) -> list[Ranked] | None:
        """Replicas by cost, the lowest first; None: no report is fresh.

        Equal ones by what they hold, then by distance, else at random.
        """
        if len(replicas) > 1 and not any(self.ledger.fresh(replica) for replica in replicas):
            return None
        ranked = self.score(ask, replicas)
        if len(ranked) == 1:
            return [ranked[0]._replace(reason="only")]

        def order(one: Ranked) -> tuple[bool, int, int, int, float]:
            lost, cost = self.ledger.is_lost(one.replica), round(one.cost / self.resolution)
            return lost, cost, -one.held, distance(one.replica), random.random()

        return sorted(ranked, key=order)

    @abstractmethod
    def score(self, ask: Any, replicas: Collection[str]) -> list[Ranked]:
        """The cost of every replica, in any order."""

    @abstractmethod
    def sent(self, replica: str, call: str, ask: Any) -> None:
        """Note that a call was sent; `call` names it until it is completed."""

    def completed(self, replica: str, call: str) -> None:
        """Note that a call has ended, well or not."""
        self.ledger.completed(replica, call)
