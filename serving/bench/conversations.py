"""Chats over a gallery and agents that look at their last screenshots: what recurs stands behind other words each time.

| arm             | what answers                                                       |
|-----------------|--------------------------------------------------------------------|
| `prefix`        | vLLM's OpenAI server with prefix caching                            |
| `full-reuse`    | ours, canonical KV without patches                                 |
| `cacheblend-15` | ours, 15 % of every image's tokens computed, those that deviate most |
| `mpic-32`       | ours, the first 32 tokens of every image computed                   |
| `auto`          | ours, stored patches where they fit                                 |

Images come inline, and stand where they stand: nothing is free to be ordered. A chat takes one to three images of 16
(mpic.md, Figure 1). An agent's step sends its last three screenshots, of which one is new, and sometimes an older one.
Each arm first answers part of the workload one at a time and stores what it learnt; then arrivals are Poisson at `LOAD`
of what vLLM completes one at a time, the same ones for all arms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from serving.bench import load_arms
from serving.bench.harness import Benchmark, Outcome
from serving.bench.load_arms import Runs
from serving.loadtest import measures
from serving.loadtest.workloads import Agent, Chat, Workload

OURS = {
    "full-reuse": "OrbitServe, mode full-reuse",
    "cacheblend-15": "OrbitServe, mode cacheblend-15",
    "mpic-32": "OrbitServe, mode mpic-32",
    "auto": "OrbitServe, mode auto",
}
LOAD = 0.4
ASKED = {"max_tokens": 4}
WORKLOADS: dict[str, Callable[[], Workload]] = {"chat": lambda: Chat(**ASKED), "agent": lambda: Agent(seed=1, **ASKED)}


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Measure all arms on both workloads; `items` requests a turn."""
    checkpoint = load_arms.checkpoint_of(model, quick)
    requests, turns, warmup = items or (6 if quick else 24), 1 if quick else 2, 4 if quick else 24
    runs: dict[str, dict[str, Runs]] = {}
    descriptions: dict[str, str] = {}
    rates: dict[str, float] = {}
    with load_arms.both(checkpoint, console, list(OURS)) as (alone, service):
        for name, make in WORKLOADS.items():
            vllm = load_arms.vllm_arm(alone, service, make())
            arms = [vllm, *(service.arm(mode, text, make(), "inline", mode=mode) for mode, text in OURS.items())]
            came = {arm.name: load_arms.warm_up(arm, warmup, console) for arm in arms}
            capacity = 1e3 / load_arms.median_e2e_ms(came[vllm.name][warmup // 2 :])
            rates[name] = float(f"{LOAD * capacity:.3g}")
            found = load_arms.in_load_turns(arms, rates[name], requests, turns, console)
            for arm in arms:
                runs.setdefault(arm.name, {})[name] = found[arm.name]
                descriptions[arm.name] = arm.description
    figures = {
        f"{name}.ttft_over_{other.replace('-', '')}": ttft_ms(runs["auto"][name]) / ttft_ms(runs[other][name])
        for name in WORKLOADS
        for other in ("prefix", "cacheblend-15")
    }
    workload = {
        **load_arms.describe(
            Chat(**ASKED), model=checkpoint.name, rates=rates, requests_of_a_turn=requests, turns=turns, warmup=warmup
        ),
        "asked": {name: make().describe() for name, make in WORKLOADS.items()},
    }
    shown = [load_arms.harness_arm(name, descriptions[name], runs[name]) for name in runs]
    return Outcome(workload, shown, figures, load_arms.tables(runs), axis="workload")


def ttft_ms(turns: Runs) -> float:
    """Median over all turns."""
    return measures.median_ttft_ms(load_arms.pooled(turns))


BENCHMARK = Benchmark(
    "conversations",
    "Chats over a gallery and agents over screenshots: vLLM with prefix caching, and our modes.",
    run,
    {},
    takes_model=True,
    takes_items=True,
)
