"""Pages as pictures: a grid of cells, each a thing in colour, or in pencil beside another.

A model's vision tower sees a cell as one token. Drawing is deterministic: the same page is the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from infra.reference.scenes import NOWHERE, Scenes
from infra.reference.vocabulary import COLOURS, LETTERS, SHAPES, THINGS

PENCIL = (150, 150, 150)
BACKGROUND = (255, 255, 255)
_DETAIL = 8  # drawn so many times larger, then scaled down
_POINTS: dict[str, Sequence[tuple[float, float]]] = {
    "square": [(0.08, 0.08), (0.92, 0.08), (0.92, 0.92), (0.08, 0.92)],
    "triangle": [(0.5, 0.05), (0.97, 0.95), (0.03, 0.95)],
    "diamond": [(0.5, 0), (0.95, 0.5), (0.5, 1), (0.05, 0.5)],
    "star": [
        (0.5 + radius * math.sin(turn * math.pi / 5), 0.53 - radius * math.cos(turn * math.pi / 5))
        for turn, radius in enumerate((0.53, 0.21) * 5)
    ],
    "cross": [
        (0.35, 0), (0.65, 0), (0.65, 0.35), (1, 0.35), (1, 0.65), (0.65, 0.65), (0.65, 1), (0.35, 1), (0.35, 0.65),
        (0, 0.65), (0, 0.35), (0.35, 0.35),
    ],
    "arrow": [(0, 0.35), (0.55, 0.35), (0.55, 0.08), (1, 0.5), (0.55, 0.92), (0.55, 0.65), (0, 0.65)],
    "house": [(0.5, 0), (1, 0.45), (0.84, 0.45), (0.84, 1), (0.16, 1), (0.16, 0.45), (0, 0.45)],
    "tree": [(0.5, 0), (0.95, 0.7), (0.6, 0.7), (0.6, 1), (0.4, 1), (0.4, 0.7), (0.05, 0.7)],
    "cup": [(0.05, 0.15), (0.95, 0.15), (0.7, 0.95), (0.3, 0.95)],
    "bell": [(0.5, 0), (0.75, 0.25), (0.8, 0.7), (1, 0.9), (0, 0.9), (0.2, 0.7), (0.25, 0.25)],
}  # fmt: skip


def page_picture(scenes: Scenes, index: int, page: int, cell: int) -> Image.Image:
    """A page of a set as a picture, RGB, `cell` pixels to a cell's side."""
    things, colours, sources = (part[index, page] for part in scenes.cells())
    return grid_picture(things, colours, sources, scenes.form.columns, cell)


def grid_picture(things: Tensor, colours: Tensor, sources: Tensor, columns: int, cell: int) -> Image.Image:
    """Cells, row by row, as a picture."""
    values = zip(things.tolist(), colours.tolist(), sources.tolist(), strict=True)
    drawn = [cell_pixels(thing, colour, source, cell) for thing, colour, source in values]
    rows = np.stack(drawn).reshape(-1, columns, cell, cell, 3)
    return Image.fromarray(rows.transpose(0, 2, 1, 3, 4).reshape(-1, columns * cell, 3))


@lru_cache(maxsize=1 << 14)
def cell_pixels(thing: int, colour: int, source: int, cell: int) -> np.ndarray:
    """One cell, uint8 [cell, cell, 3]: a thing in colour, or in pencil beside `source`."""
    size = cell * _DETAIL
    image = Image.new("RGB", (size, size), BACKGROUND)
    draw = ImageDraw.Draw(image)
    if source == NOWHERE:
        _thing(draw, THINGS[thing], size * 0.07, size * 0.07, size * 0.86, tuple(COLOURS.values())[colour])
    else:
        _thing(draw, THINGS[thing], size * 0.02, size * 0.02, size * 0.58, PENCIL)
        _thing(draw, THINGS[source], size * 0.53, size * 0.53, size * 0.45, (0, 0, 0))
    return np.asarray(image.resize((cell, cell), Image.Resampling.BOX))


Colour = tuple[int, int, int]


def _thing(draw: ImageDraw.ImageDraw, name: str, x: float, y: float, size: float, colour: Colour) -> None:
    if name in LETTERS:
        font = _font(round(size * 1.15))
        draw.text((x + size / 2, y + size / 2), name, font=font, fill=colour, anchor="mm", stroke_width=size * 0.035)
    elif name in SHAPES:
        _shape(draw, name, x, y, size, colour)
    else:
        _PATTERNS[name](draw, x, y, size, colour)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _shape(draw: ImageDraw.ImageDraw, name: str, x: float, y: float, size: float, colour: Colour) -> None:
    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return x + left * size, y + top * size, x + right * size, y + bottom * size

    if name in _POINTS:
        draw.polygon([(x + px * size, y + py * size) for px, py in _POINTS[name]], fill=colour)
    elif name == "circle":
        draw.ellipse(box(0.02, 0.02, 0.98, 0.98), fill=colour)
    elif name == "ring":
        draw.ellipse(box(0.02, 0.02, 0.98, 0.98), outline=colour, width=round(size * 0.2))
    elif name == "heart":
        draw.ellipse(box(0.0, 0.08, 0.54, 0.6), fill=colour)
        draw.ellipse(box(0.46, 0.08, 1.0, 0.6), fill=colour)
        draw.polygon([(x + px * size, y + py * size) for px, py in ((0.04, 0.45), (0.96, 0.45), (0.5, 1))], fill=colour)
    elif name == "moon":
        draw.ellipse(box(0.05, 0.02, 0.95, 0.98), fill=colour)
        draw.ellipse(box(0.38, -0.02, 1.15, 0.8), fill=BACKGROUND)
    elif name == "fish":
        draw.ellipse(box(0.0, 0.22, 0.75, 0.78), fill=colour)
        draw.polygon([(x + px * size, y + py * size) for px, py in ((0.6, 0.5), (1, 0.15), (1, 0.85))], fill=colour)
    elif name == "key":
        draw.ellipse(box(0.0, 0.28, 0.44, 0.72), outline=colour, width=round(size * 0.13))
        draw.rectangle(box(0.4, 0.43, 1.0, 0.57), fill=colour)
        for left in (0.7, 0.86):
            draw.rectangle(box(left, 0.5, left + 0.1, 0.8), fill=colour)


def _bands(vertical: bool, count: int) -> Callable[..., None]:
    def pattern(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
        step = size / (2 * count - 1)
        for band in range(count):
            start, end = 2 * band * step, (2 * band + 1) * step
            draw.rectangle(
                (x + start, y, x + end, y + size) if vertical else (x, y + start, x + size, y + end), fill=colour
            )

    return pattern


def _dots(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    for row in range(3):
        for column in range(3):
            left, top = x + size * (0.05 + 0.34 * column), y + size * (0.05 + 0.34 * row)
            draw.ellipse((left, top, left + size * 0.22, top + size * 0.22), fill=colour)


def _checks(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    step = size / 4
    for index in range(0, 16, 2):
        row, column = divmod(index, 4)
        left, top = x + (column + row % 2) * step, y + row * step
        draw.rectangle((left, top, left + step, top + step), fill=colour)


def _waves(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    for band in range(3):
        points = [
            (x + size * i / 24, y + size * (0.17 + 0.33 * band + 0.11 * math.sin(i * math.pi / 4))) for i in range(25)
        ]
        draw.line(points, fill=colour, width=round(size * 0.1))


def _bricks(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    height = size / 3
    for row in range(3):
        edges = (0.0, 0.5, 1.0) if row % 2 == 0 else (0.0, 0.25, 0.75, 1.0)
        for left, right in pairwise(edges):
            box = (x + left * size + 0.04 * size, y + row * height, x + right * size, y + (row + 0.82) * height)
            draw.rectangle(box, fill=colour)


def _rays(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    centre = (x + size / 2, y + size / 2)
    for turn in range(8):
        angle = turn * math.pi / 4
        end = (centre[0] + size / 2 * math.cos(angle), centre[1] + size / 2 * math.sin(angle))
        draw.line([centre, end], fill=colour, width=round(size * 0.08))


def _grid(draw: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour) -> None:
    width = size * 0.09
    for line in range(4):
        offset = line * (size - width) / 3
        draw.rectangle((x + offset, y, x + offset + width, y + size), fill=colour)
        draw.rectangle((x, y + offset, x + size, y + offset + width), fill=colour)


_PATTERNS: dict[str, Callable[..., None]] = {
    "stripes": _bands(vertical=False, count=4),
    "dots": _dots,
    "checks": _checks,
    "waves": _waves,
    "bars": _bands(vertical=True, count=3),
    "bricks": _bricks,
    "rays": _rays,
    "grid": _grid,
}
