"""Sustained novel recombination: known pages in sets that never were, request after request.

LMCache issue 4663: there the gain of reuse decays to nothing within 60 to 90 such queries, because what they store
pushes out what they need. Here the library's bounds are set so low that they bind within the run. Requests are sent one
at a time, so that what is stored and formed beside them has no pause to hide in; times are not of a queue.

The memory of the service's processes is watched too, without files and shared memory, by sixths of the run. It grows
until the library's memory is full, which is early; `memory_end_over_middle`, the last sixth over the third, says
whether anything else grows behind it.

A window of such queries is asked in mode `off` before, and after when nothing is left to be compiled: what they would
cost without reuse, and how far the machine has drifted meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from serving.bench.harness import Arm, Benchmark, Outcome
from serving.loadtest.client import Sample
from serving.loadtest.workloads import Novel
from tests.benchmarks import load_arms
from tests.benchmarks.servers import Server

WINDOW = 50
TENANT, WITHOUT = "auto", "off"
ORBIT = {"mode": "auto", "order": "free"}
_MIB = 1 << 20
BOUNDS = {"memory_bytes": 192 * _MIB, "object_store_bytes": 128 * _MIB, "disk_bytes": 512 * _MIB}
_QUICK_BOUNDS = {"memory_bytes": 2 * _MIB, "object_store_bytes": 1 * _MIB, "disk_bytes": 6 * _MIB}
_POLL_SECONDS = 0.5
_COMPILING_SECONDS = 1800.0
_PARTS = 6  # of the run, by which memory is told


def run(quick: bool, console: Console, model: Path | None = None, items: int | None = None) -> Outcome:
    """Ask `items` queries, 300 by default, and watch the library meanwhile."""
    checkpoint = load_arms.checkpoint_of(model, quick)
    queries = items or (24 if quick else 300)
    window = min(WINDOW, max(1, queries // 6))
    bounds = _QUICK_BOUNDS if quick and model is None else BOUNDS
    asked: dict[str, Any] = {"question_words": 4, "max_tokens": 4}
    if quick:
        asked |= {"pages": 10, "retrieved": 3, "columns": 8, "rows": 8}
    console.print("starting our service")
    with load_arms.our_service(checkpoint, console, [TENANT, WITHOUT], bounds) as service:
        off = service.arm(WITHOUT, "OrbitServe, mode off", Novel(**asked), "files", mode="off")
        before = _times(load_arms.one_by_one(off, window, console, "before"))
        arm = service.arm(TENANT, "OrbitServe, mode auto, free order", Novel(**asked), "files", **ORBIT)
        with library_watched(service.library, bounds) as shares, memory_watched(service.server) as memory:
            samples = load_arms.one_by_one(arm, queries, console, "one at a time")
        compiled = True
        try:
            load_arms.wait_until_compiled(service, console, _COMPILING_SECONDS)
        except TimeoutError as error:
            compiled = False
            console.print(f"[red]{error}[/red]: what follows is measured beside that")
        after = _times(load_arms.one_by_one(off, window, console, "after"))
    times = _times(samples)
    hits = [(sample.cached_tokens or 0) / sample.prompt_tokens for sample in samples]
    starts = range(0, queries, window)
    memory_mib = by_part(memory)
    return Outcome(
        load_arms.describe(
            Novel(**asked),
            library=bounds,
            vllm_gib=None,
            model=checkpoint.name,
            queries=queries,
            window=window,
            orbit=ORBIT,
            bounds=bounds,
            compiled_before_after=compiled,
        ),
        [
            Arm(arm.name, f"{arm.description}; time to first token, all queries in order", {"queries": times}),
            Arm(off.name, f"{off.description}; time to first token", {"before": before, "after": after}),
        ],
        {
            "last_over_best": last_over_best(times, window),
            "last_over_off": float(np.median(times[-window:]) / np.median(after)),
            "max_library_bytes_over_bound": max(shares.values()),
            **({"memory_end_over_middle": memory_mib[-1] / memory_mib[2]} if memory_mib else {}),
        },
        {
            "median TTFT of a window, ms": {
                "auto": {str(start): float(np.median(times[start : start + window])) for start in starts}
            },
            "prompt tokens cached": {
                "auto": {str(start): float(np.mean(hits[start : start + window])) for start in starts}
            },
            "most bytes over bound": {"auto": dict(shares)},
            "memory of the processes by sixths of the run, MiB": {
                "auto": {str(part): mib for part, mib in enumerate(memory_mib, 1)}
            },
        },
        axis="first query of the window",
    )


def _times(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]


def last_over_best(times: Sequence[float], window: int) -> float:
    """Median of the last `window` times over the least median of any earlier window.

    Raises:
        ValueError: there are no two windows.
    """
    if len(times) < 2 * window:
        raise ValueError(f"{len(times)} times hold no two windows of {window}")
    before = np.lib.stride_tricks.sliding_window_view(np.asarray(times[:-window]), window)
    return float(np.median(times[-window:]) / np.median(before, axis=1).min())


@contextmanager
def library_watched(directory: Path, bounds: dict[str, int]) -> Iterator[dict[str, float]]:
    """The most of each bound that was ever taken while the block ran, seen twice a second.

    Memory is what the prefill worker's library holds decoded; the object store as the library counts it; the disk by
    the sizes of the files that lie in its directory.
    """
    from ray import serve

    from serving.deploy.launch import APPLICATION

    shares = dict.fromkeys(bounds, 0.0)
    worker = serve.get_deployment_handle("PrefillWorker", APPLICATION)

    def look() -> None:
        library = worker.stats.remote().result(timeout_s=120)["library"]
        taken = {
            "memory_bytes": library.bytes,
            "object_store_bytes": library.tier_bytes.get("object-store", 0),
            "disk_bytes": bytes_below(directory),
        }
        for name, found in taken.items():
            shares[name] = max(shares[name], found / bounds[name])

    with _again_and_again(look):
        yield shares
    look()


@contextmanager
def memory_watched(server: Server) -> Iterator[list[float]]:
    """Samples of the server's private bytes, twice a second while the block runs.

    Files and shared memory are left out.
    """
    seen: list[float] = []

    def look() -> None:
        total = 0
        for process in server.processes():
            with suppress(psutil.NoSuchProcess):
                memory = process.memory_info()
                total += memory.rss - memory.shared
        seen.append(total)

    look()
    with _again_and_again(look):
        yield seen


@contextmanager
def _again_and_again(look: Callable[[], None]) -> Iterator[None]:
    """Call it in a thread of its own while the block runs."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            look()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            ended.set()
        watching.result()


def by_part(seen: Sequence[float]) -> list[float]:
    """Medians of the parts of the run, in MiB; none if it was too short to tell."""
    if len(seen) < _PARTS:
        return []
    return [float(np.median(part)) / _MIB for part in np.array_split(np.asarray(seen), _PARTS)]


def bytes_below(directory: Path) -> int:
    """Bytes of all files below a directory; one that goes meanwhile counts nothing."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


BENCHMARK = Benchmark(
    "sustained",
    "300 queries over pages that were seen, in sets that were not: TTFT over time, and the library's bounds.",
    run,
    {"last_over_best": ("<=", 1.1), "max_library_bytes_over_bound": ("<=", 1)},
    takes_model=True,
    takes_items=True,
)
