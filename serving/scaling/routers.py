"""The service's routing in the simulator: its policies and ledgers under a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from autoscale.simulated import Decode, Job, Machine, Prefill
from serving.routing.decode_policy import DecodeAsk, DecodePolicy, DecodeReport
from serving.routing.ledger import Load
from serving.routing.prefill_policy import Chunk, PrefillAsk, PrefillPolicy, PrefillReport, mark_of

_PERIOD_S = 1.0
_HOT_CHUNKS = 256  # that a report names


def routers(clock: Callable[[], float], machine: Machine) -> tuple[PrefillRouter, DecodeRouter]:
    """Routers of one run; see `autoscale.simulator.Routers`."""
    return PrefillRouter(clock, machine), DecodeRouter(clock, machine)


class PrefillRouter:
    """`PrefillPolicy` in the simulator."""

    def __init__(self, clock: Callable[[], float], machine: Machine) -> None:
        self._policy, self._machine = PrefillPolicy(_PERIOD_S, clock=clock), machine
        self._marks: dict[str, bytes] = {}
        self._reports: dict[str, tuple[int, bytes]] = {}
        self._number = 0

    def keep(self, replicas: Collection[str]) -> None:
        """See `Router`."""
        self._policy.keep(replicas)

    def report(self, replica: Prefill) -> None:
        """See `Router`."""
        version, hot = self._reports.get(replica.name, (-1, b""))
        if version != replica.version:
            version, contents = replica.version, list(replica.memory)[-_HOT_CHUNKS:]
            hot = b"".join(self._mark(content) for content in reversed(contents))
            self._reports[replica.name] = version, hot
        forward = self._machine.forward
        self._number += 1
        self._policy.learn(
            replica.name,
            PrefillReport(
                queued_tokens=replica.queued_tokens,
                requests=replica.load,
                fixed_tokens=forward.fixed_tokens,
                seconds_per_token=forward.seconds_per_token,
                bytes_per_second=self._machine.bytes_per_second,
                bytes_per_token=self._machine.bytes_per_token,
                hot=hot,
                hot_version=version,
            ),
            self._number,
        )

    def choose(self, job: Job, replicas: Collection[str]) -> str:
        """See `Router`."""
        chunks = tuple(Chunk(self._mark(one.content), one.tokens, 0) for one in job.request.chunks)
        ask = PrefillAsk(job.request.text, chunks)
        return _chosen(self._policy, job, ask, replicas)

    def completed(self, replica: str, job: Job) -> None:
        """See `Router`."""
        self._policy.completed(replica, job.name)

    def _mark(self, content: str) -> bytes:
        mark = self._marks.get(content)
        if mark is None:
            mark = self._marks[content] = mark_of(content)
        return mark


class DecodeRouter:
    """`DecodePolicy` in the simulator."""

    def __init__(self, clock: Callable[[], float], machine: Machine) -> None:
        self._policy, self._machine = DecodePolicy(_PERIOD_S, clock=clock), machine
        self._number = 0

    def keep(self, replicas: Collection[str]) -> None:
        """See `Router`."""
        self._policy.keep(replicas)

    def report(self, replica: Decode) -> None:
        """See `Router`."""
        machine = self._machine
        report = DecodeReport(
            blocks=replica.reserved + replica.awaited,
            blocks_total=machine.blocks_total,
            sequences=replica.load,
            max_sequences=machine.max_sequences,
            block_size=machine.block_size,
            max_model_len=machine.blocks_total * machine.block_size,
        )
        self._number += 1
        self._policy.ledger.report(replica.name, self._number, Load(report.blocks, report.sequences), report)

    def choose(self, job: Job, replicas: Collection[str]) -> str:
        """See `Router`."""
        return _chosen(self._policy, job, DecodeAsk(job.request.prompt, job.request.output, 1), replicas)

    def completed(self, replica: str, job: Job) -> None:
        """See `Router`."""
        self._policy.completed(replica, job.name)


def _chosen(policy: Any, job: Job, ask: Any, replicas: Collection[str]) -> str:
    ranked = policy.rank(ask, replicas)
    name: str = ranked[0].replica if ranked else random.choice(list(replicas))
    policy.sent(name, job.name, ask)
    return name
