"""A run as it goes: a live table in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from serving.loadtest.client import REJECTED, Tally
from serving.loadtest.measures import median_ttft_ms

LINE_SECONDS = 5.0
_COLUMNS = ("rate", "due", "sent", "in flight", "done", "429", "errors", "TTFT p50, ms")


@contextmanager
def watching(console: Console, title: str, tally: Tally) -> Iterator[None]:
    """Show `tally` while the block runs, and its end as a line."""
    if console.is_terminal:
        with Live(console=console, get_renderable=lambda: _table(title, tally), refresh_per_second=4, transient=True):
            yield
    else:
        with _lines(console, title, tally):
            yield
    console.print(line(title, tally), highlight=False)


@contextmanager
def _lines(console: Console, title: str, tally: Tally) -> Iterator[None]:
    ended = threading.Event()

    def body() -> None:
        while not ended.wait(LINE_SECONDS):
            console.print(line(title, tally), highlight=False)

    thread = threading.Thread(target=body, name="loadtest-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def line(title: str, tally: Tally) -> str:
    """The tally in one line."""
    names = _COLUMNS[1:]
    return f"  {title}: " + ", ".join(f"{value} {name}" for name, value in zip(names, _cells(tally), strict=True))


def _table(title: str, tally: Tally) -> Table:
    table = Table(*_COLUMNS)
    table.add_row(title, *_cells(tally))
    return table


def _cells(tally: Tally) -> list[str]:
    samples = list(tally.samples)
    states = Counter(sample.status for sample in samples if not sample.is_ok)
    rejected = states.pop(REJECTED, 0)
    median = median_ttft_ms(samples)
    shown = f"{median:.0f}" if median < float("inf") else "-"
    counts = (tally.planned, tally.sent, tally.in_flight, len(samples), rejected, states.total())
    return [*map(str, counts), shown]
