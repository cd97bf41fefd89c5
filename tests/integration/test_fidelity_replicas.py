"""The keeper's decisions about operating points on a real Ray Serve; the engine is not part of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from prefill_workers.fidelity.disabled_points import DisabledPoints, PointDecision
from prefill_workers.fidelity.monitor import Comparison
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings
from serving.frontend.ray_calls import answered
from serving.replicas.fidelity import FidelityKeeper, PrefillFidelity

pytestmark = pytest.mark.cluster

PATCHED, COMPOSED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED
SETTINGS = FidelitySettings(minimum=1, bounds={PATCHED: 0.1, COMPOSED: 0.1})


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1, health_check_period_s=1)
class Keeper:
    """A library keeper without a library."""

    def __init__(self, directory: Path | None, prefill: DeploymentHandle) -> None:
        self._fidelity = FidelityKeeper(DisabledPoints(directory, "model"), prefill)

    async def exchange(self, decisions: Sequence[PointDecision]) -> list[PointDecision]:
        return await self._fidelity.exchange(decisions)

    async def die(self) -> None:
        os._exit(1)

    async def allow(self, point: OperatingPoint) -> int:
        return await self._fidelity.allow(point)


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1)
class Worker:
    """A prefill worker without an engine."""

    async def __init__(self) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._name, keeper = context.replica_id.unique_id, DeploymentHandle("Keeper", context.app_name)
        self._fidelity = PrefillFidelity(SETTINGS, lambda known: answered(keeper.exchange.remote(known)))
        await self._fidelity.start()

    async def fidelity(self) -> tuple[str, set[OperatingPoint]]:
        return self._name, {status.point for status in self._fidelity.monitor.status() if not status.allowed}

    async def record(self, point: OperatingPoint, kl: float) -> None:
        self._fidelity.monitor.record([point], Comparison(kl, kl < 1))

    async def allow(self, point: OperatingPoint) -> bool:
        return self._fidelity.monitor.allow(point)

    async def apply_decisions(self, decisions: Sequence[PointDecision]) -> None:
        self._fidelity.monitor.apply(decisions)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


class Application:
    """Keeper and workers with handles to both. Made again, it replaces all replicas of the one before."""

    def __init__(self, directory: Path | None, workers: int = 2) -> None:
        graph: Any = Keeper.bind(directory, Worker.options(num_replicas=workers).bind())
        self.keeper = serve.run(graph, name="fidelity", route_prefix=None)
        self.workers = serve.get_deployment_handle("Worker", "fidelity")

    def disabled(self) -> dict[str, set[OperatingPoint]]:
        """Disabled points by replica."""
        return dict(self.workers.broadcast("fidelity").results())

    def are_disabled(self, *points: OperatingPoint) -> bool:
        return all(found == set(points) for found in self.disabled().values())


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def test_replicas_that_start_and_those_that_serve_follow_the_keeper(tmp_path: Path):
    first = Application(tmp_path)
    first.workers.record.remote(PATCHED, 9.0).result()
    wait_until(lambda: first.are_disabled(PATCHED))
    before, kept = first.disabled().keys(), DisabledPoints(tmp_path, "model")
    wait_until(lambda: bool(kept.read()))

    second = Application(tmp_path)
    assert not second.disabled().keys() & before, "all replicas are new"
    assert second.are_disabled(PATCHED)
    assert second.keeper.allow.remote(PATCHED).result() == 2
    assert second.are_disabled()
    wait_until(lambda: not kept.read())
    assert Application(tmp_path).are_disabled()


def test_a_keeper_that_died_learns_from_the_replicas_what_is_disabled():
    service = Application(directory=None)
    service.workers.record.remote(COMPOSED, 9.0).result()
    wait_until(lambda: service.are_disabled(COMPOSED))
    with pytest.raises(RayActorError):
        service.keeper.die.remote().result()
    assert service.are_disabled(COMPOSED), "it stops nothing"
    wait_until(lambda: kept_disabled(service) == [COMPOSED], 60)
    assert service.keeper.allow.remote(COMPOSED).result() == 2
    assert service.are_disabled()


def kept_disabled(service: Application) -> list[OperatingPoint]:
    """Points that the keeper knows to be disabled; none while it is down."""
    try:
        known = service.keeper.exchange.remote([]).result(timeout_s=5)
    except (RayActorError, DeploymentUnavailableError, TimeoutError):
        return []
    return [decision.point for decision in known if not decision.allowed]
