"""The documents' tables of measurements say what the records beside them say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fidelity_records import recorded

from serving.bench.fidelity.bench import KINDS
from serving.loadtest.arrivals import poisson
from serving.loadtest.measures import SATURATED
from tests.benchmarks.catalogue import BENCHMARKS

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
    named = re.findall(r"fidelity-(\w+)-", before)
    family = named[-1] if named else "gqa"  # the README's first page is of the bundled model
    document = recorded(family)
    assert document is not None
    measured = document["tables"]
    for row in table:
        arm = ARMS[row[""]]
        for column, cell in row.items():
            if not told(cell) or not column:
                continue
            quantity = FRACTIONS.get(column, "accuracy")
            of = "multi" if column in FRACTIONS else SPLITS.get(column, column)
            value = measured[f"{family}: {quantity}"][arm][of]
            assert told(cell) == [pytest.approx(value, abs=0.00501)], (row[""], column, value)


ROLLING_KL = {
    "orbit patches average {} nats under the same text": ("same",),
    "{} in another of the orders": ("other order",),
    "{} with a word between the pages": ("one word between",),
    "{} with a sentence there": ("a sentence between",),
    "sums of pairs {}": ("sums",),
    "without weights {}": ("plain sums",),
}
BROKEN = ("wrong page", "turned basis", "blind")
SOUND = ("same", "other order", "one word before", "a sentence before", "one word between")  # the rule reuses


def rolling_kl(situations: tuple[str, ...], column: str = "mean") -> list[float]:
    """Of all families: means, in nats, or another column."""
    found = []
    for family in KINDS:
        document = recorded(family)
        assert document is not None
        rows = document["tables"][f"{family}: rolling KL by situation"]
        found += [rows[situation][column] for situation in situations]
    return found


def test_what_the_bounds_of_fidelity_come_from_is_what_was_measured():
    said = " ".join(DOCUMENTS[0].read_text().split())
    for words, situations in ROLLING_KL.items():
        (told,) = re.findall(re.escape(words).replace(r"\{\}", r"(\d\.\d+) to (\d\.\d+)"), said)
        known = rolling_kl(situations)
        assert told == (f"{min(known):.2f}", f"{max(known):.2f}"), words
    (least,) = re.findall(r"and (\d\.\d) and more where they are damaged, of another page or missing", said)
    assert 0 <= min(rolling_kl(BROKEN)) - float(least) < 0.1
    (most,) = re.findall(r"checks of sound patches up to (\d\.\d+) pass 0\.5 all the same", said)
    assert most == f"{max(rolling_kl(SOUND, 'alarms at 0.5')):.2f}"


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


def median(arm: str, x: str) -> Callable[[Any], float]:
    return lambda report: next(one for one in report["arms"] if one["name"] == arm)["median_ms"][x]


def cell(table: str, row: str, column: str) -> Callable[[Any], float]:
    return lambda report: report["tables"][table][row][column]


def paid(of: Callable[[Iterable[float]], float], over: str = "off") -> Callable[[Any], float]:
    """The least or the most reuses until canonical KV and patch have paid, in two runs."""
    runs = record("break-even-amx2"), record("break-even-amx2-again")
    return lambda _: of(of(run["tables"]["reuses until it has paid"][over].values()) for run in runs)


FIRST_PAGE: dict[str, tuple[str, tuple[Callable[[Any], float], ...]]] = {
    "(`ttft`) | {} ms (eager, as ours; compiled {}) | {} ms patched, {} ms in mode `exact`": (
        "ttft-amx2",
        tuple(median(arm, "1024") for arm in ("vllm", "compiled", "patched", "exact")),
    ),
    "first token where vLLM saturates | 1 | at least {} times as many": (
        "rates-cpu2",
        (figure("throughput_over_prefix"),),
    ),
    "(with AMX {}); {} of the time": (
        "rates-amx2",
        (figure("throughput_over_prefix"), figure("ttft_over_prefix")),
    ),
    "first token | 1 | **{} times as long**; {} of ours with reuse switched off": (
        "one-shot-amx2",
        (figure("ttft_over_vllm"), figure("ttft_over_off")),
    ),
    "canonical KV and patch have paid after {} to {} reuses, against mode `exact` after up to {}": (
        "break-even-amx2",
        (paid(min), paid(max), paid(max, "exact")),
    ),
    "{} of the KV of a chunk of 1024 tokens (`orbitserve bench patch-apply`)": (
        "patch-apply-cpu2",
        (figure("patch_share_of_kv"),),
    ),
    "{} of those behind two or more stood in that very order before where the service orders them, {} as sent": (
        "placement-amx2",
        tuple(
            cell("chunks behind two or more whose very order came before", arm, "5 pages")
            for arm in ("placed, pairs", "arrival, pairs")
        ),
    ),
}


@pytest.mark.parametrize("words", FIRST_PAGE)
def test_the_first_page_says_what_was_measured(words: str):
    name, values = FIRST_PAGE[words]
    said = " ".join(DOCUMENTS[0].read_text().split())
    pattern = re.escape(words).replace(r"\{\}", r"(\d+(?:\.\d+)?)")
    (found,) = re.findall(pattern, said)
    for number, value in zip([found] if isinstance(found, str) else found, values, strict=True):
        assert number == f"{value(record(name)):.{len(number.partition('.')[2])}f}"


TTFT = {
    "vLLM, prefix caching": "vllm", "the same, compiled": "compiled", "ours, `exact`": "exact",
    "ours, patched": "patched", "limit": "limit",
}  # fmt: skip


def test_the_table_of_first_tokens_is_what_was_measured():
    (table,) = (rows for _, rows in tables(DOCUMENTS[1]) if "vLLM over patched" in rows[0])
    tokens = ""
    for row in table:
        tokens = row["image tokens"] or tokens
        report = record(f"ttft-{MACHINES[row['']]}")
        said = {arm: row[column] for column, arm in TTFT.items() if row[column]}
        assert said == {arm: f"{median(arm, tokens)(report):.0f}" for arm in said}
        assert row["vLLM over patched"] == f"{figure(f'patched_speedup_{tokens}')(report):.1f}"
    assert len(table) == 8


def under_load() -> Table:
    return next(table for _, table in tables(DOCUMENTS[1]) if "under load" in table[0])


def by_benchmark(table: Table) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row with its benchmark, which its first cell names or that of a row above."""
    benchmark, first = "", next(iter(table[0]))
    for row in table:
        if named := re.match(r"`([\w-]+)`", row[first]):
            benchmark = named[1]
        yield benchmark, row


@pytest.mark.parametrize("machine", MACHINES)
def test_what_comes_under_load_is_what_was_measured(machine: str):
    seen = set()
    for benchmark, row in by_benchmark(under_load()):
        if (known := (benchmark, row[""])) in UNDER_LOAD:
            name, value = UNDER_LOAD[known]
            expected = value(record(f"{name}-{MACHINES[machine]}"))
            (number,) = re.findall(r"\d+\.\d+", row[machine])
            assert number == f"{expected:.{len(number.partition('.')[2])}f}", known
            seen.add(known)
    assert seen == UNDER_LOAD.keys()


def saturates(report: Any, arm: str) -> bool:
    """Whether an arm of `rates` saturates at the highest rate that it was asked at; its arrivals are drawn again."""
    workload, completed = report["workload"], report["tables"]["completed a second"][arm]
    rate = max(map(float, completed))
    count = dict(zip(workload["rates"], workload["requests_of_a_turn"], strict=True))[rate]
    turns = [poisson(rate, count, seed) for seed in range(workload["turns"])]
    spans = [(due[-1].at - due[0].at) / (count - 1) for due in turns]
    return completed[f"{rate:g}"] < SATURATED * len(spans) / sum(spans)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_never_saturated_is_told_as_a_bound(machine: str):
    report, cells = record(f"rates-{MACHINES[machine]}"), {}
    for benchmark, row in by_benchmark(under_load()):
        if benchmark == "rates" and "over" in row[""] and "TTFT" not in row[""]:
            cells[next(arm for arm in ("cacheblend-15", "full-reuse", "vLLM") if arm in row[""])] = row[machine]
    assert len(cells) == 3
    ours = saturates(report, "auto-placed")
    for arm, cell in cells.items():
        theirs = saturates(report, "prefix" if arm == "vLLM" else arm)
        bound = {(True, True): "", (False, True): "at least", (True, False): "at most", (False, False): "at one rate"}
        assert re.sub(r"[\d.]+", "", cell).strip() == bound[ours, theirs], arm


WITH_AIMS = [table for _, table in tables(DOCUMENTS[1]) if "aimed at" in table[0]]
AIMED = [
    pytest.param(benchmark, row[""], row[machine], row["aimed at"], id=f"{benchmark}: {row['']}, {machine}")
    for table in WITH_AIMS
    for benchmark, row in by_benchmark(table)
    for machine in MACHINES
    if row["aimed at"] and row[machine]
]
FIRST, LAST = 0, -1
AIMED_AT_ONE = {"patch-apply": LAST, "weighing": FIRST}  # of a cell's numbers


def judged(benchmark: str, cell: str, aimed: str) -> list[tuple[float, bool, float]]:
    """A cell's numbers outside of parentheses: each with whether it stands in bold and what is aimed at."""
    outside = re.sub(r"\(.*?\)", "", cell).split("**")
    numbers = [(number, bool(i % 2)) for i, part in enumerate(outside) for number in told(part)]
    if aimed == "twice":
        ((ours, bold), (theirs, beside)) = numbers
        assert bold == beside
        return [(ours / theirs, bold, 2.0)]
    if benchmark in AIMED_AT_ONE:
        place = AIMED_AT_ONE[benchmark]
        assert not any(bold for _, bold in set(numbers) - {numbers[place]})
        numbers = [numbers[place]]
    aims = told(aimed) * (1 if len(told(aimed)) > 1 else len(numbers))
    return [(*number, aim) for number, aim in zip(numbers, aims, strict=True)]


@pytest.mark.parametrize(("benchmark", "what", "cell", "aimed"), AIMED)
def test_what_misses_its_target_stands_in_bold_and_nothing_else_does(benchmark: str, what: str, cell: str, aimed: str):
    for number, bold, aim in judged(benchmark, cell, aimed):
        (comparison,) = {how for how, target in BENCHMARKS[benchmark].targets.values() if target == aim}
        missed = number > aim if comparison == "<=" else number < aim
        assert bold == missed, (what, number, f"{comparison} {aim:g}")


def test_nothing_stands_in_bold_where_nothing_is_aimed_at():
    rows = [row for table in WITH_AIMS for row in table]
    assert len(rows) > len(AIMED) / 2
    assert not [row for row in rows if not row["aimed at"] and any("**" in cell for cell in row.values())]
