"""Report of `orbitserve compile-trace`: plan and outcome, as JSON and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from serving.offline.compile_plan import Plan, Wanted
from serving.offline.knapsack import UNBOUNDED, Cost


@dataclass
class Report:
    """Plan and outcome of a run."""

    requests: int
    chunks: int
    compute_ms_per_token: float
    place_ms_per_token: float
    skipped: dict[str, int]
    plans: list[Plan]
    chosen: Plan
    statuses: Counter[str] = field(default_factory=Counter)  # stored, present, skipped
    tokens: int = 0
    not_compiled: Counter[str] = field(default_factory=Counter)  # by reason
    unwritten: int = 0
    absent: int = 0  # of the patches that were stored, now or before: not there in the end

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "trace": {"requests": self.requests, "chunks": self.chunks, "skipped_chunks": self.skipped},
            "compute_ms_per_token": self.compute_ms_per_token,
            "place_ms_per_token": self.place_ms_per_token,
            "plans": [_outline(each) for each in self.plans],
            "chosen": {
                **_outline(self.chosen),
                "list": [_named(wanted) for wanted in self.chosen.patches],
            },
            "compiled": {**self.statuses, "tokens": self.tokens, "unwritten": self.unwritten, "absent": self.absent},
            "not_compiled": dict(self.not_compiled),
        }


def show_plan(report: Report, budget: Cost, console: Console) -> None:
    """Print the trace in figures, what it leaves out, and the plans."""
    console.print(
        f"trace: {report.requests} requests, {report.chunks} chunks; a token computed takes "
        f"{report.compute_ms_per_token:.3g} ms, one placed {report.place_ms_per_token:.3g} ms",
        highlight=False,
    )
    _show_reasons("skipped", report.skipped, console)
    table = Table(box=None, padding=(0, 2))
    for name in ("", "patches", "bytes", "compute", "saves", "at most", "unbounded"):
        table.add_column(name, justify="right" if name else "left")
    for each in report.plans:
        mark = "[bold]*[/bold]" if each is report.chosen else " "
        table.add_row(
            f"{mark} {each.kind}",
            f"{len(each.patches)} of {each.candidates}",
            decimal(round(each.cost.bytes)),
            f"{each.cost.seconds:.1f} s",
            f"{each.saves:.1f} s",
            f"{each.most:.1f} s",
            f"{each.possible:.1f} s",
        )
    console.print(table)
    chosen, within = report.chosen, "within the budget" if budget != UNBOUNDED else "without a budget"
    if chosen.patches:
        console.print(
            f"{chosen.kind}: saves {chosen.saves:.1f} s of at most {chosen.most:.1f} s {within} ({chosen.share:.0%})",
            highlight=False,
        )
    else:
        console.print("nothing to compile: no patch is used often enough, or the budget allows none")


def show_outcome(report: Report, console: Console) -> None:
    """Print what was compiled, what was not and why, and what the library has not kept."""
    counts = report.statuses
    console.print(
        f"{counts['stored']} patches stored now, {counts['present']} stored before, {counts['skipped']} skipped; "
        f"{report.tokens} tokens computed",
        highlight=False,
    )
    _show_reasons("not compiled", report.not_compiled, console, "patches")
    if report.unwritten:
        console.print(
            f"[red]{report.unwritten} records could not be stored[/red]: is a tier of the library full or down?"
        )
    elif report.absent:
        console.print(
            f"[red]{report.absent} patches are not there any more[/red]: the library had to make room (give it more "
            "bytes, or fewer with --bytes), or its farthest tier does not answer"
        )


def _show_reasons(what: str, reasons: Mapping[str, int], console: Console, unit: str = "chunks") -> None:
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        console.print(f"  {what}: {count} {unit}: {escape(reason)}", highlight=False)


def _outline(one: Plan) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "patches": len(one.patches),
        "candidates": one.candidates,
        "bytes": one.cost.bytes,
        "compute_s": one.cost.seconds,
        "saves_s": one.saves,
        "at_most_s": one.most,
        "without_budget_s": one.possible,
        "share": one.share,
    }


def _named(wanted: Wanted) -> dict[str, Any]:
    return {
        "tenant": wanted.scope.owner,
        "prefix": wanted.scope.prefix,
        "ordered": wanted.ordered,
        "contents": wanted.contents,
    }
