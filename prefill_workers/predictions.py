"""Which sets later requests may bring: parts of those that were served, in the order in which they were served.

Orbit patches for every order of a large set are out of reach (80 patches and 120 forwards for 5 chunks). They are not
needed where placement chooses orders: what later requests share with this one it puts in the same order, the popular
chunks first. So the parts of a set are compiled in one order each, as own patches; a forward over a part makes those of
all its beginnings. A sliding window, whose oldest chunks fall out, asks for such parts too.

    served a b c d      parts, each one forward: a c d (patches c|a, d|a,c), b c, b d, ...

Which parts: those of the largest value, expected reuses times what each saves, for as many forwards as is allowed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

_MOST_CHUNKS = 8  # of a request, the most popular ones, whose parts are weighed: 255 at most

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Some chunks of a request, by index, in its order. `value`: tokens that a later request is expected to save."""

    value: float
    chunks: tuple[int, ...]


def parts(shares: Sequence[float], tokens: Sequence[int]) -> list[Part]:
    """The parts of a request's set, the most valuable first.

    A part's patches are those of its beginnings, each worth its last chunk's tokens wherever all of its chunks are
    asked for: independent draws, by the `shares` of a tenant's requests that bring each chunk.
    """
    popular = sorted(range(len(shares)), key=lambda i: -shares[i])[:_MOST_CHUNKS]
    order = sorted(popular)
    found: list[Part] = []

    def longer(start: tuple[int, ...], likely: float, value: float, rest: int) -> None:
        for place in range(rest, len(order)):
            chunk = order[place]
            both = likely * shares[chunk]
            worth = value + both * tokens[chunk]
            found.append(Part(worth, (*start, chunk)))
            longer((*start, chunk), both, worth, place + 1)

    longer((), 1.0, 0.0, 0)
    return sorted(found, key=attrgetter("value"), reverse=True)


class PartsQueue(Generic[Item]):
    """Requests whose parts wait for idle time, at most `limit`: the one with the least valuable part gives way."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[float, int, Item, list[Part]]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Item, found: list[Part]) -> None:
        """A request's item and its parts, the most valuable first."""
        if found:
            self._added += 1
            insort(self._waiting, (found[0].value, self._added, item, found))
            del self._waiting[: -self._limit]

    def pop(self) -> tuple[Item, list[Part]]:
        """The request with the most valuable part. Raises IndexError if none waits."""
        _, _, item, found = self._waiting.pop()
        return item, found
