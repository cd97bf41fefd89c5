"""Images that are seen once: what it costs to be ready to reuse when there is nothing to.

| arm      | what answers                                                                      |
|----------|-----------------------------------------------------------------------------------|
| `prefix` | vLLM's OpenAI server with prefix caching                                           |
| `off`    | ours, nothing looked up, nothing stored                                           |
| `auto`   | ours: everything is looked up, missed, computed, and stored beside later requests |

Arrivals are Poisson at `LOAD` of what vLLM completes one at a time, the same ones for all arms. Images come inline.

Our prefill workers encode images themselves (`vision.replicas: 0`), as vLLM's engine does: where all roles share a
machine's processors a vision encoder of its own adds its hops, and takes from the forwards that run beside it.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from serving.bench.harness import Benchmark, Outcome
from serving.loadtest import measures
from serving.loadtest.workloads import OneShot
from tests.benchmarks import load_arms

LOAD = 0.4
VISION = {"replicas": 0}


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Measure all arms in turns; `items` requests a turn."""
    checkpoint = load_arms.checkpoint_of(model, quick)
    requests, turns = items or (6 if quick else 20), 2 if quick else 4
    asked = {"question_words": 4, "max_tokens": 4}
    with load_arms.both(checkpoint, console, ["off", "auto"], vision=VISION) as (alone, service):
        arms = [
            load_arms.vllm_arm(alone, service, OneShot(**asked)),
            service.arm("off", "OrbitServe, mode off", OneShot(**asked), "inline", mode="off"),
            service.arm("auto", "OrbitServe, mode auto", OneShot(**asked), "inline", mode="auto"),
        ]
        for arm in arms:
            load_arms.warm_up(arm, 3, console)
        capacity = load_arms.capacity_rps(arms[0], 3 if quick else 9, console)
        rate = float(f"{LOAD * capacity:.3g}")
        runs = load_arms.in_load_turns(arms, rate, requests, turns, console)
    vllm, off, auto = (measures.median_ttft_ms(load_arms.pooled(runs[arm.name])) for arm in arms)
    by_rate = {name: {f"{rate:g}": found} for name, found in runs.items()}
    return Outcome(
        load_arms.describe(
            OneShot(**asked),
            model=checkpoint.name,
            rate=rate,
            requests_of_a_turn=requests,
            turns=turns,
            vllm_one_at_a_time_rps=round(capacity, 4),
            vision=VISION,
        ),
        [load_arms.harness_arm(arm, by_rate[arm.name]) for arm in arms],
        {"ttft_over_off": auto / off, "ttft_over_vllm": auto / vllm},
        load_arms.tables(by_rate),
        axis=load_arms.AXIS,
    )


BENCHMARK = Benchmark(
    "one-shot",
    "Images that are seen once, at a moderate rate: ours with reuse on and off, and vLLM.",
    run,
    {"ttft_over_off": ("<=", 1.1), "ttft_over_vllm": ("<=", 1.25)},
    takes_model=True,
    takes_items=True,
)
