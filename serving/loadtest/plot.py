"""Pictures of a report's tables: curves over numeric columns, coloured numbers elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

_MOST_CURVES = 8
_SPREAD = 100.0  # of the largest over the smallest: from here on colours go by the logarithm
_LINEAR = 8.5  # of the largest over the smallest: so far an axis is linear; `rates` spans 8, rounded
_MOST_TICKS = 12
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(%?) ?([a-z ]*)")
Rows = Mapping[str, Mapping[str, float]]


def draw_tables(title: str, tables: Mapping[str, Rows], uncertainty: str, path: Path, axis: str = "") -> None:
    """One PNG with a picture of each table, three abreast; `uncertainty` columns left out.

    `axis`: what columns count that are numbers, where neither they ("3 pages") nor the table ("η by rank") say it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = {
        name: {row: {c: v for c, v in cells.items() if not c.endswith(uncertainty)} for row, cells in rows.items()}
        for name, rows in tables.items()
    }
    across = min(len(shown), 3)
    heights = [_height(rows) for rows in shown.values()]
    bands = [max(heights[i : i + across]) for i in range(0, len(heights), across)]
    figure, grid = pyplot.subplots(
        len(bands), across, figsize=(8 * across, sum(bands)), height_ratios=bands, layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(shown) :]:
        axes.remove()
    curves = dict.fromkeys(row for rows in shown.values() if _are_curves(rows) for row in rows)
    colours = {row: f"C{i}" for i, row in enumerate(curves)}  # the same in all pictures
    for axes, (name, rows) in zip(grid.flat, shown.items(), strict=False):
        if _are_curves(rows):
            _curves(axes, rows, colours, name.rpartition(" by ")[2] if " by " in name else axis)
        else:
            _numbers(axes, rows)
        axes.set_title(name, fontsize="large")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=150 if len(shown) == 1 else 70)
    pyplot.close(figure)


def _columns(rows: Rows) -> list[str]:
    longest = max(rows.values(), key=len)
    return list(dict.fromkeys([*longest, *(column for cells in rows.values() for column in cells)]))


def _are_curves(rows: Rows) -> bool:
    columns = _columns(rows)
    return len(columns) > 1 and columns[0][:1].isdigit() and len(rows) <= _MOST_CURVES


def _height(rows: Rows) -> float:
    """Inches."""
    return 4.5 if _are_curves(rows) else max(1.6 + 0.27 * len(rows), 2.5)


def number_axis(axes: Any, numbers: Mapping[float, str]) -> None:
    """Label an x axis with these numbers; logarithmic where they are far apart."""
    low, high = min(numbers), max(numbers)
    if low > 0 and high > _LINEAR * low:
        axes.set_xscale("log")
    if len(numbers) <= _MOST_TICKS:
        axes.set_xticks(list(numbers), list(numbers.values()))
        axes.set_xticks([], minor=True)


def _numbers_of(columns: Iterable[str]) -> tuple[dict[str, float], dict[float, str], str] | None:
    """Columns as numbers, their labels, and their common quantity; None if they have none."""
    found = {column: _NUMBER.fullmatch(column) for column in columns}
    matches = [match for match in found.values() if match]
    units = {match[3] for match in matches}
    if len(matches) < len(found) or len(units) > 1:
        return None
    at = {column: float(match[1]) for column, match in zip(found, matches, strict=True)}
    return at, {float(match[1]): match[1] + match[2] for match in matches}, units.pop()


def _curves(axes: Any, rows: Rows, colours: Mapping[str, str], axis: str) -> None:
    numbers = _numbers_of(_columns(rows))
    for name, points in rows.items():
        at = [numbers[0][column] for column in points] if numbers else list(points)
        axes.plot(at, list(points.values()), marker="o", label=name, color=colours[name])
    if numbers:
        number_axis(axes, numbers[1])
        axis = numbers[2] or axis
    axes.set_xlabel(axis)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", framealpha=0.5)


def _numbers(axes: Any, rows: Rows) -> None:
    from matplotlib.colors import LogNorm, Normalize

    columns = _columns(rows)
    values = np.array([[cells.get(column, nan) for column in columns] for cells in rows.values()])
    known = values[np.isfinite(values)]
    low, high = np.quantile(known, (0.05, 0.95)) if known.size else (0.0, 1.0)  # colours are not an outlier's
    positive = known[known > 0]
    spread = positive.size and known.min() >= 0 and known.max() / positive.min() > _SPREAD
    norm = LogNorm(positive.min(), known.max(), clip=True) if spread else Normalize(low - 1e-9, high, clip=True)
    image = axes.imshow(values, norm=norm, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            axes.text(x, y, f"{value:.3g}", ha="center", va="center", color="white" if dark else "black", fontsize=9)
    axes.set_xticks(range(len(columns)), columns, rotation=0 if len(columns) <= 7 else 30)
    axes.set_yticks(range(len(rows)), list(rows))
