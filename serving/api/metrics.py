"""Counters and histograms of the ingress, for `/metrics`.

Those of prefill workers are in `serving.api.fidelity`. Series named as vLLM's mean the same, for autoscalers that read
these.

A scrape reaches one ingress replica, and asks the others: series carry the replica's name, so that one which ends takes
its counters with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from serving.errors import RoleUnavailable
from serving.frontend.report import OrbitReport
from serving.routing.policy import REGISTRY

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SCRAPE_SECONDS = 2.0  # what replicas have to answer in

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """One registry per ingress replica."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"orbitserve_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Generation requests by HTTP status.", ("status",))
        self.chunks = counter("chunks", "Chunks linked, by operating point.", ("operating_point",))
        self.segments = counter(
            "session_segments",
            "Segments of sessions' prompts (chunks, and the texts between them), by how they were served.",
            ("operating_point",),
        )
        self.reused = counter("prompt_tokens_reused", "Prompt tokens that needed no forward.")
        self.prefix = counter("prefix_tokens_reused", "Of these, in blocks of earlier prompts that begin alike.")
        self.computed = counter("prompt_tokens_computed", "Prompt tokens that a forward computed.")
        self.encoded = counter("vision_tokens_encoded", "Placeholder tokens whose pixels were encoded.")
        self.kv = counter(
            "kv_entries",
            "Prompt tokens whose KV entry was handed to decode (kept true), or merged or left out (false).",
            ("kept",),
        )
        self.bytes_handed_off = counter("handoff_bytes", "KV bytes of prompts handed to decode workers.")
        self.ttft = Histogram(
            "orbitserve_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.patches = Gauge(
            "orbitserve_patch_index_entries",
            "Stored patches that this ingress replica orders chunks by.",
            registry=self.registry,
        )
        self.waiting = Gauge(
            "orbitserve_answers_waiting",
            "Answers that wait for a place on this ingress replica, where tenants share them.",
            registry=self.registry,
        )
        self.unlogged = Gauge(
            "orbitserve_access_log_dropped",
            "Requests that this ingress replica could not write to its access log.",
            registry=self.registry,
        )
        self.running = Gauge("vllm:num_requests_running", "Answers that are being generated.", registry=self.registry)
        self.queued = Gauge(
            "vllm:num_requests_waiting",
            "Answers without a token yet: they wait for a place, or their prompt is being linked.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens, reused or computed.", registry=self.registry)
        self.generated = Counter("vllm:generation_tokens", "Tokens of answers.", registry=self.registry)
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From a prompt's arrival to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    @contextmanager
    def answering(self) -> Iterator[Callable[[int], None]]:
        """Count an answer while it is made.

        What this gives is to be called with the number of its new tokens.
        """
        began, is_running = time.perf_counter(), False
        self.queued.inc()

        def generated(tokens: int) -> None:
            nonlocal is_running
            if not is_running:
                is_running = True
                self.queued.dec()
                self.running.inc()
            self.generated.inc(tokens)

        try:
            yield generated
        finally:
            if is_running:
                self.running.dec()
                self.latency.observe(time.perf_counter() - began)
            else:
                self.queued.dec()

    def observe(self, report: OrbitReport) -> None:
        """Count a finished request's report."""
        for chunk in report.chunks:
            self.chunks.labels(operating_point=chunk.operating_point).inc()
        if report.session is not None:
            for point in ("prefix", "survived", "recalled", "computed", "new"):
                self.segments.labels(operating_point=point).inc(getattr(report.session, point))
        self.reused.inc(report.tokens_reused)
        self.prefix.inc(report.prefix_tokens_reused)
        self.computed.inc(report.tokens_computed)
        self.prompt_tokens.inc(report.tokens_reused + report.tokens_computed)
        self.encoded.inc(report.vision_tokens_encoded)
        if (kv := report.kv) is not None:
            self.kv.labels(kept="true").inc(kv.kept)
            self.kv.labels(kept="false").inc(kv.tokens - kv.kept)
            self.bytes_handed_off.inc(kv.bytes_handed_off)
        if report.ttft_ms is not None:
            self.ttft.observe(report.ttft_ms / 1e3)

    def collect(self) -> list[Metric]:
        """Metrics of this process so far: the ingress', and those of choosing replicas."""
        return [*self.registry.collect(), *REGISTRY.collect()]


async def in_time(asked: Awaitable[_T], otherwise: _T, who: str) -> _T:
    """Answer of replicas, or a substitute for a scrape that finds one lost or too busy."""
    try:
        return await asyncio.wait_for(asked, SCRAPE_SECONDS)
    except (RoleUnavailable, TimeoutError) as error:
        logger.warning("metrics without what %s counted, who do not answer: %s", who, error or "too slow")
        return otherwise


def labelled(by_replica: Mapping[str, Iterable[Metric]]) -> Iterator[Metric]:
    """The same metrics of several replicas as one, every series under its replica's name."""
    families: dict[str, Metric] = {}
    for replica, metrics in by_replica.items():
        for metric in metrics:
            if metric.name not in families:
                families[metric.name] = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            families[metric.name].samples += [
                sample._replace(labels={**sample.labels, "replica": replica}) for sample in metric.samples
            ]
    yield from families.values()


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    return generate_latest(_Given(metrics))


class _Given(CollectorRegistry):
    """Metrics collected elsewhere."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See CollectorRegistry."""
        return self._metrics
