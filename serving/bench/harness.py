"""Harness of all benchmarks: turns, report, plot.

A benchmark returns an `Outcome`; `report` makes the JSON of it:
`{"name", "command", "versions", "machine", "workload", "arms", "figures", "tables", "axis"}`, where `figures` maps
names to numbers and `tables`, which few benchmarks have, name, row and column to one; `axis` says what cases and
columns count that are bare numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from serving.loadtest.plot import draw_tables
from serving.loadtest.records import environment

UNCERTAINTY = "±"  # a table's column `x ±` holds half of the 95 % interval of column `x`


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: milliseconds of every turn, by case (such as image tokens)."""

    name: str
    description: str
    samples_ms: Mapping[str, Sequence[float]]

    def median_ms(self, case: str) -> float:
        """Median over the turns of one case."""
        return statistics.median(self.samples_ms[case])


@dataclass(frozen=True)
class Outcome:
    """Result of a benchmark.

    `axis`: what cases and columns count, where they are bare numbers.
    """

    workload: Mapping[str, Any]
    arms: Sequence[Arm]
    figures: Mapping[str, float]
    tables: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    axis: str = ""

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark by name. `targets`: figure → (comparison, number), from the project's goals.

    `run` takes `quick` and the console, with `takes_model` a checkpoint's path or None as `model`, with `takes_items`
    how much to measure or None as `items`, with `takes_work` a folder for finished parts or None as `work`, and as
    `only` some of the names in `takes_only`, where there are any, or None. `folders`: what a checkpoint's folder may be
    called, if not anything. `applies`: whether a target is one of a run that gave these figures.
    """

    name: str
    description: str
    run: Callable[..., Outcome]
    targets: Mapping[str, tuple[str, float]]
    takes_model: bool = False
    takes_items: bool = False
    takes_work: bool = False
    takes_only: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    applies: Callable[[str, Mapping[str, float]], bool] = lambda name, figures: True

    def targets_of(self, figures: Mapping[str, float]) -> dict[str, tuple[str, float]]:
        """The targets of a run that gave these figures."""
        return {name: target for name, target in self.targets.items() if self.applies(name, figures)}


def in_turns(arms: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Milliseconds by arm; every arm runs once a turn, in alternating order.

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
    return {
        "name": benchmark.name,
        "quick": quick,
        "command": command,
        **environment(),
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
        "figures": {name: _rounded(value) for name, value in outcome.figures.items()},
        "tables": {
            name: {row: _defined(cells) for row, cells in rows.items()} for name, rows in outcome.tables.items()
        },
        "axis": outcome.axis,
    }


def _defined(cells: Mapping[str, float]) -> dict[str, float]:
    return {column: _rounded(value) for column, value in cells.items() if value == value}


def _columns(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Every column that some row has, in the order of the longest."""
    longest = max(rows.values(), key=len)
    return list(dict.fromkeys([*longest, *(column for cells in rows.values() for column in cells)]))


def _rounded(value: float) -> float:
    """Four decimals, or four digits of what is smaller."""
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


def show(benchmark: Benchmark, document: Mapping[str, Any], console: Console) -> None:
    """Print the figures, each beside its target."""
    for arm in document["arms"]:
        times = ", ".join(f"{case}: {ms:.1f}" for case, ms in arm["median_ms"].items())
        console.print(f"  {arm['name']:12} median ms  {times}", highlight=False)
    for name, rows in document["tables"].items():
        columns = _columns(rows)
        table = Table(name, *columns, box=SIMPLE, pad_edge=False, collapse_padding=True)
        for row, cells in rows.items():
            table.add_row(row, *(_cell(cells.get(column), None) for column in columns))
        console.print(table)
    targets = benchmark.targets_of(document["figures"])
    for name, value in document["figures"].items():
        line = f"  {name} = {value:g}"
        if name in targets:
            comparison, target = targets[name]
            met = value >= target if comparison == ">=" else value <= target
            line += f"   (target {comparison} {target:g}: {'met' if met else 'missed'})"
        console.print(line, highlight=False)
    for name, (comparison, target) in targets.items():
        if name not in document["figures"]:
            console.print(f"  {name} was not measured   (target {comparison} {target:g})", highlight=False)
    if document["quick"]:
        console.print("  quick: few turns and small cases; not to be quoted")


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Median milliseconds of every arm over the cases and one picture of each table, as a PNG."""
    medians = {arm["name"]: arm["median_ms"] for arm in document["arms"]}
    tables = ({"median ms": medians} if medians else {}) | document["tables"]
    draw_tables(document["name"], tables, UNCERTAINTY, path, document.get("axis", ""))


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of a report as Markdown; a column `x ±` joins column `x`."""
    parts = [f"# {document['name']}\n\n`{document['command']}`, {document['date']}, {document['machine']['cpu']}\n"]
    for name, rows in document["tables"].items():
        columns = [column for column in _columns(rows) if not column.endswith(UNCERTAINTY)]
        parts.append(f"## {name}\n\n| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
        for row, cells in rows.items():
            values = (_cell(cells.get(column), cells.get(f"{column} {UNCERTAINTY}")) for column in columns)
            parts[-1] += f"\n| {row} | {' | '.join(values)} |"
        parts[-1] += "\n"
    return "\n".join(parts)


def _cell(value: float | None, uncertainty: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if uncertainty is None else f"{value:.3g} ± {uncertainty:.2g}"
