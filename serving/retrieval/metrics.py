"""Metrics of a retriever replica."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from serving.retrieval.indices import StoreIndices

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RetrieverMetrics:
    """Counts of one replica's retriever."""

    def __init__(self, indices: StoreIndices) -> None:
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"orbitserve_retriever_{name}", text, registry=self._registry)

        gauge("parts", "Pages and passages that this replica searches.").set_function(lambda: indices.parts)
        gauge("vector_bytes", "Memory of the vectors that this replica searches.").set_function(
            lambda: indices.vector_bytes
        )
        gauge("files_waiting", "Files that this replica indexes or that wait for it.").set_function(
            lambda: indices.waiting
        )
        gauge("files_indexed", "Files that this replica indexed.").set_function(lambda: indices.indexed)
        gauge("files_failed", "Files that this replica could not index.").set_function(lambda: indices.failed)
        gauge("degraded_searches", "Searches by words alone, because the embedder did not answer.").set_function(
            lambda: indices.degraded
        )
        self._seconds = Histogram(
            "orbitserve_retriever_search_seconds",
            "From a search's arrival at this replica to its results.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a search."""
        began = time.perf_counter()
        yield
        self._seconds.observe(time.perf_counter() - began)

    def collect(self) -> list[Metric]:
        """Metrics so far."""
        return list(self._registry.collect())
