"""Fidelity over HTTP: metrics, and the routes that list and allow operating points.

| route                                          | who            | what                                             |
|------------------------------------------------|----------------|--------------------------------------------------|
| GET /v1/orbit/operating_points                 | any key        | every approximate point of every prefill replica |
| POST /v1/orbit/operating_points/{point}/allow  | administrators | allow a point again, on all prefill replicas     |

Prefill replicas keep what they measured (see `prefill_workers.fidelity.monitor`) and are asked at every scrape. Series
carry the replica's name, so that one which ends takes its counters with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from vllm.exceptions import GracefulHTTPError

from prefill_workers.fidelity.monitor import KL_BUCKETS, PointStatus
from prefill_workers.modes import EXACT_POINTS, OperatingPoint
from serving.api.errors import Forbidden, NotFound
from serving.api.metrics import in_time
from serving.errors import RoleUnavailable
from serving.frontend.roles import ByReplica, FidelityRoles


async def scraped(roles: FidelityRoles) -> ByReplica:
    """Measurements of all prefill replicas, for /metrics; none if they do not answer in time."""
    return await in_time(roles.fidelity(), {}, "prefill workers")


def families(measured: ByReplica) -> Iterator[Metric]:
    """Metrics of all replicas' operating points."""
    labels = ["operating_point", "replica"]
    checks = CounterMetricFamily(
        "orbitserve_fidelity_checks", "Requests that reused KV and were computed again exactly.", labels=labels
    )
    agreements = CounterMetricFamily(
        "orbitserve_fidelity_agreements", "Checks whose most likely next token is the exact one.", labels=labels
    )
    skipped = CounterMetricFamily(
        "orbitserve_fidelity_skipped", "Checks drawn and not made, by reason.", labels=[*labels, "reason"]
    )
    kl = HistogramMetricFamily(
        "orbitserve_fidelity_kl_nats", "KL divergence of what was served from exact, per check.", labels=labels
    )
    rolling_kl = GaugeMetricFamily(
        "orbitserve_fidelity_rolling_kl_nats", "Mean KL over the last checks; what the bound is held to.", labels=labels
    )
    rolling_agreement = GaugeMetricFamily(
        "orbitserve_fidelity_rolling_agreement", "Share of the last checks that agree.", labels=labels
    )
    bound = GaugeMetricFamily(
        "orbitserve_fidelity_bound_nats", "Rolling KL beyond which the point is switched off.", labels=labels
    )
    off = GaugeMetricFamily(
        "orbitserve_fidelity_switched_off",
        "1 while the point is switched off, until an operator allows it.",
        labels=labels,
    )
    for replica, points in measured.items():
        for status in points:
            at = [str(status.point), replica]
            checks.add_metric(at, status.checks)
            agreements.add_metric(at, status.agreements)
            for reason, count in status.skipped.items():
                skipped.add_metric([*at, reason], count)
            edges = [*map(str, KL_BUCKETS), "+Inf"]
            buckets = list(zip(edges, map(float, accumulate(status.kl_counts)), strict=True))
            kl.add_metric(at, buckets, status.kl_sum)
            for gauge, value in (
                (rolling_kl, status.rolling_kl),
                (rolling_agreement, status.rolling_agreement),
                (bound, status.bound),
            ):
                if value is not None:
                    gauge.add_metric(at, value)
            off.add_metric(at, not status.allowed)
    yield from (checks, agreements, skipped, kl, rolling_kl, rolling_agreement, bound, off)


def fidelity_router(roles: FidelityRoles) -> APIRouter:
    """The routes of the module's table."""
    router = APIRouter(prefix="/v1/orbit/operating_points", tags=["operations"])

    @router.get("", summary="Measured fidelity of every operating point")
    async def points() -> dict[str, Any]:
        measured = await _answered(roles.fidelity())
        data = [_object(replica, status) for replica, statuses in measured.items() for status in statuses]
        return {"object": "list", "data": data}

    @router.post("/{point}/allow", summary="Allow an operating point that was switched off (administrators)")
    async def allow(point: str, request: Request) -> dict[str, Any]:
        if not request.state.admin:
            raise Forbidden("only an administrator's key may allow operating points")
        known = [str(known) for known in OperatingPoint if known not in EXACT_POINTS]
        if point not in known:
            raise NotFound(f"no operating point {point!r} can be switched off; there are {', '.join(known)}")
        replicas = await _answered(roles.allow(OperatingPoint(point)))
        return {"object": "operating_point", "operating_point": point, "replicas_allowed_again": replicas}

    return router


async def _answered(call: Any) -> Any:
    try:
        return await call
    except RoleUnavailable as error:
        raise GracefulHTTPError(f"a role does not answer: {error}", HTTPStatus.SERVICE_UNAVAILABLE) from error


def _object(replica: str, status: PointStatus) -> dict[str, Any]:
    return {
        "object": "operating_point",
        "operating_point": status.point,
        "replica": replica,
        "allowed": status.allowed,
        "bound_nats": status.bound,
        "rolling_kl_nats": status.rolling_kl,
        "rolling_agreement": status.rolling_agreement,
        "rolling_checks": status.rolling_checks,
        "checks": status.checks,
        "agreements": status.agreements,
        "skipped": status.skipped,
    }
