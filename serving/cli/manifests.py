"""`orbitserve manifests`: Kubernetes manifests of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

console = Console(soft_wrap=True, stderr=True)


def manifests(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="YAML of an OrbitServeConfig, as the pods will have it.")
    ],
    name: Annotated[str, typer.Option(help="Name of the RayService.")] = "orbitserve",
    image: Annotated[str, typer.Option(help="Container image; see infra/Containerfile.")] = "orbitserve:latest",
    gpus: Annotated[bool, typer.Option("--gpus/--cpus", help="For vLLM's CUDA build, or for its CPU build.")] = True,
    engine_cpus: Annotated[int, typer.Option(min=1, help="Processors of a pod with an engine.")] = 8,
    engine_memory_gib: Annotated[int, typer.Option(min=1, help="Memory of a pod with an engine, in GiB.")] = 32,
) -> None:
    """Print Kubernetes manifests: a KubeRay RayService and what belongs to it."""
    from serving.config import ConfigError
    from serving.deploy.manifests import ManifestOptions, as_yaml, read, render, warnings

    try:
        settings = read(config)
        found = render(settings, ManifestOptions(name, image, gpus, engine_cpus, engine_memory_gib))
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(1) from None
    for warning in warnings(settings):
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    typer.echo(as_yaml(found), nl=False)
