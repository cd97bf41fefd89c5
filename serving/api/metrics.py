"""What the ingress counts, for `/metrics`. What prefill workers measure is in `fidelity`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from serving.api.extension import OrbitReport

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """One registry per ingress replica."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"orbitserve_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Generation requests by HTTP status.", ("status",))
        self.chunks = counter("chunks", "Chunks linked, by operating point.", ("operating_point",))
        self.reused = counter("prompt_tokens_reused", "Prompt tokens that needed no forward.")
        self.prefix = counter("prefix_tokens_reused", "Of these, text before the first chunk.")
        self.computed = counter("prompt_tokens_computed", "Prompt tokens that a forward computed.")
        self.encoded = counter("vision_tokens_encoded", "Placeholder tokens whose pixels were encoded.")
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

        self.unlogged = Gauge(
            "orbitserve_access_log_dropped",
            "Requests that this ingress replica could not write to its access log.",
            registry=self.registry,
        )

    def observe(self, report: OrbitReport) -> None:
        """Count a finished request's report."""
        for chunk in report.chunks:
            self.chunks.labels(operating_point=chunk.operating_point).inc()
        self.reused.inc(report.tokens_reused)
        self.prefix.inc(report.prefix_tokens_reused)
        self.computed.inc(report.tokens_computed)
        self.encoded.inc(report.vision_tokens_encoded)
        if report.ttft_ms is not None:
            self.ttft.observe(report.ttft_ms / 1e3)

    def text(self, others: Iterable[Metric] = ()) -> bytes:
        """The registry, and metrics that others keep, in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(_Given(others))


class _Given(CollectorRegistry):
    """Metrics that somebody else collected."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See CollectorRegistry."""
        return self._metrics
