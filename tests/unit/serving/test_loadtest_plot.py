"""The axes of a benchmark's pictures: numbers stand where they belong, and say what they count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib import figure, pyplot

from serving.loadtest.plot import draw_tables


def drawn(tables: Mapping[str, list[str]], monkeypatch: pytest.MonkeyPatch, axis: str = "") -> list[Any]:
    """The axes of a picture of tables with these columns."""
    found: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: found.extend(self.axes))
    monkeypatch.setattr(pyplot, "close", lambda _: None)
    rows = {name: {"row": dict.fromkeys(columns, 1.0)} for name, columns in tables.items()}
    draw_tables("title", rows, "±", Path("nowhere.png"), axis)
    return found


def ticks(axes: Any) -> dict[float, str]:
    return dict(zip(axes.get_xticks(), (label.get_text() for label in axes.get_xticklabels()), strict=True))


def test_measured_rates_stand_at_their_distance(monkeypatch: pytest.MonkeyPatch):
    (axes,) = drawn({"median ms": ["0.7", "1.39", "5.6"]}, monkeypatch, axis="requests a second")
    assert ticks(axes) == {0.7: "0.7", 1.39: "1.39", 5.6: "5.6"}
    assert (axes.get_xscale(), axes.get_xlabel()) == ("linear", "requests a second")
    assert list(axes.lines[0].get_xdata()) == [0.7, 1.39, 5.6]


def test_numbers_far_apart_go_by_the_logarithm_and_those_from_nothing_do_not(monkeypatch: pytest.MonkeyPatch):
    ranks, layers = drawn({"η by rank": ["1", "8", "64"], "norm by layer": ["0", "1", "40"]}, monkeypatch)
    assert (ranks.get_xscale(), layers.get_xscale()) == ("log", "linear")
    assert (ranks.get_xlabel(), layers.get_xlabel()) == ("rank", "layer")


def test_columns_say_what_they_count(monkeypatch: pytest.MonkeyPatch):
    pages, shares = drawn({"hit rate": ["3 pages", "5 pages"], "η by tokens": ["5%", "10%"]}, monkeypatch, axis="ms")
    assert (pages.get_xlabel(), ticks(pages)) == ("pages", {3: "3", 5: "5"})
    assert (shares.get_xlabel(), ticks(shares)) == ("tokens", {5: "5%", 10: "10%"})


def test_other_columns_stand_side_by_side(monkeypatch: pytest.MonkeyPatch):
    sizes, ranks = drawn({"sizes": ["256 MiB", "1 GiB"], "η by rank": ["1", "64", "full"]}, monkeypatch)
    assert list(ticks(sizes).values()) == ["256 MiB", "1 GiB"]
    assert (list(ticks(ranks).values()), ranks.get_xlabel()) == (["1", "64", "full"], "rank")
