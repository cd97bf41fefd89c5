"""All benchmarks by name."""

from __future__ import annotations

from serving.bench import (
    break_even,
    compile_trace,
    cpu_kernels,
    handoff,
    idle,
    link_time,
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
    shared_cores,
    store,
    sustained,
    system_prompt,
    ttft,
    weighing,
)
from serving.bench.fidelity import bench as fidelity
from serving.bench.harness import Benchmark

_MODULES = (
    ttft,
    system_prompt,
    break_even,
    link_time,
    handoff,
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
    shared_cores,
    idle,
    cpu_kernels,
    store,
    rates,
    sustained,
    one_shot,
    weighing,
    fidelity,
)

BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}
