"""Benchmarks that users run on a model or machine of their own, by name."""

from __future__ import annotations

from serving.bench import lazy, link_time
from serving.bench.fidelity import bench as fidelity
from serving.bench.harness import Benchmark

BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in (fidelity, lazy, link_time)}
