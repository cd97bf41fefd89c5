"""The command that runs a benchmark by name and reports it."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from serving.output_files import unwritable

if TYPE_CHECKING:
    from serving.bench.harness import Benchmark

console = Console(soft_wrap=True)


def bench_command(program: str, catalogue: str) -> Callable[..., None]:
    """Typer command over the `BENCHMARKS` of module `catalogue`; reports call it `program`."""

    def bench(
        name: Annotated[str, typer.Argument(help="Benchmark to run; `list` describes them.")] = "list",
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
        markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
        plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw medians or tables here, as PNG.")] = None,
        model: Annotated[
            Path | None,
            typer.Option(help="Checkpoint to measure, for benchmarks that take one; default: a bundled one."),
        ] = None,
        items: Annotated[
            int | None,
            typer.Option(min=1, help="Items to measure, for benchmarks that ask questions; default: theirs."),
        ] = None,
        work: Annotated[
            Path | None,
            typer.Option(help="Keep finished parts here and go on from them, in a benchmark that takes hours."),
        ] = None,
        only: Annotated[
            list[str] | None,
            typer.Option(help="Measure this section of a benchmark that has some; can be given again."),
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Within a minute: few turns, small cases.")] = False,
    ) -> None:
        """Measure, both arms of a comparison in one session, and say which targets were met."""
        from serving.bench import harness
        from serving.loadtest.records import write

        benchmarks: Mapping[str, Benchmark] = importlib.import_module(catalogue).BENCHMARKS
        if name == "list":
            for benchmark in benchmarks.values():
                console.print(f"[bold]{benchmark.name}[/bold]  {benchmark.description}")
            return
        if name not in benchmarks:
            console.print(f"[red]error:[/red] no benchmark {name!r}; there are {', '.join(benchmarks)}")
            raise typer.Exit(2)
        benchmark = benchmarks[name]
        given = {"model": model, "items": items, "work": work, "only": only}
        problem = _misuse(benchmark, model, items, work, only or ()) or unwritable(json_file, markdown_file, plot_file)
        if problem is not None:
            console.print(f"[red]error:[/red] {problem}")
            raise typer.Exit(2)
        outcome = benchmark.run(
            quick, console, **{key: given[key] for key in given if getattr(benchmark, f"takes_{key}")}
        )
        document = harness.report(benchmark, outcome, shlex.join([*program.split(), *sys.argv[1:]]), quick)
        harness.show(benchmark, document, console)
        if json_file is not None:
            write(document, json_file)
        if markdown_file is not None:
            markdown_file.write_text(harness.markdown(document))
        if plot_file is not None:
            harness.plot(document, plot_file)

    return bench


def _misuse(
    benchmark: Benchmark, model: Path | None, items: int | None, work: Path | None, only: Sequence[str]
) -> str | None:
    """Message about an option that a benchmark does not take."""
    name = benchmark.name
    if model is not None and not benchmark.takes_model:
        return f"benchmark {name} measures a bundled model; it takes no --model"
    if model is not None and not (model / "config.json").exists():
        return f"{model} holds no config.json; is it a checkpoint?"
    if model is not None and benchmark.folders and model.name not in benchmark.folders:
        return (
            f"benchmark {name} asks what reference models were trained for, and {model} is none: "
            f"its folder would be called {' or '.join(benchmark.folders)}"
        )
    if items is not None and not benchmark.takes_items:
        return f"benchmark {name} has no items to choose the number of"
    if work is not None and not benchmark.takes_work:
        return f"benchmark {name} has no parts to keep; it takes no --work"
    if unknown := sorted(set(only) - set(benchmark.takes_only)):
        there = f"there are {', '.join(benchmark.takes_only)}" if benchmark.takes_only else "it takes no --only"
        return f"benchmark {name} has no section {', '.join(unknown)}; {there}"
    return None
