"""Cost of an idle service to other computations on its machine.

A prefill engine in a process of its own computes prompts, alone and beside an idle service. A forward's threads wait
for one another hundreds of times, so that anything that wakes up on one of their processors delays them all.

| figure               | what                                                                     |
|----------------------|--------------------------------------------------------------------------|
| `forward_over_alone` | a forward beside the service, over one without                           |
| `cores`              | processors that the service's processes and Ray's use                    |
| `wakes_per_s`        | how often their threads begin to run, a second (Linux)                   |

The tables have the last two for every process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.engine_process import engine_process, forward_ms
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT
from serving.deploy.launch import application
from tests.benchmarks.load_arms import QUICK_CHECKPOINT, settle
from tests.benchmarks.servers import bench_config, tree

TOKENS = 290  # of a forward: a page of 256, and words
_REST_SECONDS = 5.0


@dataclass(frozen=True)
class Usage:
    """A process's use so far: CPU seconds, and voluntary context switches."""

    name: str
    seconds: float
    wakes: int


def run(quick: bool, console: Console) -> Outcome:
    """Measure the engine alone, beside the service, and alone again."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.5) if quick else (CHECKPOINT, 6, 3.0)
    with engine_process("prefill", checkpoint, TOKENS, {}) as engine, tempfile.TemporaryDirectory() as root:
        alone = _forwards(engine, turns // 2, seconds)
        before = tree(psutil.Process())
        with application(bench_config(checkpoint_path(checkpoint), Path(root)), console):
            settle()
            time.sleep(_REST_SECONDS)
            used = _rates(before, turns * seconds)
            beside = _forwards(engine, turns, seconds)
        alone += _forwards(engine, turns - turns // 2, seconds)
    arm = Arm("forward", f"a forward of {TOKENS} tokens", {"alone": alone, "beside an idle service": beside})
    figures = {
        "forward_over_alone": arm.median_ms("beside an idle service") / arm.median_ms("alone"),
        "cores": sum(row["cores"] for row in used.values()),
        "wakes_per_s": sum(row["wakes a second"] for row in used.values()),
    }
    workload = {"model": checkpoint, "tokens": TOKENS, "turns": turns, "seconds": seconds}
    return Outcome(workload, [arm], figures, {"idle processes": used})


def _forwards(engine: Connection, turns: int, seconds: float) -> list[float]:
    return [forward_ms({"it": (engine, TOKENS)}, seconds)["it"] for _ in range(turns)]


def _rates(others: set[psutil.Process], seconds: float) -> dict[str, dict[str, float]]:
    """Use per second of child processes but `others`, summed by name, largest first."""
    before, began = _usage(others), time.monotonic()
    time.sleep(seconds)
    after, spent = _usage(others), time.monotonic() - began
    found: dict[str, dict[str, float]] = {}
    for pid, now in after.items():
        then = before.get(pid, Usage(now.name, 0.0, 0))
        row = found.setdefault(now.name, {"cores": 0.0, "wakes a second": 0.0})
        row["cores"] += (now.seconds - then.seconds) / spent
        row["wakes a second"] += (now.wakes - then.wakes) / spent
    return dict(sorted(found.items(), key=lambda item: -item[1]["wakes a second"]))


def _usage(others: set[psutil.Process]) -> Mapping[int, Usage]:
    found = {}
    for process in tree(psutil.Process()) - others:
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            found[process.pid] = Usage(_name(process), times.user + times.system, _wakes(process.pid))
    return found


def _name(process: psutil.Process) -> str:
    """Name of a role or Ray actor, which such processes write over their command line."""
    title = process.cmdline()[0].strip() if process.cmdline() else process.name()
    return title.rpartition(":")[2].split(".")[0] if "::" in title else process.name()


def _wakes(pid: int) -> int:
    """Voluntary context switches of a process' threads; 0 where the system does not say."""
    return sum(
        int(line.split()[1])
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


BENCHMARK = Benchmark(
    "idle",
    "A forward alone, and beside a service that is asked for nothing: what its processes take by looking for news.",
    run,
    {},
)
