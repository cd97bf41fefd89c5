"""The documents' tables of measurements say what the records beside them say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path("tests/benchmarks/results")
DOCUMENTS = (Path("README.md"), Path("tests/benchmarks/README.md"))
ARMS = {
    "exact": "exact",
    "`full-reuse` (blind)": "blind",
    "patch of rank 8": "patch_8",
    "orbit patch of rank 16": "orbit",
    "pair patches, summed": "composed",
    "`mpic-32`": "mpic_32",
    "`cacheblend-15`": "cacheblend_15",
}
SPLITS = {"single-hop": "single", "multi-hop": "multi", "chains": "chain", "counted": "tally"}
FRACTIONS = {"bytes beside the KV": "bytes_fraction", "computed": "computed", "tokens computed": "computed"}
MACHINES = {"A": "cpu2", "B": "amx2"}

Table = list[dict[str, str]]


@cache
def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def tables(document: Path) -> Iterator[tuple[str, Table]]:
    """What stands before each table, and its rows by the header's words; the first column's are under an empty one."""
    for found in re.finditer(r"(?:^\|.*\|\n)+", text := document.read_text(), re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in found[0].splitlines())
        yield text[: found.start()], [dict(zip(header, row, strict=True)) for row in rows]


def told(cell: str) -> list[float]:
    """The numbers of a cell."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


FIDELITY = [
    pytest.param(table, before, id=f"{document.parent.name or 'README'}-{number}")
    for document in DOCUMENTS
    for number, (before, table) in enumerate(tables(document))
    if table[0].get("") == "exact"
]


def test_there_are_tables_of_every_family():
    assert len(FIDELITY) == 5


@pytest.mark.parametrize(("table", "before"), FIDELITY)
def test_what_reuse_answers_is_what_was_measured(table: Table, before: str):
    named = re.findall(r"fidelity-(\w+)-cpu2", before)
    family = named[-1] if named else "gqa"  # the README's first page is of the bundled model
    measured = record(f"fidelity-{family}-cpu2")["tables"]
    for row in table:
        arm = ARMS[row[""]]
        for column, cell in row.items():
            if not told(cell) or not column:
                continue
            quantity = FRACTIONS.get(column, "accuracy")
            of = "multi" if column in FRACTIONS else SPLITS.get(column, column)
            value = measured[f"{family}: {quantity}"][arm][of]
            assert told(cell) == [pytest.approx(value, abs=0.00501)], (row[""], column, value)


def figure(name: str) -> Callable[[Any], float]:
    return lambda report: report["figures"][name]


def beside(table: str, over: str, arm: str) -> Callable[[Any], float]:
    """An arm's most of a table over another's."""

    def value(report: Any) -> float:
        rows = report["tables"][table]
        return max(rows[arm].values()) / max(rows[over].values())

    return value


UNDER_LOAD: dict[tuple[str, str], tuple[str, Callable[[Any], float]]] = {
    ("rates", "TTFT over vLLM's at the rate where it saturates"): ("rates", figure("ttft_over_prefix")),
    ("rates", "most requests a second, over vLLM's"): ("rates", figure("throughput_over_prefix")),
    ("rates", "over those of `cacheblend-15`"): ("rates", figure("throughput_over_cacheblend15")),
    ("rates", "over those of `full-reuse`, which patches nothing"): (
        "rates",
        beside("completed a second", "full-reuse", "auto-placed"),
    ),
    ("sustained", "most bytes over the bound"): ("sustained", figure("max_library_bytes_over_bound")),
    ("one-shot", "TTFT over that with reuse switched off"): ("one-shot", figure("ttft_over_off")),
    ("one-shot", "over vLLM's"): ("one-shot", figure("ttft_over_vllm")),
}


def under_load() -> Table:
    return next(table for _, table in tables(DOCUMENTS[1]) if "under load" in table[0])


@pytest.mark.parametrize("machine", MACHINES)
def test_what_comes_under_load_is_what_was_measured(machine: str):
    benchmark, seen = "", set()
    for row in under_load():
        if named := re.match(r"`([\w-]+)`", row["under load"]):
            benchmark = named[1]
        if (known := (benchmark, row[""])) in UNDER_LOAD:
            name, value = UNDER_LOAD[known]
            expected = value(record(f"{name}-{MACHINES[machine]}"))
            digits = len(row[machine].strip("*").partition(".")[2])
            assert row[machine].strip("*") == f"{expected:.{digits}f}", known
            seen.add(known)
    assert seen == UNDER_LOAD.keys()
