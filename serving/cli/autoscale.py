"""`orbitserve autoscale`: policies on a trace, the simulator's error, a service's plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from serving.cli.fidelity import Key, Url, answer_field

if TYPE_CHECKING:
    from autoscale.simulator import Result
    from autoscale.traces import Request

app = typer.Typer(
    help="Replicas by load: simulate policies on traces, and see what a service's planner wants.", no_args_is_help=True
)
console = Console(soft_wrap=True, emoji=False)

Trace = Annotated[
    str,
    typer.Option(
        help="File of Mooncake or Azure, folder of ServeGen, access log or its folder; or a shape: steady, diurnal, "
        "bursty, wavering."
    ),
]
Ttft = Annotated[float, typer.Option(min=0.001, help="Time to the first token that counts as good, in seconds.")]
Itl = Annotated[float, typer.Option(min=0.0001, help="The same between two tokens, on average over an answer.")]
Pace = Annotated[float, typer.Option(min=1, help="Tokens a second of one prefill replica.")]


@app.command()
def simulate(
    trace: Trace,
    policy: Annotated[
        str,
        typer.Option(
            help="Names, with commas between: static, oracle, ours, ray, hpa, knative, saturation, sla-means."
        ),
    ] = "static,ours,oracle",
    ttft: Ttft = 4.0,
    itl: Itl = 0.06,
    prefill_tokens_per_second: Pace = 2500.0,
    decode_sequences: Annotated[int, typer.Option(min=1, help="Sequences that one decode replica takes.")] = 64,
    start: Annotated[float, typer.Option(min=0, help="Seconds that a replica takes to start.")] = 60.0,
    most: Annotated[int, typer.Option(min=1, help="Most replicas of each role.")] = 64,
    reuse: Annotated[
        float, typer.Option(min=0, max=1, help="Share of images that come again, of traces without names.")
    ] = 0.3,
    scale: Annotated[float, typer.Option(min=0.001, help="Of ServeGen's rates.")] = 1.0,
    rate: Annotated[float, typer.Option(min=0.001, help="Of a shape: most requests a second.")] = 5.0,
    begin: Annotated[float, typer.Option(min=0, help="Of ServeGen's day: the first hour.")] = 0.0,
    hours: Annotated[float, typer.Option(min=0.01, help="So much of the trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    shared: Annotated[bool, typer.Option("--shared", help="All replicas reach a tier that outlives them.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG of load, replicas and attainment over time.")] = None,
) -> None:
    """Run a trace through prefill and decode replicas that policies scale, and compare them."""
    from autoscale.curves import ForwardCost
    from autoscale.simulated import Machine
    from autoscale.simulator import Limits
    from autoscale.traces import BadTrace
    from serving.access_log import BadLog
    from serving.scaling.study import POLICIES, Study

    names = [name.strip() for name in policy.split(",") if name.strip()]
    if unknown := [name for name in names if name not in POLICIES]:
        console.print(f"[red]error:[/red] no policy {escape(unknown[0])!r}; there are {', '.join(POLICIES)}")
        raise typer.Exit(2)
    per_token = 1 / prefill_tokens_per_second
    machine = Machine(
        forward=ForwardCost(0.12 / per_token if per_token > 1e-2 else 300.0, per_token),
        encode_s_per_token=per_token / 4,
        max_sequences=decode_sequences,
        start_s=start,
    )
    requests = _source(trace, hours * 3600, reuse=reuse, scale=scale, rate=rate, begin=begin, seed=seed)
    try:
        with console.status("reading the trace") as status:

            def ended(result: Result, setting: str) -> None:
                console.print(_line(result, setting), highlight=False)
                status.update(f"{result.policy} done")

            study = Study(requests, machine, Limits(ttft, itl), most, shared, ended)
            status.update(f"simulating {', '.join(names)}")
            results = {name: study.run(name) for name in names}
    except (BadTrace, BadLog) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    if json_file is not None:
        document = {
            "trace": trace,
            "limits": {"ttft_s": ttft, "itl_s": itl},
            "start_s": start,
            "policies": {
                name: {**result.summary(), "setting": study.settings[name]} for name, result in results.items()
            },
        }
        json_file.write_text(json.dumps(_finite(document), indent=1) + "\n")
    if plot is not None:
        from serving.scaling.plot import draw

        draw(list(results.values()), trace, plot)


def _source(trace: str, seconds: float, **of: float) -> Callable[[], Iterator[Request]]:
    """Requests of a trace by its name, from the start at every call."""
    from autoscale.traces import SHAPES, generated, opened
    from serving.scaling.logs import logged, looks_logged

    path, seed = Path(trace), int(of["seed"])
    if trace in SHAPES:
        return lambda: generated(trace, of["rate"], seconds, of["reuse"], seed)
    if looks_logged(path):
        return lambda: takewhile(lambda request: request.at < seconds, logged(path))
    if path.is_dir():
        return lambda: opened(
            path, reuse=of["reuse"], scale=of["scale"], seed=seed, start_s=of["begin"] * 3600, seconds=seconds
        )
    return lambda: takewhile(lambda request: request.at < seconds, opened(path))


def _line(result: Result, setting: str) -> str:
    summary = result.summary()
    name = f"{result.policy} {setting}".strip()
    return (
        f"  {name:22} {result.attainment:7.2%} good, {result.total_replica_seconds / 3600:7.2f} replica-hours, TTFT "
        f"p50 {summary['ttft_p50_s']:.2f} p99 {summary['ttft_p99_s']:.2f} s, {result.turns} turns, "
        f"{result.reused_share:.0%} reused"
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN: None instead."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command()
def check(
    access_log: Annotated[Path, typer.Argument(help="Access log, or its folder (access_log.directory).")],
    prefill: Annotated[int, typer.Option(min=1, help="Prefill replicas that there were.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode replicas that there were.")] = 1,
    last: Annotated[float, typer.Option(min=0.01, help="Hours to replay, from the end.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write both sides here.")] = None,
) -> None:
    """Replay what was just served, and print predicted beside measured times to the first token."""
    from serving.access_log import BadLog
    from serving.scaling.check import compared

    try:
        outcome = compared(access_log, prefill, decode, last * 3600)
    except BadLog as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    console.print(f"  {outcome['requests']} requests in {outcome['seconds']:.0f} s", highlight=False)
    for name in ("p50", "p90", "p99"):
        predicted, measured = outcome["predicted_ms"][name], outcome["measured_ms"][name]
        off = abs(predicted / measured - 1)
        console.print(
            f"  TTFT {name}: predicted {predicted:.0f} ms, measured {measured:.0f} ms ({off:.0%})", highlight=False
        )
    if json_file is not None:
        json_file.write_text(json.dumps(_finite(outcome), indent=1) + "\n")


@app.command()
def status(url: Url = "http://127.0.0.1:8000", api_key: Key = None) -> None:
    """Print replicas of each role as they are and as the plan wants them, with reasons."""
    found = answer_field("GET", f"{url.rstrip('/')}/v1/orbit/autoscale", url, api_key, "roles")
    for role, one in found.items():
        bounds = f"{one['min']} to {one['max']}" if one["min"] != one["max"] else "fixed"
        plan = f"{one['target']} wanted ({one['reason']}: {one['because']})" if "target" in one else "no plan yet"
        console.print(f"[bold]{role}[/bold]: {one['ready']} ready, {plan}; {bounds}", highlight=False)
