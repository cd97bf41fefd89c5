"""Disabled operating points between keeper and prefill replicas, without Ray: who decides, hears, or is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from prefill_workers.fidelity.disabled_points import DisabledPoints, PointDecision
from prefill_workers.fidelity.monitor import Comparison
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings
from serving.errors import RoleUnavailable
from serving.replicas import fidelity
from serving.replicas.fidelity import FidelityKeeper, PrefillFidelity

PATCHED, COMPOSED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED
SETTINGS = FidelitySettings(share=1.0, window=2, minimum=1, bounds={PATCHED: 0.05})
BAD = Comparison(1.0, False)
NONE_SERVES = DeploymentUnavailableError(DeploymentID("prefill", "app"))


class Service:
    """A keeper and prefill replicas that reach each other as long as `keeper_is_up`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.replicas: list[PrefillFidelity] = []
        self.failure: BaseException | None = None  # in place of the last replica's answers
        self.keeper_is_up = True
        self.start_keeper()

    def start_keeper(self) -> None:
        self.stored = DisabledPoints(self.folder, "model")
        self.keeper = FidelityKeeper(self.stored, self)

    async def start_replica(self) -> PrefillFidelity:
        replica = PrefillFidelity(SETTINGS, self._exchange)
        await replica.start()
        self.replicas.append(replica)
        return replica

    async def _exchange(self, decisions: Sequence[PointDecision]) -> Sequence[PointDecision]:
        if not self.keeper_is_up:
            raise RoleUnavailable("the keeper is down")
        return await self.keeper.exchange(decisions)

    def broadcast(self, method: str, *arguments: Any) -> Any:
        """As Serve's handle of the prefill role."""

        async def results_async(timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions
            assert timeout_s > 0
            if not self.replicas:
                raise NONE_SERVES
            calls = {"allow": "allow", "apply_decisions": "apply"}
            heard = self.replicas[:-1] if self.failure else self.replicas
            answers = [getattr(replica.monitor, calls[method])(*arguments) for replica in heard]
            return [*answers, self.failure] if self.failure else answers

        return SimpleNamespace(results_async=results_async)

    def disabled(self) -> list[set[OperatingPoint]]:
        """Disabled points by replica."""
        return [{point.point for point in one.monitor.status() if not point.allowed} for one in self.replicas]

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not done():
                await asyncio.sleep(0.001)


@pytest.fixture
async def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


async def test_a_point_that_one_replica_disables_is_disabled_on_all_and_stays_so_over_a_restart(service: Service):
    first, _ = await service.start_replica(), await service.start_replica()
    first.monitor.record([PATCHED], BAD)
    assert service.disabled() == [{PATCHED}, set()], "where it was measured, at once"
    await service.until(lambda: service.disabled() == [{PATCHED}] * 2)
    service.stored.flush()

    again = Service(service.folder)
    await again.start_replica()
    assert again.disabled() == [{PATCHED}], "before it serves"
    assert again.replicas[0].monitor.decisions()[0].reason.startswith("its rolling KL is 1 nats")


async def test_an_operators_word_reaches_all_replicas_and_the_file(service: Service):
    for _ in range(2):
        (await service.start_replica()).monitor.disable(PATCHED, "a test")
    assert await service.keeper.allow(PATCHED) == 2
    assert service.disabled() == [set()] * 2
    assert await service.keeper.allow(PATCHED) == 0
    service.stored.flush()
    assert service.stored.read() == []


async def test_an_operators_word_wins_over_older_ones_that_arrive_later(service: Service):
    late = await service.start_replica()
    late.monitor.disable(PATCHED, "a test")
    older = late.monitor.decisions()
    assert await service.keeper.allow(PATCHED) == 1
    known = await service.keeper.exchange(older)
    assert [decision.allowed for decision in known] == [True]
    assert service.disabled() == [set()]


async def test_an_operators_word_wins_over_a_clock_that_is_ahead(service: Service):
    await service.keeper.exchange([PointDecision(PATCHED, False, time.time() + 60, "a test")])
    await service.keeper.allow(PATCHED)
    await service.start_replica()
    assert service.disabled() == [set()]


async def test_a_keeper_that_is_down_stops_nothing_and_hears_of_it_afterwards(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(fidelity, "_EXCHANGE_SECONDS", 0.01)
    service.keeper_is_up = False
    with caplog.at_level(logging.WARNING):
        replica = await service.start_replica()
        replica.monitor.record([PATCHED], BAD)
        await asyncio.sleep(0.1)
    assert service.disabled() == [{PATCHED}]
    assert caplog.text.count("the library's keeper does not say") == 1, "however often it is asked"
    service.start_keeper()
    service.keeper_is_up = True
    await service.until(lambda: bool(service.keeper._decisions))
    service.stored.flush()
    assert [decision.point for decision in service.stored.read()] == [PATCHED]


async def test_a_keeper_that_hangs_holds_up_no_start(monkeypatch: pytest.MonkeyPatch):
    async def hangs(_: object) -> Sequence[PointDecision]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(fidelity, "_START_SECONDS", 0.01)
    async with asyncio.timeout(10):
        await PrefillFidelity(SETTINGS, hangs).start()


async def test_a_keeper_that_lost_its_file_learns_from_the_replicas_what_was_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fidelity, "_EXCHANGE_SECONDS", 0.01)
    service = Service(folder=None)
    (await service.start_replica()).monitor.disable(PATCHED, "a test")
    (await service.start_replica()).monitor.disable(COMPOSED, "a test")
    await service.until(lambda: service.disabled() == [{PATCHED, COMPOSED}] * 2)
    service.start_keeper()
    await service.until(lambda: len(service.keeper._decisions) == 2)
    await service.start_replica()
    assert service.disabled() == [{PATCHED, COMPOSED}] * 3


@pytest.mark.parametrize("failure", [RayActorError(), TimeoutError()])
async def test_a_replica_that_does_not_hear_a_decision_gets_it_with_its_next_exchange(
    service: Service, monkeypatch: pytest.MonkeyPatch, failure: BaseException
):
    monkeypatch.setattr(fidelity, "_EXCHANGE_SECONDS", 0.05)
    for _ in range(2):
        (await service.start_replica()).monitor.disable(PATCHED, "a test")
    service.failure = failure
    with pytest.raises(RoleUnavailable, match="patched is allowed, and not every prefill replica has answered"):
        await service.keeper.allow(PATCHED)
    assert service.disabled()[0] == set()
    await service.until(lambda: service.disabled() == [set()] * 2)


async def test_an_operator_may_allow_a_point_while_no_replica_serves(service: Service):
    await service.keeper.exchange([PointDecision(PATCHED, False, 1.0, "a test")])
    assert await service.keeper.allow(PATCHED) == 0
    await service.start_replica()
    assert service.disabled() == [set()]
