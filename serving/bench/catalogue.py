"""All benchmarks by name."""

from __future__ import annotations

from serving.bench import handoff, overhead, patch_apply, precompute, ttft
from serving.bench.harness import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK for module in (ttft, patch_apply, handoff, overhead, precompute)
}
