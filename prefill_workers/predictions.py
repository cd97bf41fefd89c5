"""What later requests may bring of a set that was served: parts of it in the order in which they were served, or pairs.

Orbit patches for every order of a large set are out of reach (80 patches and 120 forwards for 5 chunks). They are not
needed where placement chooses orders: what later requests share with this one it puts in the same order, the popular
chunks first. So the parts of a set are compiled in one order each, as own patches; a forward over a part makes those of
all its beginnings. A sliding window, whose oldest chunks fall out, asks for such parts too.

    served a b c d      parts, each one forward: a c d (patches c|a, d|a,c), b c, b d, ...

Which parts: those of the largest value, expected reuses times what each saves, for as many forwards as is allowed.

Where a model's patches are composed (see `composing`), pairs serve sets that never came before, in any order: of 5
chunks there are 20, by as many forwards over two chunks each. So do pairs of chunks that never met: the request's with
others that its tenant asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from operator import attrgetter

_MOST_CHUNKS = 8  # of a request, the most popular ones, whose parts are weighed: 255 at most, or 56 pairs


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


def pairs(shares: Sequence[float], tokens: Sequence[int]) -> list[Part]:
    """The pairs of a request's chunks, each in both orders, the most valuable first."""
    popular = sorted(range(len(shares)), key=lambda i: -shares[i])[:_MOST_CHUNKS]
    return _valued(permutations(sorted(popular), 2), shares, tokens)


def meetings(own: Sequence[int], others: Sequence[int], shares: Sequence[float], tokens: Sequence[int]) -> list[Part]:
    """The pairs of a chunk of a request with one that it did not bring; as `pairs`."""
    crossing = (pair for a, b in product(own, others) for pair in ((a, b), (b, a)))
    return _valued(crossing, shares, tokens)


def _valued(chosen: Iterable[tuple[int, int]], shares: Sequence[float], tokens: Sequence[int]) -> list[Part]:
    """A pair in one order saves its chunks' tokens in half of the requests that ask for both, in whatever set."""
    found = [Part(shares[a] * shares[b] * (tokens[a] + tokens[b]) / 2, (a, b)) for a, b in chosen]
    return sorted(found, key=attrgetter("value"), reverse=True)
