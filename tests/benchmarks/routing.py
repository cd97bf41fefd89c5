"""Routing to 1, 2 and 4 prefill workers on one machine, against Ray Serve's two choices.

Every turn starts the service anew, with an empty library and memories that hold a part of the documents each, and sends
the same trace: documents drawn by Zipf's law, each behind text that no other request has.

| figure    | what                                                                                        |
|-----------|---------------------------------------------------------------------------------------------|
| hit rate  | share of look-ups of records that the worker's own memory answers, prefetches included       |
| imbalance | the most tokens that any worker computed for requests, over the mean of all                  |
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from ray import serve
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.deploy.launch import APPLICATION, application
from serving.loadtest.images import around, image_url, timed_chat
from tests.benchmarks.servers import bench_config

CHECKPOINT = "qwen2_5_vl-tiny"
DOCUMENTS, TOKENS, AT_ONCE = 48, 256, 6
MEMORY_BYTES = 10 << 20  # of 48 documents' 26 MiB: canonical KV, patches and embeddings
_DESCRIPTIONS = {
    "ours": "time to first token; by queued tokens + tokens to compute + bytes to load",
    "default": "time to first token; Ray Serve's default router",
}


@dataclass(frozen=True)
class Turn:
    """One trace through one service."""

    ttft_ms: Sequence[float]
    hit_rate: float
    imbalance: float


def run(quick: bool, console: Console) -> Outcome:
    """Measure both routers in turns, at every number of workers."""
    sizes, turns, requests = ([2], 1, 120) if quick else ([1, 2, 4], 2, 400)
    images = [image_url(TOKENS, number) for number in range(DOCUMENTS)]
    trace = zipf(DOCUMENTS, requests)
    found: dict[str, dict[int, list[Turn]]] = {name: {size: [] for size in sizes} for name in _DESCRIPTIONS}
    for size in sizes:
        for turn in range(turns):
            for name in list(_DESCRIPTIONS)[:: 1 if turn % 2 == 0 else -1]:
                measured = _turn(size, name == "ours", [images[number] for number in trace], console)
                found[name][size].append(measured)
                console.print(
                    f"  {size} workers, {name}: hit rate {measured.hit_rate:.3f}, imbalance {measured.imbalance:.2f}"
                )
    arms = [
        Arm(name, text, {str(size): [ms for turn in found[name][size] for ms in turn.ttft_ms] for size in sizes})
        for name, text in _DESCRIPTIONS.items()
    ]
    workload = {
        "model": CHECKPOINT,
        "documents": DOCUMENTS,
        "document_tokens": TOKENS,
        "requests": requests,
        "turns": turns,
        "in_flight": AT_ONCE,
        "memory_bytes": MEMORY_BYTES,
        "zipf_exponent": 1,
    }
    return Outcome(workload, arms, _figures(sizes, found, arms), _tables(sizes, found), axis="workers")


def zipf(documents: int, requests: int) -> list[int]:
    """Document numbers drawn by Zipf's law with exponent 1; the same ones every time."""
    weights = 1 / np.arange(1, documents + 1)
    drawn = np.random.default_rng(0).choice(documents, requests, p=weights / weights.sum())
    return [int(number) for number in drawn]


def _turn(workers: int, ours: bool, images: Sequence[str], console: Console) -> Turn:
    with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as root:
        config = bench_config(
            checkpoint_path(CHECKPOINT),
            Path(root),
            library={"directory": Path(root) / "library", "memory_bytes": MEMORY_BYTES, "object_store_bytes": 0},
            prefill={"replicas": workers, "threads": 1, "self_check": False},
            decode={"threads": 1},
            vision={"threads": 1},
            routing={"enabled": ours},
        )
        with application(config, console) as url, httpx.Client(timeout=300) as client:
            before = _workers()

            def ask(numbered: tuple[int, str]) -> float:
                number, image = numbered
                return timed_chat(client, url, config.model.served_name, around(image, number)).ttft_ms

            with ThreadPoolExecutor(AT_ONCE) as pool:
                times = list(pool.map(ask, enumerate(images)))
            after = _workers()
    hits = sum(after[name].memory_hits - before[name].memory_hits for name in before)
    others = sum(after[name].others - before[name].others for name in before)
    tokens = [after[name].tokens - before[name].tokens for name in before]
    return Turn(times, hits / (hits + others), max(tokens) / statistics.mean(tokens))


@dataclass(frozen=True)
class _Worker:
    """Counters of one prefill worker."""

    memory_hits: int
    others: int  # look-ups that memory did not answer
    tokens: int


def _workers() -> dict[str, _Worker]:
    stats: list[dict[str, Any]] = (
        serve.get_deployment_handle("PrefillWorker", APPLICATION).broadcast("stats").results(timeout_s=60)
    )
    return {
        one["name"]: _Worker(
            one["library"].memory_hits,
            one["library"].tier_hits + one["library"].misses,
            one["loop"].tokens_forwarded,
        )
        for one in stats
    }


def _figures(
    sizes: Sequence[int], found: Mapping[str, Mapping[int, Sequence[Turn]]], arms: Sequence[Arm]
) -> dict[str, float]:
    largest = sizes[-1]
    hits = {name: statistics.mean(turn.hit_rate for turn in found[name][largest]) for name in found}
    ours, default = (arm.median_ms(str(sizes[0])) for arm in arms)
    return {
        "hit_rate_over_default": hits["ours"] / hits["default"],
        "imbalance": max(turn.imbalance for size in sizes for turn in found["ours"][size]),
        f"ttft_over_default_{sizes[0]}": ours / default,
    }


def _tables(
    sizes: Sequence[int], found: Mapping[str, Mapping[int, Sequence[Turn]]]
) -> dict[str, dict[str, dict[str, float]]]:
    def table(figure: str) -> dict[str, dict[str, float]]:
        return {
            name: {str(size): statistics.mean(getattr(turn, figure) for turn in of[size]) for size in sizes}
            for name, of in found.items()
        }

    return {"hit rate by workers": table("hit_rate"), "imbalance by workers": table("imbalance")}


BENCHMARK = Benchmark(
    "routing",
    "Documents by Zipf's law over 1, 2 and 4 prefill workers: hit rate and balance, ours and Ray Serve's default.",
    run,
    {},
)
