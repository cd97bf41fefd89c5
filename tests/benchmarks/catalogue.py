"""All benchmarks by name: those of the project, and those that users have."""

from __future__ import annotations

from serving.bench import catalogue
from serving.bench.harness import Benchmark
from tests.benchmarks import (
    agent,
    autoscale,
    break_even,
    compile_trace,
    cpu_kernels,
    elastic,
    handoff,
    idle,
    image_first,
    one_shot,
    overhead,
    parallel_load,
    patch_apply,
    patch_form,
    patch_rank,
    placement,
    precompute,
    rates,
    relocation,
    routing,
    search,
    shared_cores,
    soak,
    store,
    sustained,
    system_prompt,
    ttft,
    turns,
    video_segments,
    video_window,
    weighing,
)

_MODULES = (
    ttft,
    system_prompt,
    image_first,
    turns,
    agent,
    video_window,
    video_segments,
    break_even,
    handoff,
    elastic,
    overhead,
    parallel_load,
    patch_apply,
    patch_form,
    patch_rank,
    placement,
    compile_trace,
    precompute,
    relocation,
    routing,
    autoscale,
    search,
    shared_cores,
    idle,
    cpu_kernels,
    store,
    rates,
    sustained,
    soak,
    one_shot,
    weighing,
)

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK for module in _MODULES
} | catalogue.BENCHMARKS
