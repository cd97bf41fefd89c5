"""Scale-downs of a real service under a steady load: failed answers, and work found again.

Prefill and decode go from 2 replicas to 1 and back through the planner, whose bounds are moved, on the bundled model,
with streams and links under way all the time. Prefill workers keep what they learn in memory alone, so that a page
which is found again after the replica that had it went was handed over. `--items` is the number of scale-downs: 50
by default (two to three hours on two cores), 2 with `--quick`.

| figure                 | what                                                                                       |
|------------------------|--------------------------------------------------------------------------------------------|
| failed                 | answers refused, cut, or ended by an error, of all                                         |
| answers                | of all clients                                                                             |
| reuse_kept             | tokens of pages that are found again after a scale-down, over those found before it         |
| down_s, up_s           | from the plan until the replicas have gone, and until as many serve again; medians          |
| p50_error, p99_error   | TTFT as the simulator predicts it from the access log of the load, over measured, less 1    |
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from rich.console import Console

from autoscale.planner import NAMESPACE, actor_name
from autoscale.signals import Role
from infra.reference import DEFAULT_MODEL, weights
from prefill_workers.modes import OperatingPoint
from serving.bench.harness import Benchmark, Outcome
from serving.deploy.launch import APPLICATION, application
from serving.scaling.check import compared
from tests.benchmarks.servers import bench_config
from tests.steady_load import SteadyLoad, page, user

ROLES = {Role.PREFILL: "PrefillWorker", Role.DECODE: "DecodeWorker"}
SCALE_DOWNS, QUICK = 50, 2
WRITERS, READERS = 4, 1
PAGES = 12  # new ones of each scale-down
CHECKED_S = 120.0  # of load that is replayed
_LEARNING_S = 60.0  # for new pages' KV to be kept, in idle time
_PATIENCE_S = 900.0  # for replicas to come or go
_REUSED = "full-reuse"  # canonical KV alone: patches go by the compiler, whatever becomes of a prefill worker


@dataclass(frozen=True)
class Turn:
    """Seconds of a scale-down and of the way back; tokens of pages reused before and after."""

    down_s: float
    up_s: float
    before: int
    after: int


def run(quick: bool, console: Console, items: int | None = None) -> Outcome:
    """Scale down as often as told, under load.

    Raises:
        TimeoutError: replicas did not come or go within a quarter of an hour.
    """
    count = items or (QUICK if quick else SCALE_DOWNS)
    with tempfile.TemporaryDirectory(prefix="orbitserve-scale-down-") as root:
        between, log = {"min": 1, "max": 2}, Path(root) / "log"
        config = bench_config(
            weights(DEFAULT_MODEL),
            Path(root),
            model={"max_model_len": 2048},
            library={"directory": None, "memory_bytes": 1 << 30, "object_store_bytes": 0},
            vision={"replicas": 0},
            retriever={"replicas": 0},
            prefill={"replicas": between, "kv_cache_gib": 0.5, "self_check": False},
            decode={"replicas": between, "kv_cache_gib": 0.5, "max_num_seqs": 8},
            autoscale={"mode": "act"},
            access_log={"directory": log},
        )
        with application(config, console) as url:
            service = Service(url, config.model.served_name)
            service.scale(2)
            with SteadyLoad(url, service.model, WRITERS, READERS) as load:
                time.sleep(CHECKED_S)
                figures = _errors(log)
                turns = []
                for number in range(count):
                    turns.append(turn := _scaled_down(service, number))
                    words = f"{turn.down_s:.0f} s down, {turn.up_s:.0f} s up, {turn.after} of {turn.before} tokens kept"
                    said = f"{load.answered} answers, {load.failed + service.failed} failed"
                    console.print(f"  {number + 1} of {count}: {words}; {said}", highlight=False)
                faults = [fault for fault in load.stop() if fault]
    for fault in faults[:5]:
        console.print(f"  {fault}", markup=False, style="red")
    figures |= {
        "failed": float(load.failed + service.failed),
        "answers": float(load.answered),
        "reuse_kept": sum(turn.after for turn in turns) / max(1, sum(turn.before for turn in turns)),
        "down_s": statistics.median(turn.down_s for turn in turns),
        "up_s": statistics.median(turn.up_s for turn in turns),
    }
    workload = {"scale_downs": count, "model": DEFAULT_MODEL, "writers": WRITERS, "readers": READERS, "pages": PAGES}
    return Outcome(workload, [], figures)


class Service:
    """The running service and its planner. `failed`: questions of `reused` that were."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model, self.failed = url, model, 0
        self._planner = ray.get_actor(actor_name(APPLICATION), namespace=NAMESPACE)

    def scale(self, count: int) -> float:
        """Steer both roles to so many replicas; returns the seconds until there are, and no others."""
        began = time.monotonic()
        ray.get([self._planner.bound.remote(str(role), count, count) for role in ROLES], timeout=60)
        while not all(_replicas(name) == {"RUNNING": count} for name in ROLES.values()):
            if time.monotonic() - began > _PATIENCE_S:
                there = {name: _replicas(name) for name in ROLES.values()}
                plans = httpx.get(f"{self.url}/v1/orbit/autoscale", timeout=60, trust_env=False).text
                raise TimeoutError(f"{there}, not {count} each: {plans}")
            time.sleep(0.5)
        return time.monotonic() - began

    def reused(self, pages: Iterable[int], mode: str) -> dict[int, int]:
        """Tokens of each page that are linked rather than computed, of those that are.

        One question about each page.
        """
        found = {number: self._reused(number, mode) for number in pages}
        return {number: tokens for number, tokens in found.items() if tokens}

    def _reused(self, number: int, mode: str) -> int:
        body = {
            "model": self.model,
            "messages": user("Look at ", page(number), " and say what you see."),
            "temperature": 0,
            "max_tokens": 2,
            "orbit": {"mode": mode},
        }
        try:
            answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
            orbit: dict[str, Any] = answer.raise_for_status().json()["orbit"]
        except httpx.HTTPError:
            self.failed += 1
            return 0
        return linked_tokens(orbit)


def _scaled_down(service: Service, number: int) -> Turn:
    pages = range(1000 + number * PAGES, 1000 + (number + 1) * PAGES)
    service.reused(pages, "exact")  # each by one of the two
    until = time.monotonic() + _LEARNING_S
    while len(before := service.reused(pages, _REUSED)) < len(pages) and time.monotonic() < until:
        time.sleep(1)  # under load nothing says when all is learnt
    down_s = service.scale(1)
    after = service.reused(before, _REUSED)  # a replica learns others by being asked
    return Turn(down_s, service.scale(2), sum(before.values()), sum(after.values()))


def linked_tokens(orbit: Mapping[str, Any]) -> int:
    """Tokens of a report's chunks whose KV was there.

    With stored embeddings alone they are computed.
    """
    return sum(chunk["tokens"] for chunk in orbit["chunks"] if OperatingPoint(chunk["operating_point"]).is_reuse)


def _replicas(deployment: str) -> dict[str, int]:
    """Replicas of a deployment by their state, those that drain included."""
    return dict(serve.status().applications[APPLICATION].deployments[deployment].replica_states)


def _errors(log: Path) -> dict[str, float]:
    """Errors of the simulator on the load so far, of two replicas each."""
    found = compared(log, 2, 2, CHECKED_S)
    return {
        f"{name}_error": abs(found["predicted_ms"][name] / found["measured_ms"][name] - 1) for name in ("p50", "p99")
    }


BENCHMARK = Benchmark(
    "scale-down",
    "Prefill and decode of a real service go from 2 replicas to 1 and back under load: failed answers, work kept.",
    run,
    {
        "failed": ("<=", 0.0),
        "reuse_kept": (">=", 0.95),
        "p50_error": ("<=", 0.15),
        "p99_error": ("<=", 0.3),
    },
    takes_items=True,
)
