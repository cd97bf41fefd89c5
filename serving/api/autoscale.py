"""The planner's last decisions over HTTP: metrics, and `GET /v1/orbit/autoscale`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from vllm.exceptions import GracefulHTTPError

from serving.api.metrics import in_time
from serving.errors import RoleUnavailable

Planned = Callable[[], Awaitable[Mapping[str, Any]]]


async def planned_metrics(planned: Planned | None) -> list[Metric]:
    """Metrics of the plan; none without a planner that answers in time."""
    status = await in_time(planned(), {}, "the planner") if planned is not None else {}
    return list(families(status.get("roles", {})))


def families(roles: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Metrics of all roles' plans."""
    target = GaugeMetricFamily("orbitserve_autoscale_target", "Replicas that the plan wants.", labels=["role"])
    ready = GaugeMetricFamily("orbitserve_autoscale_ready", "Replicas that serve.", labels=["role"])
    turns = CounterMetricFamily(
        "orbitserve_autoscale_turns", "Changes of direction: a growth after a shrink, or the reverse.", labels=["role"]
    )
    reasons = CounterMetricFamily(
        "orbitserve_autoscale_decisions", "Plans made, by reason; `unknown` holds.", labels=["role", "reason"]
    )
    for role, one in roles.items():
        ready.add_metric([role], one["ready"])
        if "target" in one:
            target.add_metric([role], one["target"])
            turns.add_metric([role], one["turns"])
        for reason, count in one["reasons"].items():
            reasons.add_metric([role, reason], count)
    yield from (target, ready, turns, reasons)


def autoscale_router(planned: Planned) -> APIRouter:
    """The route of the planner's status."""
    router = APIRouter(prefix="/v1/orbit/autoscale", tags=["operations"])

    @router.get("", summary="Replicas of each role, as they are and as the plan wants them, with reasons")
    async def status() -> dict[str, Any]:
        try:
            return {"object": "autoscale", **await planned()}
        except RoleUnavailable as error:
            raise GracefulHTTPError(f"no planner answers: {error}", HTTPStatus.SERVICE_UNAVAILABLE) from error

    return router
