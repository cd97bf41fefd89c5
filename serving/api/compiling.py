"""Metrics of what prefill replicas compile ahead of requests.

See `prefill_workers.background.compile_queue`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from prefill_workers.background.patch_precompiler import CompileStats
from serving.api.metrics import in_time
from serving.frontend.roles import CompilingRoles


async def compiling(roles: CompilingRoles) -> list[Metric]:
    """The metrics of all replicas; none when they do not answer in time."""
    compiled = await in_time(roles.compiled(), None, "prefill workers")
    return [] if compiled is None else list(families(compiled))


def families(compiled: Mapping[str, CompileStats]) -> Iterator[Metric]:
    """The metrics of all replicas' compiling."""
    waiting = GaugeMetricFamily(
        "orbitserve_compile_waiting", "Sets of which something waits to be compiled.", labels=["replica"]
    )
    forwards = CounterMetricFamily(
        "orbitserve_compile_forwards", "Forwards that nobody had asked for, by job.", labels=["replica", "job"]
    )
    seconds = CounterMetricFamily("orbitserve_compile_seconds", "What these forwards took.", labels=["replica"])
    given_up = CounterMetricFamily(
        "orbitserve_compile_given_up",
        "Jobs not worth their place in the queue, or their bytes in a full library, or of pairs that nobody sums.",
        labels=["replica", "reason"],
    )
    dropped = CounterMetricFamily(
        "orbitserve_patches_dropped",
        "Patches that the compiler had no room for or could not form.",
        labels=["replica"],
    )
    for replica, stats in compiled.items():
        waiting.add_metric([replica], stats.waiting)
        seconds.add_metric([replica], stats.seconds)
        dropped.add_metric([replica], stats.dropped)
        for job, count in stats.forwards.items():
            forwards.add_metric([replica, job], count)
        for reason, count in stats.given_up.items():
            given_up.add_metric([replica, reason], count)
    yield from (waiting, forwards, seconds, given_up, dropped)
