"""Bounds on all images, documents and clips of a request together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from serving.api.errors import TooLarge
from serving.frontend.errors import InvalidRequest


class RequestBudget:
    """Bound on something of one request's images or documents, such as pixels. Thread-safe.

    `most`: None bounds nothing; `of`: "images have {} pixels"; `refusal`: the error by its message and place.
    """

    def __init__(self, most: int | None, of: str, refusal: Callable[[str, str], Exception]) -> None:
        self._most, self._of, self._refusal = most, of, refusal
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, count: int, where: str) -> None:
        """Take a part; raises the refusal if that is more than is left."""
        with self._lock:
            self._taken += count
            if self._most is not None and self._taken > self._most:
                of = self._of.format(f"more than {self._most}")
                raise self._refusal(f"{where}: up to here the request's {of} in all", where)

    def fits(self, count: int) -> bool:
        """Take a part if that is no more than is left, else nothing."""
        with self._lock:
            fits = self._most is None or self._taken + count <= self._most
            self._taken += count if fits else 0
            return fits


def too_large(message: str, where: str) -> TooLarge:
    """The refusal of what is too large, wherever it is."""
    return TooLarge(message)


def invalid(message: str, where: str) -> InvalidRequest:
    """The refusal that names the place."""
    return InvalidRequest(message, parameter=where)


@dataclass(frozen=True)
class ImageBudgets:
    """Bounds on all images of a request together."""

    pixels: RequestBudget
    tokens: RequestBudget
    clips: RequestBudget  # pixels of sampled frames
    ahead: RequestBudget  # those of them that are decoded before there is memory for all
