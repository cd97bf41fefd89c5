"""The JSON of a load test, what the terminal shows of it, and one picture of several.

`{"kind", "name", "command", "date", "versions", "machine", "endpoint", "workload", "arrivals", "rates"}`; `rates` has
what `measures.summary` says of each rate, and every request's numbers in columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serving.loadtest.client import Endpoint, Sample
from serving.loadtest.measures import LAG_MS, LAG_SHARE, PERCENTILES, SATURATED, summary
from serving.loadtest.plot import number_axis
from serving.loadtest.records import environment
from serving.loadtest.session import Plan, RateResult
from serving.loadtest.workloads import Workload

KIND = "orbitserve loadtest"


class ReportError(ValueError):
    """A file that is no load test's report; the message names it."""


def document(
    name: str,
    command: str,
    endpoint: Endpoint,
    workload: Workload,
    plan: Plan,
    results: Sequence[RateResult],
    ttft_limit_ms: float | None,
    max_in_flight: int,
) -> dict[str, Any]:
    """The report of a load test; the API key is left out."""
    return {
        "kind": KIND,
        "name": name,
        "command": command,
        **environment(),
        "endpoint": {
            "url": endpoint.url,
            "model": endpoint.model,
            "orbit": None if endpoint.orbit is None else dict(endpoint.orbit),
            "images": endpoint.images,
            "timeout_s": endpoint.timeout_s,
            "sessions": endpoint.sessions,
            "fields": dict(endpoint.fields),
        },
        "workload": workload.describe(),
        "arrivals": {
            "kind": "poisson" if plan.trace is None else "trace",
            "seed": plan.seed,
            "warmup": plan.warmup,
            "max_in_flight": max_in_flight,
        },
        "rates": [
            {
                "rate": one.rate,
                **summary(one.samples, ttft_limit_ms),
                "held_back": one.held_back,
                "peak_in_flight": one.peak_in_flight,
                "asked_before": plan.asked_before(step, len(one.samples)),
                "samples": columns(one.samples),
            }
            for step, one in enumerate(results)
        ],
    }


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Every request's numbers; seconds are from the first due time."""
    start = min(sample.due for sample in samples)

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "due_s": [round(s.due - start, 4) for s in samples],
        "lag_ms": [rounded(s.lag_ms) for s in samples],
        "ttft_ms": [rounded(s.ttft_ms) for s in samples],
        "e2e_ms": [rounded(s.e2e_ms) for s in samples],
        "output_tokens": [s.output_tokens for s in samples],
        "status": [s.status for s in samples],
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a column for every rate, and whatever makes its numbers doubtful."""
    rates = report["rates"]
    table = Table("requests a second", *(f"{rate['rate']:g}" for rate in rates), box=SIMPLE, pad_edge=False)
    rows = [_rows(rate) for rate in rates]
    for quantity in rows[0]:
        table.add_row(Text(quantity, no_wrap=True), *(row[quantity] for row in rows))
    marks = ", ".join(f"p{mark}" for mark in PERCENTILES)
    limits = {f"{rate['goodput']['ttft_limit_ms']:g}" for rate in rates if "goodput" in rate}
    good = "".join(f"; good answers have a first token within {limit} ms" for limit in limits)
    console.print(f"[bold]{escape(report['name'])}[/bold], {report['workload']['name']}: {marks} from when due{good}")
    console.print(table)
    for rate in rates:
        for text in remarks(rate):
            console.print(f"  {rate['rate']:g}/s: {escape(text)}", highlight=False)


def _rows(rate: Mapping[str, Any]) -> dict[str, str]:
    """Rows of one rate, by quantity."""
    rows = {
        "completed a second": f"{rate['completed_rps']:.3g}" + ("*" if rate["saturated"] else ""),
        "whole answers": f"{rate['ok']} of {rate['requests']}",
    }
    for name, key in (("TTFT, ms", "ttft_ms"), ("per output token, ms", "tpot_ms"), ("end to end, ms", "e2e_ms")):
        values = rate[key]
        rows[name] = "-" if values is None else " / ".join(f"{values[f'p{mark}']:.0f}" for mark in PERCENTILES)
    rows["tokens a second"] = f"{rate['output_tokens_per_s']:.1f}"
    hits = rate["cached_tokens_share"]
    rows["prompt tokens cached"] = "-" if hits is None else f"{hits:.0%}"
    if "goodput" in rate:
        rows["goodput"] = f"{rate['goodput']['share']:.0%}"
        rows["good answers a second"] = f"{rate['goodput']['rps']:.3g}"
    return rows


def remarks(rate: Mapping[str, Any]) -> list[str]:
    """Caveats to one rate's numbers."""
    found = []
    if rate["saturated"]:
        found.append(f"* saturated: fewer than {SATURATED:.0%} of the requests offered a second were completed")
    if rate["generator"]["late"] and not rate["held_back"]:
        p99 = rate["generator"]["lag_ms"]["p99"]
        found.append(
            f"the generator was late (p99 {p99:.0f} ms; more than {LAG_MS:g} ms and {LAG_SHARE:.0%} of TTFT): latencies"
            " contain it; run it on a machine of its own"
        )
    if rate["held_back"]:
        found.append(f"{rate['held_back']} requests waited to be sent: as many were outstanding as may be")
    if rate.get("asked_before"):  # absent from reports of older versions
        found.append(
            f"{rate['asked_before']} requests had been sent before, body for body, in the warm-up or at another rate:"
            " servers that cache prompts have them; restart yours and replay one rate without a warm-up"
        )
    if rate["without_content"]:
        found.append(f"{rate['without_content']} answers had no content, and so no time to first token")
    found += [f"{status}: {message}" for status, message in rate["first_messages"].items()]
    if rate["operating_points"]:
        found.append("chunks: " + ", ".join(f"{count} {point}" for point, count in rate["operating_points"].items()))
    if rate.get("stages_ms"):  # absent from reports of older versions
        found.append("stages, median ms: " + ", ".join(f"{name} {ms:.0f}" for name, ms in rate["stages_ms"].items()))
    return found


def read(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ReportError: the file cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ReportError(f"{path} is no report of `{KIND}`")
    if not (isinstance(found.get("rates"), list) and found["rates"]):
        raise ReportError(f"{path}: this report has no rates")
    return found


def plot(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time to first token and throughput against the rate, a line for every report, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (latency, throughput) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for report in reports:
        rates = sorted(report["rates"], key=lambda rate: float(rate["rate"]))
        answered = [rate for rate in rates if rate["ttft_ms"]]
        at = [rate["rate"] for rate in answered]
        (drawn,) = latency.plot(at, [rate["ttft_ms"]["p50"] for rate in answered], marker="o", label=report["name"])
        latency.plot(at, [rate["ttft_ms"]["p90"] for rate in answered], linestyle=":", color=drawn.get_color())
        done = [rate["completed_rps"] for rate in rates]
        throughput.plot([rate["rate"] for rate in rates], done, marker="o", label=report["name"])
    asked = sorted({rate["rate"] for report in reports for rate in report["rates"]})
    line = np.linspace(asked[0], asked[-1], 100)
    throughput.plot(line, line, linestyle="--", color="grey", linewidth=1, label="as offered")
    latency.set(xlabel="requests a second, offered", ylabel="time to first token, ms (p50; dotted: p90)", yscale="log")
    throughput.set(xlabel="requests a second, offered", ylabel="requests a second, completed")
    for axes in (latency, throughput):
        number_axis(axes, {rate: f"{rate:g}" for rate in asked})
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(", ".join(dict.fromkeys(str(report["workload"]["name"]) for report in reports)))
    figure.savefig(path, format="png", dpi=120)
    pyplot.close(figure)
