"""Common parts of the load benchmarks: vLLM and our service side by side, arms, turns.

Every arm gets the same cores, model and memory for KV. Our modes are arms of one service and tenants of their own in
it, so that none profits from what another mode stored; between turns the service finishes what it has to store. While
one server is asked, the other's processes stand still.

| memory for KV, GiB | vLLM | ours                                                                       |
|--------------------|------|----------------------------------------------------------------------------|
| in engines         | 3    | 1 prefill, 1 decode                                                        |
| in the library     |      | 0.5 in the prefill worker, 0.5 in Ray's object store; the disk behind them |
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from rich.console import Console

from infra.checkpoints import checkpoint_path
from infra.ports import free_port
from serving.bench.harness import Arm
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest import measures
from serving.loadtest.arrivals import poisson
from serving.loadtest.client import Endpoint, Sample, Tally
from serving.loadtest.progress import watching
from serving.loadtest.session import Subject
from serving.loadtest.workloads import Workload
from tests.benchmarks.servers import Server, bench_config, standing_still, tree, vllm_alone

QUICK_CHECKPOINT = "qwen2_5_vl-tiny"
VLLM_GIB = 3
LIBRARY = {"memory_bytes": 512 << 20, "object_store_bytes": 512 << 20}
TIMEOUT_S = 900.0
AXIS = "requests a second, offered"  # of pictures
_SETTLE_SECONDS = 3600.0
_BETWEEN_PAUSES = 4
_LOOK_SECONDS = 5.0

Runs = Sequence[Sequence[Sample]]  # an arm's turns at one rate


@dataclass(frozen=True)
class LoadArm:
    """One side of a comparison under load.

    Before a turn others `prepare` for it, and while it is asked they are `aside`; after it, it must `settle`.
    """

    name: str
    description: str
    subject: Subject
    settle: Callable[[], None]
    prepare: Callable[[], object] = lambda: None
    aside: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class OurService:
    """Our service; `library` is its directory, and others are `aside` while it is asked."""

    server: Server
    library: Path
    aside: Callable[[], AbstractContextManager[None]] = nullcontext

    def arm(
        self, tenant: str, description: str, workload: Workload, images: Literal["inline", "files"], **orbit: str
    ) -> LoadArm:
        """An arm that is a tenant of the service, asked with these `orbit` fields."""
        endpoint = Endpoint(
            self.server.url, self.server.model, key_of(tenant), orbit, images, TIMEOUT_S, {"ignore_eos": True}
        )
        return LoadArm(tenant, description, Subject(endpoint, workload), self.server.settle, aside=self.aside)


def vllm_arm(server: Server, service: OurService, workload: Workload) -> LoadArm:
    """vLLM's own server as an arm, our service aside; its images come inline."""
    endpoint = Endpoint(server.url, server.model, timeout_s=TIMEOUT_S, fields={"ignore_eos": True})
    subject, aside = Subject(endpoint, workload), partial(_aside, service.server)
    return LoadArm("prefix", "vLLM's OpenAI server with prefix caching", subject, lambda: None, aside=aside)


def _aside(server: Server) -> AbstractContextManager[None]:
    return standing_still(server.processes())


def key_of(tenant: str) -> str:
    """A tenant's bearer key."""
    return f"key-of-{tenant}"


@contextmanager
def our_service(
    checkpoint: Path,
    console: Console,
    tenants: Sequence[str],
    library: Mapping[str, int] = LIBRARY,
    prefill: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Iterator[OurService]:
    """The application on Ray Serve with these tenants and a fresh library on disk.

    `prefill`, `vision`: settings of the roles.
    """
    from serving.deploy.launch import application

    with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as root:
        config = bench_config(
            checkpoint,
            Path(root),
            http={"port": free_port(), "api_keys": {key_of(tenant): tenant for tenant in tenants}},
            library={"directory": Path(root) / "library", **library},
            prefill=dict(prefill or {}),
            vision=dict(vision or {}),
        )
        this = psutil.Process()
        others = tree(this)
        with application(config, console) as url:
            server = Server(url, config.model.served_name, settle, processes=lambda: tree(this) - others)
            yield OurService(server, Path(root) / "library")


@contextmanager
def both(
    checkpoint: Path, console: Console, tenants: Sequence[str], **roles: Mapping[str, Any]
) -> Iterator[tuple[Server, OurService]]:
    """vLLM's server and our service with these tenants, started one after the other.

    `roles`: settings of roles, see `our_service`.
    """
    console.print("starting vLLM's server, then ours")
    with vllm_alone(checkpoint, kv_cache_gib=VLLM_GIB) as alone:
        alone.settle()
        with our_service(checkpoint, console, tenants, **roles) as service:
            yield alone, replace(service, aside=partial(_aside, alone))


def checkpoint_of(model: Path | None, quick: bool) -> Path:
    """The checkpoint to measure: the one given, else a random one, in quick runs a tiny one."""
    return model or checkpoint_path(QUICK_CHECKPOINT if quick else CHECKPOINT)


def capacity_rps(arm: LoadArm, requests: int, console: Console) -> float:
    """Requests a second that an arm completes one at a time."""
    return 1e3 / median_e2e_ms(one_by_one(arm, requests, console, "one at a time"))


def one_by_one(arm: LoadArm, requests: int, console: Console, title: str) -> list[Sample]:
    """Send the workload's next requests one by one, then wait until all learnt is stored.

    Raises:
        RuntimeError: one failed.
    """
    tally = Tally()
    with watching(console, f"{arm.name}, {title}", tally), arm.aside():
        samples = asyncio.run(arm.subject.one_by_one(requests, tally))
    for sample in samples:
        if not sample.is_ok:
            raise RuntimeError(f"{arm.name}: {sample.status}: {sample.message}")
    arm.settle()
    return samples


def warm_up(arm: LoadArm, requests: int, console: Console) -> list[Sample]:
    """Bring a service to its steady state: part of the workload, with pauses to store.

    Raises:
        RuntimeError: a request failed.
    """
    samples: list[Sample] = []
    for start in range(0, requests, _BETWEEN_PAUSES):
        count = min(_BETWEEN_PAUSES, requests - start)
        samples += one_by_one(arm, count, console, f"warm-up from {start} of {requests}")
    return samples


def wait_until_compiled(service: OurService, console: Console, seconds: float) -> None:
    """Wait until the service has nothing left to compile ahead of requests, so long at most.

    That takes a share of the time alone (`prefill.compile_share`), so that pauses between turns are too short for it.

    Raises:
        TimeoutError: it still compiles; beside it no other arm would be measured fairly.
    """
    deadline = time.monotonic() + seconds
    while True:
        waiting: list[float] = []
        with suppress(httpx.HTTPError):
            lines = httpx.get(f"{service.server.url}/metrics", timeout=60).text.splitlines()
            waiting = [float(line.split()[1]) for line in lines if line.startswith("orbitserve_compile_waiting{")]
        if waiting and not any(waiting):  # without a line its worker was too busy to answer
            service.server.settle()
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s {sum(waiting):.0f} sets are left to be compiled")
        console.print(f"  {sum(waiting):.0f} sets are left to be compiled", end="\r")
        time.sleep(_LOOK_SECONDS)


def settle() -> None:
    """Wait until the service has stored what it learnt, an hour at most.

    Orders are run for orbit patches first.

    Raises:
        TimeoutError: it still forms patches.
    """
    from serving.cli.demo import wait_until_formed

    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            wait_until_formed()
            return
        except TimeoutError:
            if time.monotonic() > deadline:
                raise


def in_load_turns(
    arms: Sequence[LoadArm], rate: float, requests: int, turns: int, console: Console
) -> dict[str, list[list[Sample]]]:
    """Samples of every arm at one rate, a list a turn; arms in alternating order.

    In a turn all arms get the same arrivals.

    Raises:
        RuntimeError: an arm answered nothing in a turn.
    """
    runs: dict[str, list[list[Sample]]] = {arm.name: [] for arm in arms}
    for turn in range(turns):
        arrivals = poisson(rate, requests, seed=turn)
        for arm in arms if turn % 2 == 0 else list(reversed(arms)):
            arm.prepare()
            tally = Tally()
            with watching(console, f"{arm.name}, {rate:g}/s", tally), arm.aside():
                samples = asyncio.run(arm.subject.run(arrivals, tally))
            if not any(sample.is_ok and sample.first for sample in samples):
                raise RuntimeError(f"{arm.name}, {rate:g}/s: no answer; {samples[0].status}: {samples[0].message}")
            runs[arm.name].append(samples)
            arm.settle()
    return runs


# -- what runs come to -------------------------------------------------------------------------------------------------


def pooled(runs: Runs) -> list[Sample]:
    """The samples of all turns."""
    return [sample for run in runs for sample in run]


def completed_rps(runs: Runs) -> float:
    """Whole answers a second over all turns."""
    return sum(sample.is_ok for sample in pooled(runs)) / sum(measures.window_s(run) for run in runs)


def is_saturated(runs: Runs) -> bool:
    """True if less than `measures.SATURATED` of what was offered was completed, over all turns."""
    offered = sum(map(len, runs)) / sum(len(run) / measures.offered_rps(run) for run in runs)
    return completed_rps(runs) < measures.SATURATED * offered


def median_e2e_ms(samples: Sequence[Sample]) -> float:
    """Median of the whole answers' end-to-end milliseconds."""
    found = measures.percentiles(sample.e2e_ms for sample in samples if sample.is_ok)
    return float("inf") if found is None else found["p50"]


def harness_arm(arm: LoadArm, runs: Mapping[str, Runs]) -> Arm:
    """An arm as the harness reports it: times to first token, by rate."""
    times = {
        rate: [sample.ttft_ms for sample in pooled(turns) if sample.is_ok and sample.ttft_ms is not None]
        for rate, turns in runs.items()
    }
    return Arm(
        arm.name, f"{arm.description}; time to first token", {rate: found for rate, found in times.items() if found}
    )


def tables(runs: Mapping[str, Mapping[str, Runs]]) -> dict[str, dict[str, dict[str, float]]]:
    """Other tables of (arm → rate → turns): throughput, tails, hits, failures, lag."""

    def of(value: Callable[[Runs], float | None]) -> dict[str, dict[str, float]]:
        rows = {
            arm: {rate: found for rate, turns in rates.items() if (found := value(turns)) is not None}
            for arm, rates in runs.items()
        }
        return {arm: cells for arm, cells in rows.items() if cells}

    def p90(turns: Runs) -> float | None:
        found = measures.percentiles(s.ttft_ms for s in pooled(turns) if s.is_ok and s.ttft_ms is not None)
        return None if found is None else found["p90"]

    def tokens(turns: Runs) -> float:
        good = sum(sample.output_tokens for sample in pooled(turns) if sample.is_ok)
        return good / sum(measures.window_s(run) for run in turns)

    def stage(name: str, turns: Runs) -> float | None:
        return measures.stages_ms(pooled(turns)).get(name)

    found: dict[str, dict[str, dict[str, float]]] = {
        "completed a second": of(completed_rps),
        "TTFT p90, ms": of(p90),
        "output tokens a second": of(tokens),
        "prompt tokens cached": of(lambda turns: measures.hit_rate(pooled(turns))),
        "failed": of(lambda turns: sum(not sample.is_ok for sample in pooled(turns))),
        "generator's lag p99, ms": of(lambda turns: measures.generator(pooled(turns))["lag_ms"]["p99"]),
    }
    every = (measures.stages_ms(pooled(turns)) for rates in runs.values() for turns in rates.values())
    for name in dict.fromkeys(name for stages in every for name in stages):
        found[f"stage {name}, median ms"] = of(partial(stage, name))
    return {name: rows for name, rows in found.items() if rows}


def describe(
    workload: Workload, library: Mapping[str, int] = LIBRARY, vllm_gib: float | None = VLLM_GIB, **more: Any
) -> dict[str, Any]:
    """A report's `workload`: what was asked, and the memory that arms have.

    `library`: the bounds of ours; `vllm_gib`: None where vLLM is no arm.
    """
    kept = sum(library[tier] for tier in ("memory_bytes", "object_store_bytes"))
    memory: dict[str, float] = {"ours_kv": 2, "ours_library": kept / 2**30}
    if vllm_gib is not None:
        memory["vllm_kv"] = vllm_gib
    return {"asked": workload.describe(), "dtype": measured_dtype(), "memory_gib": memory, **more}
