"""Reading of recorded results, and Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from serving.bench.harness import UNCERTAINTY

RESULTS = Path(__file__).parents[1] / "results"
MACHINES = {"A": "cpu2", "B": "amx2", "C": "avx2"}  # AMD EPYC; Intel Xeon with AMX; AMD EPYC without AVX-512

Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Record:
    """One recorded report of a benchmark (see `serving.bench.harness.report`)."""

    document: Mapping[str, Any]

    @property
    def workload(self) -> Mapping[str, Any]:
        """Workload of a record: requests and model."""
        return self.document["workload"]

    @property
    def figures(self) -> Mapping[str, float]:
        """The figures that targets are set for, by name."""
        return self.document["figures"]

    def median(self, arm: str, case: str) -> float:
        """Median milliseconds of an arm in one case."""
        return self.medians(arm)[case]

    def medians(self, arm: str) -> Mapping[str, float]:
        """Median milliseconds of an arm by case; empty without such an arm."""
        return next((one["median_ms"] for one in self.document["arms"] if one["name"] == arm), {})

    def table(self, name: str) -> Rows:
        """A table by row and column."""
        return self.document["tables"][name]


@cache
def record(benchmark: str, machine: str) -> Record | None:
    """The record of a benchmark on a machine, by its letter; None: it was not measured there."""
    path = RESULTS / f"{benchmark}-{MACHINES[machine]}.json"
    return Record(json.loads(path.read_text())) if path.exists() else None


def records(benchmark: str) -> Iterator[tuple[str, Record]]:
    """The machines on which a benchmark was measured, with its records."""
    for machine in MACHINES:
        if (found := record(benchmark, machine)) is not None:
            yield machine, found


def measured(benchmark: str, machine: str) -> Record:
    """The same for a benchmark that was measured there. Raises FileNotFoundError."""
    found = record(benchmark, machine)
    if found is None:
        raise FileNotFoundError(f"no record of {benchmark} on machine {machine}")
    return found


@cache
def fidelity(kind: str) -> Record | None:
    """A model family's fidelity records as one: every table and figure as it was measured last."""
    documents = [json.loads(path.read_text()) for path in RESULTS.glob(f"fidelity-{kind}-*.json")]
    if not documents:
        return None
    documents.sort(key=lambda document: document["date"])
    return Record(
        {
            "workload": {"weights": [document["workload"]["weights"] for document in documents]},
            "arms": [],
            "figures": {name: value for document in documents for name, value in document["figures"].items()},
            "tables": {name: rows for document in documents for name, rows in document["tables"].items()},
        }
    )


def cell(kind: str, table: str, row: str, column: str) -> float:
    """One cell of a family's fidelity tables."""
    found = fidelity(kind)
    assert found is not None, kind
    return found.table(f"{kind}: {table}")[row][column]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def judged(value: float, target: tuple[str, float] | None) -> str:
    """A figure, in bold where it misses what is aimed at."""
    met = target is None or (value >= target[1] if target[0] == ">=" else value <= target[1])
    return number(value) if met else f"**{number(value)}**"


def aim(target: tuple[str, float] | None) -> str:
    """A target in words."""
    return f"{'at least' if target[0] == '>=' else 'at most'} {target[1]:g}" if target else ""


def with_interval(cells: Mapping[str, float], column: str) -> str:
    """A share with half of its 95 % interval."""
    return f"{cells[column]:.2f} ± {cells[f'{column} {UNCERTAINTY}']:.2f}"
