"""`orbitserve`: the command line."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from infra.ray_exit import exit_with
from serving.bench.command import bench_command
from serving.cli import fidelity as fidelity_cli
from serving.cli import library as library_cli
from serving.loadtest import cli as loadtest_cli

app = typer.Typer(help="Serve multimodal models without paying twice for what was already seen.", no_args_is_help=True)
app.add_typer(library_cli.app, name="library")
app.add_typer(fidelity_cli.app, name="fidelity")
app.add_typer(loadtest_cli.app, name="loadtest")
app.command("bench")(bench_command("orbitserve", "serving.bench.catalogue"))
console = Console(soft_wrap=True)
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML of an OrbitServeConfig; see `config`.")]


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="Port of the HTTP server.")] = 8000,
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving afterwards, until interrupted.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw the pages of an earlier run. Default: new ones.")] = None,
) -> None:
    """Start everything on the bundled model, ask about three pictures twice, and show what the second time cost."""
    from serving.cli.demo import run_demo

    if not run_demo(console, port, keep, seed):
        raise typer.Exit(1)


@app.command()
def serve(
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; overrides the configuration's.")] = None,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt plus answer in tokens; default: the model's, or what the KV pools hold if less."
        ),
    ] = None,
) -> None:
    """Serve a checkpoint over the OpenAI HTTP API until interrupted."""
    from serving.config import ConfigError, OrbitServeConfig
    from serving.deploy.launch import StartUpError, application

    try:
        settings = OrbitServeConfig.load(config, model=model, host=host, port=port, max_model_len=max_model_len)
        with application(settings, console) as url:
            console.print(f"serving [bold]{settings.model.served_name}[/bold] at {url}/v1 (docs at {url}/docs)")
            console.print("interrupt (Ctrl-C) to stop")
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")
    except (ConfigError, StartUpError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None


@app.command()
def config() -> None:
    """Print every setting with its default and what it means, as YAML to start from."""
    from serving.config import OrbitServeConfig, documented

    typer.echo(documented(OrbitServeConfig))


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint to check the engine with; default: the bundled.")
    ] = None,
    config: Config = None,
) -> None:
    """Check versions, engine, transfers, memory and ports, and say what to do about each failure.

    With a configuration its model, its library's directory and URL, and the place of its files are checked too.
    """
    from serving.cli.doctor import print_report, run_doctor
    from serving.config import ConfigError, OrbitServeConfig

    try:
        settings = None if config is None else OrbitServeConfig.load(config, model=model)
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    if settings is None:
        results = run_doctor(model)
    else:
        from serving.engine_spec import prefill_spec

        results = run_doctor(
            settings.model.path,
            (settings.http.port,),
            settings.library,
            (settings.files_url, settings.files),
            prefill_spec(settings, hand_off=False),
            settings.http.host,
        )
    print_report(results, console)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


@app.command()
def precompute(
    manifest: Annotated[str, typer.Argument(help="Folder of images, or JSONL or Parquet file; a path or fsspec URL.")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; overrides the configuration's.")] = None,
    config: Config = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; overrides the configuration's.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose content it is, of entries that do not say.")] = "local",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many entries, from the first.")] = None,
    failures: Annotated[Path | None, typer.Option(help="JSONL file for the entries that failed, with reasons.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the manifest alone; compute nothing.")] = False,
) -> None:
    """Encode and store everything in a manifest, so that first requests over it link. Run it again to resume.

    Where the configuration has API keys, content must be of a tenant of theirs, or of `dynamic-library`: everybody's.
    """
    from serving.config import ConfigError, OrbitServeConfig
    from serving.offline import precompute as job
    from serving.offline.precompute_manifest import Manifest, ManifestError, Owners

    try:
        settings = OrbitServeConfig.load(config, model=model, workers=workers)
        owners = Owners(tenant, frozenset(key.tenant for key in settings.http.api_keys.values()))
        source = Manifest(manifest, settings.precompute.storage_options, owners)
        if dry_run:
            good = job.dry_run(source, limit, console)
        else:
            good = job.precompute(settings, source, limit, failures, console)
    except (ConfigError, ManifestError, job.PrecomputeError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    if not good:
        raise typer.Exit(1)


@app.command("compile-trace")
def compile_trace(
    access_log: Annotated[Path, typer.Argument(help="Access log, or the directory of several (access_log.directory).")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint directory; overrides the configuration's.")] = None,
    config: Config = None,
    kind: Annotated[
        Literal["auto", "sets", "pairs"], typer.Option(help="What to compile; auto: what saves more.")
    ] = "auto",
    most_bytes: Annotated[
        str | None,
        typer.Option("--bytes", help="Patches may take so much: 500M, 2G (GB, of 1000), 2GiB (of 1024), ..."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Computing may take so long.")] = None,
    min_uses: Annotated[int, typer.Option(min=1, help="Logged requests that must use a patch.")] = 2,
    prefix: Annotated[
        list[str] | None, typer.Option(help="Text of a system prompt, or @FILE; once for each. The log has digests.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; compile nothing.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write plan and outcome here.")] = None,
) -> None:
    """Compile the patches that an access log shows to be worth most, within a budget. Run it again to resume."""
    from serving.access_log import BadLog
    from serving.config import ConfigError, OrbitServeConfig
    from serving.offline import compile_trace as job
    from serving.offline.compile_plan import Kind
    from serving.offline.knapsack import Cost

    try:
        settings = OrbitServeConfig.load(config, model=model)
        choice = job.Choice(
            kind=None if kind == "auto" else Kind(kind),
            budget=Cost(
                math.inf if most_bytes is None else library_cli.parse_bytes(most_bytes),
                math.inf if seconds is None else seconds,
            ),
            min_uses=min_uses,
            prefixes=[job.text_of(each) for each in prefix or []],
        )
        good = job.compile_trace(settings, access_log, choice, console, dry_run=dry_run, json_file=json_file)
    except (ConfigError, BadLog, job.CompileTraceError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    if not good:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `orbitserve` command."""
    try:
        app()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            exit_with(ended.code or 0)
        raise
