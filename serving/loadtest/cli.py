"""`orbitserve loadtest`: offer requests to a server at given rates and say how it answered."""

from __future__ import annotations

import asyncio
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from serving.output_files import unwritable

app = typer.Typer(
    help="Offer requests to any OpenAI server at given rates, and say how it answered. `loadtest workloads` lists what "
    "can be asked; `loadtest plot` draws several reports on one picture.",
    invoke_without_command=True,
)
console = Console(soft_wrap=True)


@app.callback()
def loadtest(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model to ask; default: the first that the server names.")] = "",
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="ORBITSERVE_API_KEY", help="Bearer key, where one is wanted.")
    ] = None,
    workload: Annotated[str, typer.Option(help="mrag, agent, turns, image-first, chat, novel or one-shot.")] = "mrag",
    parameters: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the workload's parameters; may be repeated.")
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Requests a second, such as 1,2,4; default: 1, or as the trace has them.")
    ] = "",
    count: Annotated[int | None, typer.Option(min=1, help="Requests at each rate; default: --duration's.")] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds at each rate; default: 30, or all of a trace.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each rate that are not counted.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and of the workload, unless --set seed=N.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help='JSONL of arrivals: {"at": s, "body": {...}} or {"at": s, "images": k}.')
    ] = None,
    mode: Annotated[str | None, typer.Option(help="`orbit.mode` of every request; default: not sent.")] = None,
    order: Annotated[str | None, typer.Option(help="`orbit.order` of every request; default: not sent.")] = None,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Of `agent` and `turns`: a conversation is a session (`orbit.session`).")
    ] = False,
    images: Annotated[str, typer.Option(help="inline: data URLs; files: uploaded once to /v1/files.")] = "inline",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, on servers that know `ignore_eos`.")
    ] = False,
    ttft_limit: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds; goodput counts answers whose first token came by then.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until an unfinished request counts as failed.")
    ] = 120,
    drain: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait after a rate's last request; default: --timeout's.")
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests outstanding at once, at most.")] = 10_000,
    name: Annotated[str, typer.Option(help="Of this arm, in reports and pictures; default: model and mode.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it here, as PNG.")] = None,
) -> None:
    """Send requests when they are due, whatever is outstanding, and time the answers from then."""
    if context.invoked_subcommand is not None:
        return
    from serving.loadtest import progress, report
    from serving.loadtest.arrivals import TraceError, read_trace
    from serving.loadtest.client import Endpoint, EndpointError
    from serving.loadtest.session import Plan, RateResult, Subject, load_test
    from serving.loadtest.workloads import WorkloadError
    from serving.loadtest.workloads import workload as make_workload

    if images not in ("inline", "files"):
        _refuse(f"--images {images}: inline or files")
    if (problem := unwritable(json_file, plot_file)) is not None:
        _refuse(problem)
    asked = {key: value for key, value in (("mode", mode), ("order", order)) if value is not None}
    fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
    how: Literal["inline", "files"] = "files" if images == "files" else "inline"
    endpoint = Endpoint(url, model, api_key, asked or None, how, timeout, sessions, fields)
    try:
        arrivals = None if trace is None else read_trace(trace)
        plan = Plan(_rates(rates, trace is not None), count, duration, warmup, seed, arrivals)
        chosen = make_workload(workload, **{"seed": seed, **_parameters(parameters or [])})
        subject = Subject(endpoint, chosen, max_in_flight, drain)
    except (TraceError, WorkloadError) as error:
        _refuse(str(error))
    results: list[RateResult] = []
    stopped: tuple[str, int] | None = None

    async def measure() -> None:
        watch = partial(progress.watching, console)
        async for result in load_test(subject, plan, watch):
            results.append(result)  # noqa: PERF401 - rates before one that fails count

    try:
        asyncio.run(measure())
    except (WorkloadError, EndpointError) as error:
        stopped = str(error), 2 if isinstance(error, WorkloadError) else 1
    except KeyboardInterrupt:
        stopped = "interrupted", 130
    if stopped is not None and not results:
        _refuse(*stopped)
    document = report.document(
        name or " ".join([model or url, *asked.values()]),
        shlex.join(["orbitserve", *_without_key(sys.argv[1:])]),
        *(endpoint, chosen, plan, results, ttft_limit, subject.max_in_flight),
    )
    report.show(document, console)
    if json_file is not None:
        from serving.loadtest.records import write

        write(document, json_file)
    if plot_file is not None:
        report.plot([document], plot_file)
    if stopped is not None:
        console.print(f"{len(results)} of {len(list(plan.steps()))} rates are reported")
        _refuse(*stopped)
    if not any(rate["ok"] for rate in document["rates"]):
        raise typer.Exit(1)


@app.command()
def plot(
    reports: Annotated[list[Path], typer.Argument(help="Reports of load tests (--json); each is a line.")],
    out: Annotated[Path, typer.Option(help="The picture, as PNG.")],
) -> None:
    """Draw time to first token and throughput against the rate, every report on one picture."""
    from serving.loadtest import report

    try:
        read = [report.read(path) for path in reports]
    except report.ReportError as error:
        _refuse(str(error))
    if (problem := unwritable(out)) is not None:
        _refuse(problem)
    report.plot(read, out)
    console.print(f"{out}: {len(reports)} reports")


@app.command()
def workloads() -> None:
    """Every workload with its parameters, their defaults and what they mean."""
    from serving.loadtest.workloads import WORKLOADS

    for kind in WORKLOADS.values():
        console.print(f"[bold]{kind.name}[/bold]  {kind.about}")
        for name, field in kind.model_fields.items():
            console.print(f"    {name}={field.default!r}  {field.description}", markup=False, highlight=False)


def _rates(text: str, traced: bool) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        _refuse(f"--rates {text}: requests a second with commas between them")
    if any(not 0 < rate < float("inf") for rate in rates):
        _refuse(f"--rates {text}: every rate must be greater than 0")
    return rates or ([] if traced else [1.0])


def _parameters(pairs: list[str]) -> dict[str, str]:
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        _refuse(f"--set {wrong[0]}: NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _without_key(arguments: list[str]) -> list[str]:
    """The command line with the API key left out."""
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--api-key":
            kept.append("...")
        else:
            kept.append("--api-key=..." if argument.startswith("--api-key=") else argument)
    return kept


def _refuse(message: str, code: int = 2) -> NoReturn:
    console.print(f"[red]error:[/red] {escape(message)}")
    raise typer.Exit(code)
