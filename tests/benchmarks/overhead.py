"""Time of a request beside the engines: HTTP, parsing, rendering, routing, Ray.

Text requests at one in flight. Engine time is what the prefill worker reports for itself: its forward, which gives the
first token.
"""

from __future__ import annotations

import itertools
import statistics

import httpx
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.loadtest.images import Timed, timed_chat
from tests.benchmarks.servers import ours

CHECKPOINT = "qwen2_5_vl-tiny"


def run(quick: bool, console: Console) -> Outcome:
    """Measure one text request at a time."""
    turns = 30 if quick else 300
    numbers = itertools.count()
    ttft: list[float] = []
    engine: list[float] = []
    stages: dict[str, list[float]] = {}
    with ours(checkpoint_path(CHECKPOINT), console, quick) as service, httpx.Client(timeout=60) as client:

        def ask() -> Timed:
            messages = [{"role": "user", "content": f"request {next(numbers):06d}"}]
            return timed_chat(client, service.url, service.model, messages)

        for _ in range(10):
            ask()
        for _ in range(turns):
            timed = ask()
            spent = timed.orbit["stages_ms"]
            ttft.append(timed.ttft_ms)
            engine.append(spent["forward"])
            for name, ms in spent.items():
                stages.setdefault(name, []).append(ms)
    overhead = sorted(total - used for total, used in zip(ttft, engine, strict=True))
    arms = [
        Arm("ttft", "time to first token at the client", {"text": ttft}),
        Arm("engine", "forward on the prefill worker", {"text": engine}),
        Arm("overhead", "the difference, request by request", {"text": overhead}),
        *(Arm(f"stage {name}", "as the response reports it", {"text": times}) for name, times in stages.items()),
    ]
    figures = {
        "median_ms": statistics.median(overhead),
        "p99_ms": overhead[min(len(overhead) - 1, int(len(overhead) * 0.99))],
    }
    workload = {"model": CHECKPOINT, "requests": turns, "in_flight": 1, "embedded": quick}
    return Outcome(workload, arms, figures)


BENCHMARK = Benchmark(
    "overhead",
    "Time to first token that is not engine time (HTTP, parsing, routing, Ray), text requests one at a time.",
    run,
    {"median_ms": ("<=", 15)},
)
