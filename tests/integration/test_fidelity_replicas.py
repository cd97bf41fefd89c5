"""What replicas of a role tell each other about operating points, on a real Ray Serve; the engine is not part of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings
from serving.replicas.fidelity_mixin import FidelityReplica

PATCHED, COMPOSED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED


@serve.deployment(ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=1)
class Worker(FidelityReplica):
    """A prefill worker of which nothing but its fidelity is there. It keeps nothing beside a library."""

    async def __init__(self) -> None:
        self.watch_fidelity(FidelitySettings())
        await self.hear_fidelity()


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


def deployed(replicas: int) -> DeploymentHandle:
    """The role with new replicas, in place of those that ran."""
    return serve.run(Worker.options(num_replicas=replicas).bind(), name="fidelity", route_prefix=None)


def switched_off(workers: DeploymentHandle) -> dict[str, list[OperatingPoint]]:
    """By replica."""
    answers = workers.broadcast("fidelity").results()
    return {name: [status.point for status in points if not status.allowed] for name, points in answers}


def test_a_replica_that_starts_hears_what_the_others_have_switched_off(cluster: None):
    workers = deployed(1)
    (first,) = switched_off(workers)
    workers.broadcast("switch_off", PATCHED, "a test").results()
    found = switched_off(deployed(2))
    assert first not in found
    assert list(found.values()) == [[PATCHED], [PATCHED]]
    assert workers.broadcast("allow", PATCHED).results() == [True, True]
    workers.broadcast("switch_off", COMPOSED, "a test").results()
    found = switched_off(deployed(2))
    assert list(found.values()) == [[COMPOSED], [COMPOSED]], "what was allowed meanwhile is"
