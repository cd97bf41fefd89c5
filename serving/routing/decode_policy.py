"""Choice of a decode worker: where the most KV is free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Gauge

from decode_workers.admission import blocks_needed
from infra.kv_window import held_tokens, window_of
from serving.routing.ledger import NOTHING, Load
from serving.routing.policy import REGISTRY, Policy, Ranked

KV_USE = Gauge(
    "vllm:kv_cache_usage_perc",
    "Share of a decode worker's KV blocks that are reserved, also by answers which wait for room.",
    ("worker",),
    registry=REGISTRY,
)


@dataclass(frozen=True)
class DecodeReport:
    """Report of a decode worker.

    Blocks of requests that wait for room count as those that have it.
    """

    blocks: int
    blocks_total: int
    sequences: int
    max_sequences: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True)
class DecodeAsk:
    """Work of generating from a prompt: `sequences`, of at most `max_tokens` each.

    None: as many as the model allows.
    """

    prompt: int
    max_tokens: int | None
    sequences: int
    is_counted: bool = True  # see `PrefillAsk`
    window: int | None = None  # generated tokens that stay

    def load(self, report: DecodeReport) -> Load:
        """KV blocks and sequences that a replica would reserve."""
        longest = report.max_model_len if self.max_tokens is None else self.prompt + self.max_tokens
        tokens = held_tokens(self.prompt, min(longest, report.max_model_len), self.window, report.block_size)
        return Load(blocks_needed(tokens, self.sequences, report.block_size), self.sequences)


def pressure(load: Load, report: DecodeReport) -> float:
    """Share of a decode replica that so much load takes; beyond 1 some of it waits."""
    return max(load.work / report.blocks_total, load.sequences / report.max_sequences)


class DecodePolicy(Policy[DecodeReport]):
    """Decode replicas by pressure: a sequence goes where the most KV is free for it.

    What already waits there is served first.
    """

    role, kind, resolution = "decode", DecodeReport, 1e-6

    def __init__(self, period_s: float, **clock: Callable[[], float]) -> None:
        super().__init__(period_s, **clock)
        self._told: set[str] = set()  # replicas with a series

    def learn(self, replica: str, report: DecodeReport, sequence: int) -> None:
        """See `Policy`."""
        self.ledger.report(replica, sequence, Load(report.blocks, report.sequences), report)
        KV_USE.labels(worker=replica).set(min(1.0, report.blocks / max(1, report.blocks_total)))
        self._told.add(replica)

    def keep(self, replicas: Collection[str]) -> None:
        """See `Policy`."""
        super().keep(replicas)
        for gone in self._told.difference(replicas):
            KV_USE.remove(gone)
        self._told.intersection_update(replicas)

    def ask(self, method: str, arguments: Sequence[Any]) -> DecodeAsk | None:
        """See `Policy`. Of `DecodeWorker.generate`."""
        if method != "generate":
            return None
        token_ids, transfer, params = arguments[:3]
        return DecodeAsk(len(token_ids), params.max_tokens, params.n or 1, window=window_of(transfer))

    def score(self, ask: DecodeAsk, replicas: Collection[str]) -> list[Ranked]:
        """See `Policy`."""
        costs = {replica: self._pressure(ask, replica) for replica in replicas}
        return [Ranked(replica, cost, "waits" if cost > 1 else "least_pressure") for replica, cost in costs.items()]

    def _pressure(self, ask: DecodeAsk, replica: str) -> float:
        report = self._measured(replica)
        if report is None:  # only where there is one replica
            return 0.0
        return pressure(self.ledger.load(replica).plus(ask.load(report)), report)

    def sent(self, replica: str, call: str, ask: DecodeAsk | None) -> None:
        """See `Policy`."""
        report = self._measured(replica)
        self.ledger.sent(replica, call, NOTHING if ask is None or report is None else ask.load(report))

    def _measured(self, replica: str) -> DecodeReport | None:
        """The replica's report, or another's: replicas of a role are alike."""
        return self.ledger.fresh(replica) or next(self.ledger.all_fresh(), None)
