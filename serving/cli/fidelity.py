"""`orbitserve fidelity`: show a service's operating points, and allow disabled ones again."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(help="See how far a running service is from exact, and allow operating points.", no_args_is_help=True)
console = Console(soft_wrap=True, emoji=False)

Url = Annotated[str, typer.Option(help="Address of the service.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="ORBITSERVE_API_KEY", help="Bearer key, where the service wants one.")
]
_LOCAL = "http://127.0.0.1:8000"


@app.command()
def show(url: Url = _LOCAL, api_key: Key = None) -> None:
    """Print operating points by prefill worker: rolling KL, allowed or switched off."""
    for point in _ask("GET", url, "", api_key, "data"):
        state = "allowed" if point["allowed"] else "[red]switched off[/red]"
        checks, rolling = point["checks"], point["rolling_checks"]
        measured = "not measured yet"
        if rolling:
            bound = "no bound" if point["bound_nats"] is None else f"bound {point['bound_nats']:g}"
            agreement = f"{point['rolling_agreement']:.0%} agree on the most likely token"
            measured = f"rolling KL {point['rolling_kl_nats']:.3g} nats ({bound}), {agreement}, last {rolling} checks"
        skipped = "".join(f", {count} skipped: {reason}" for reason, count in point["skipped"].items())
        console.print(f"[bold]{point['operating_point']}[/bold] on {point['replica']}: {state}; {measured}")
        console.print(f"  {checks} checks in all{skipped}", highlight=False)


@app.command()
def allow(
    point: Annotated[str, typer.Argument(help="Operating point, such as `patched` or `composed`.")],
    url: Url = _LOCAL,
    api_key: Key = None,
) -> None:
    """Allow an operating point that was switched off; takes an administrator's key."""
    replicas = _ask("POST", url, f"/{point}/allow", api_key, "replicas_allowed_again")
    console.print(f"{point} is allowed again on {replicas} prefill workers" if replicas else f"{point} was allowed")


def _on_loopback(url: str) -> bool:
    """True if a URL names this very machine, which no proxy of the environment reaches."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ask(method: str, url: str, path: str, api_key: str | None, field: str) -> Any:
    return answer_field(method, f"{url.rstrip('/')}/v1/orbit/operating_points{path}", url, api_key, field)


def answer_field(method: str, address: str, url: str, api_key: str | None, field: str) -> Any:
    """A field of the service's answer; ends the command with a message if there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.request(method, address, headers=headers, timeout=30, trust_env=not _on_loopback(url))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        console.print(f"[red]error:[/red] no service answers at {escape(url)}: {escape(reason)}")
        raise typer.Exit(1) from None
    if response.is_error:
        try:
            reason = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            reason = response.text
        console.print(f"[red]error:[/red] {response.status_code}: {escape(reason)}")
        raise typer.Exit(1)
    try:
        found = response.json()[field]
    except (ValueError, LookupError, TypeError):
        found = None
    if found is None:
        console.print(f"[red]error:[/red] {escape(url)} answers, but not as an OrbitServe service does")
        raise typer.Exit(1)
    return found
