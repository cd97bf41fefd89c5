"""Device times of what is enqueued, by events: a host clock would time launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(eq=False)
class DeviceSpan:
    """Seconds that some work took on the device; None: it has not ended, as far as is known."""

    seconds: float | None = None


class TimedEvent(Protocol):
    """A point in the forward's stream, as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put it behind all that is enqueued."""

    def query(self) -> bool:
        """True if the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds up to another one; both have been passed."""


class DeviceTimer:
    """Times spans of the forward's stream; waits for nothing.

    Args:
        event: makes a new event.
    """

    def __init__(self, event: Callable[[], TimedEvent]) -> None:
        self._event = event
        self._spans: dict[int, tuple[TimedEvent, TimedEvent]] = {}

    @contextmanager
    def span(self, number: int) -> Iterator[None]:
        """Time what is enqueued inside, under a number; nothing of what fails."""
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._spans[number] = begin, end

    def take(self) -> dict[int, float]:
        """Seconds of the spans that the device has passed since the last call, by number."""
        passed = [number for number, (_, end) in self._spans.items() if end.query()]
        ended = [(number, *self._spans.pop(number)) for number in passed]
        return {number: begin.elapsed_time(end) / 1e3 for number, begin, end in ended}
