"""Picture of simulated policies: load, replicas and attainment over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoscale.simulator import Result


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a PNG, or an SVG where the path ends so; one colour a policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    for number, result in enumerate(results):
        series, colour = result.timeline, f"C{number}"
        hours = [at / 3600 for at in series["at"]]
        share = f"{result.attainment:.1%}, {result.total_replica_seconds / 3600:.1f} h"
        grid[1].step(hours, series["prefill"], color=colour, where="post", label=f"{result.policy} ({share})")
        grid[1].step(hours, series["decode"], color=colour, where="post", linestyle=":")
        grid[2].plot(hours, series["attainment"][: len(hours)], color=colour)
    series = results[0].timeline
    hours = [at / 3600 for at in series["at"]]
    grid[0].plot(hours, series["prefill_load"], color="black", label="prefill")
    grid[0].plot(hours, series["decode_load"], color="black", linestyle=":", label="decode")
    names = ("load, replicas' worth", "replicas: prefill, decode (dotted)", "good answers")
    for axes, name in zip(grid, names, strict=True):
        axes.set_ylabel(name)
        axes.grid(visible=True, alpha=0.3)
    grid[0].legend(fontsize="small")
    grid[1].legend(fontsize="small", framealpha=0.5)
    grid[2].set_xlabel("hours")
    figure.suptitle(title)
    figure.savefig(path, format="svg" if path.suffix == ".svg" else "png", dpi=100)
    pyplot.close(figure)
