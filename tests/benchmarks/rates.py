"""Multimodal RAG at rising rates: TTFT and throughput of every arm, until it saturates.

| arm             | what answers                                                                       |
|-----------------|------------------------------------------------------------------------------------|
| `prefix`        | vLLM's OpenAI server with prefix caching                                            |
| `full-reuse`    | ours, canonical KV without patches                                                 |
| `cacheblend-15` | ours, 15 % of every chunk's tokens computed, those that deviate most                |
| `mpic-32`       | ours, the first 32 tokens of every chunk computed                                   |
| `auto`          | ours, stored patches where they fit, pages in the order of the request              |
| `auto-placed`   | the same, the order of the pages left to the service                           |

Each arm first answers part of the workload, one request at a time, and stores what it learnt, and then the service
compiles what it has still to compile: a steady state is measured. Nor does vLLM's turn begin while the service
compiles. That is pairs, whose sums serve every set; prefix subsets besides (`prefill.subset_forwards`) would save the
sums' weighing, and their compiling take longer than all the rest. Rates are multiples of the pace at which vLLM
answered the second half of the first part. It *saturates* at the first rate of whose requests it completes less than
`measures.SATURATED` a second; arms that saturate are not asked at rates above both that one and their own. An arm's
throughput is the most that it completed a second at any rate: of one that never saturates (`saturates_at`) a lower
bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from serving.bench.harness import Benchmark, Outcome
from serving.loadtest import measures
from serving.loadtest.workloads import Mrag
from tests.benchmarks import load_arms
from tests.benchmarks.load_arms import LoadArm, OurService, Runs
from tests.benchmarks.servers import Server

OURS = {
    "full-reuse": "OrbitServe, mode full-reuse",
    "cacheblend-15": "OrbitServe, mode cacheblend-15",
    "mpic-32": "OrbitServe, mode mpic-32",
    "auto": "OrbitServe, mode auto, pages in the request's order",
}
PLACED = "auto-placed"


@dataclass(frozen=True)
class _Scale:
    asked: Mapping[str, Any]
    multiples: Sequence[float]
    requests: int  # of a turn, at least
    seconds: float  # for which requests arrive in a turn, at least: the wait for the last answer must not be most of it
    turns: int
    warmup: int
    compiling: float

    def requests_at(self, rate: float) -> int:
        """Number of requests of a turn at so many a second."""
        return max(self.requests, round(self.seconds * rate))


_FULL = _Scale(
    {"pages": 12, "retrieved": 4, "zipf": 1.0, "question_words": 4, "max_tokens": 8, "columns": 24, "rows": 16},
    multiples=(0.75, 1.5, 3, 6, 9),
    requests=12,
    seconds=12,
    turns=2,
    warmup=48,
    compiling=1800,
)
_QUICK = _Scale(
    {"pages": 4, "retrieved": 2, "question_words": 4, "max_tokens": 4, "columns": 12, "rows": 12},
    multiples=(0.5, 2, 6),
    requests=6,
    seconds=0,
    turns=1,
    warmup=8,
    compiling=300,
)


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Measure every arm at every rate; `items` requests a turn, more at high rates."""
    scale = _QUICK if quick else _FULL
    scale = replace(scale, requests=items or scale.requests)
    checkpoint = load_arms.checkpoint_of(model, quick)
    prefill = {"subset_forwards": 0}
    with load_arms.both(checkpoint, console, [*OURS, PLACED], prefill=prefill) as (alone, service):
        arms = _arms(alone, service, scale)
        compiled = partial(load_arms.wait_until_compiled, service, console, scale.compiling)
        arms[0] = replace(arms[0], prepare=compiled)  # it is vLLM's, and the first to be measured
        came = {arm.name: load_arms.warm_up(arm, scale.warmup, console) for arm in arms}
        capacity = 1e3 / load_arms.median_e2e_ms(came["prefix"][scale.warmup // 2 :])
        rates = [float(f"{multiple * capacity:.3g}") for multiple in scale.multiples]
        runs, stopped = measure(arms, {rate: scale.requests_at(rate) for rate in rates}, scale.turns, console)
    return Outcome(
        load_arms.describe(
            Mrag(**scale.asked),
            model=checkpoint.name,
            rates=rates,
            requests_of_a_turn=[scale.requests_at(rate) for rate in rates],
            turns=scale.turns,
            warmup=scale.warmup,
            prefill=prefill,
            vllm_one_at_a_time_rps=round(capacity, 4),
            saturates_at={name: saturation_rate(measured) for name, measured in runs.items()},
            stopped=stopped,
        ),
        [load_arms.harness_arm(arm, runs[arm.name]) for arm in arms],
        figures(runs),
        load_arms.tables(runs),
        axis=load_arms.AXIS,
    )


def _arms(alone: Server, service: OurService, scale: _Scale) -> list[LoadArm]:
    arms = [load_arms.vllm_arm(alone, service, Mrag(**scale.asked))]
    for mode, description in OURS.items():
        arms.append(service.arm(mode, description, Mrag(**scale.asked), "files", mode=mode))
    text = "OrbitServe, mode auto, the service orders the pages"
    return [*arms, service.arm(PLACED, text, Mrag(**scale.asked), "files", mode="auto", order="free")]


def measure(
    arms: Sequence[LoadArm], rates: Mapping[float, int], turns: int, console: Console
) -> tuple[dict[str, dict[str, Runs]], str | None]:
    """Arm → rate → turns, and why that ends before the last rate.

    `rates`: with how many requests of a turn.

    Raises:
        RuntimeError, TimeoutError: the first rate could not be measured; see `load_arms`.
    """
    runs: dict[str, dict[str, Runs]] = {arm.name: {} for arm in arms}
    for rate, requests in rates.items():
        asked = [arm for arm in arms if not _is_done(runs, arm.name)]
        if not asked:
            break
        try:
            found = load_arms.in_load_turns(asked, rate, requests, turns, console)
        except (RuntimeError, TimeoutError) as error:
            if not any(runs.values()):
                raise
            console.print(f"[red]stopped at {rate:g} requests a second:[/red] {error}")
            return runs, f"at {rate:g} requests a second: {error}"
        for name, turned in found.items():
            runs[name][f"{rate:g}"] = turned
    return runs, None


def _is_done(runs: Mapping[str, Mapping[str, Runs]], name: str) -> bool:
    """True if an arm has saturated, at or above the rate at which vLLM does."""
    return all(any(load_arms.is_saturated(turns) for turns in runs[arm].values()) for arm in ("prefix", name))


def saturation_rate(rates: Mapping[str, Runs]) -> str | None:
    """The first rate at which an arm saturates; None if it never does."""
    return next((rate for rate, turns in rates.items() if load_arms.is_saturated(turns)), None)


def figures(runs: Mapping[str, Mapping[str, Runs]]) -> dict[str, float]:
    """Figures of `auto` with placement: where vLLM saturates, and beside `cacheblend-15`."""
    ours, prefix = runs[PLACED], runs["prefix"]

    def ttft_ms(rates: Mapping[str, Runs], rate: str) -> float:
        return measures.median_ttft_ms(load_arms.pooled(rates[rate]))

    def throughput(rates: Mapping[str, Runs]) -> float:
        return max(load_arms.completed_rps(turns) for turns in rates.values())

    found = {"throughput_over_cacheblend15": throughput(ours) / throughput(runs["cacheblend-15"])}
    rate = saturation_rate(prefix)
    if rate is None:
        return found
    beside = {
        "ttft_over_prefix": ttft_ms(ours, rate) / ttft_ms(prefix, rate),
        "throughput_over_prefix": throughput(ours) / throughput(prefix),
    }
    return beside | found


BENCHMARK = Benchmark(
    "rates",
    "Multimodal RAG at rising request rates: vLLM with prefix caching, and our modes; TTFT and throughput.",
    run,
    {
        "ttft_over_prefix": ("<=", 0.25),
        "throughput_over_prefix": (">=", 3),
        "throughput_over_cacheblend15": (">=", 2),
    },
    takes_model=True,
    takes_items=True,
)
