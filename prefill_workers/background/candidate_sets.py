"""Candidate sets: prefix subsets and pairs of a served set that later requests may bring.

Orbit patches for every order of a large set are out of reach (80 patches and 120 forwards for 5 chunks). They are not
needed where placement chooses orders: what later requests share with this one it puts in the same order, the popular
chunks first. So the subsets of a set are compiled in one order each, as own patches; a forward over a subset makes the
patches of all its prefixes. A sliding window, whose oldest chunks fall out, asks for such subsets too.

    served a b c d      prefix subsets, each one forward: a c d (patches c|a, d|a,c), b c, b d, ...

Which subsets: those of the largest value, expected reuses times what each saves, for as many forwards as is allowed.

Where a model's patches are composed (see `prefill_workers.link.compose`), pairs serve sets that never came before, in
any order: of 5 chunks there are 20. So do cross-request pairs: the request's chunks with others that its tenant asks
for. Those behind the same chunk are compiled in one batch, so that this one is computed once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from operator import attrgetter

_MOST_CHUNKS = 8  # of a request, the most popular ones, whose subsets are weighed: 255 at most, or 56 pairs
_BEHIND = 4  # chunks at most that are compiled together behind another one


@dataclass(frozen=True)
class PrefixSubset:
    """Some chunks of a request, by index, in its order.

    `value`: tokens that a later request is expected to save.
    """

    value: float
    chunks: tuple[int, ...]


def prefix_subsets(shares: Sequence[float], tokens: Sequence[int]) -> list[PrefixSubset]:
    """The prefix subsets of a request's set, the most valuable first.

    A subset's patches are those of its prefixes, each worth its last chunk's tokens wherever all of its chunks are
    asked for: independent draws, by the `shares` of a tenant's requests that bring each chunk.
    """
    popular = sorted(range(len(shares)), key=lambda i: -shares[i])[:_MOST_CHUNKS]
    order = sorted(popular)
    found: list[PrefixSubset] = []

    def longer(start: tuple[int, ...], likely: float, value: float, rest: int) -> None:
        for place in range(rest, len(order)):
            chunk = order[place]
            both = likely * shares[chunk]
            worth = value + both * tokens[chunk]
            found.append(PrefixSubset(worth, (*start, chunk)))
            longer((*start, chunk), both, worth, place + 1)

    longer((), 1.0, 0.0, 0)
    return sorted(found, key=attrgetter("value"), reverse=True)


@dataclass(frozen=True)
class PairBatch:
    """Pairs with the same first chunk, by index: that one, and those behind it, each by itself.

    `value`: tokens that a later request is expected to save, per token that compiling takes.
    """

    value: float
    chunks: tuple[int, ...]


def pair_batches(shares: Sequence[float], tokens: Sequence[int], limit: int) -> list[PairBatch]:
    """The pairs of a request's chunks, each in both orders, the most valuable first.

    But those of as many popular chunks first as have no more than `limit` pairs: a sum needs all pairs of its set.
    """
    popular = sorted(range(len(shares)), key=lambda i: -shares[i])[:_MOST_CHUNKS]
    size = (1 + math.isqrt(1 + 4 * limit)) // 2  # the most whose pairs, size * (size - 1), are within the limit
    first = set(permutations(popular[:size], 2))
    others = (pair for pair in permutations(popular, 2) if pair not in first)
    return [*_batches(sorted(first), shares, tokens), *_batches(sorted(others), shares, tokens)]


def cross_request_pairs(
    own: Sequence[int], others: Sequence[int], shares: Sequence[float], tokens: Sequence[int]
) -> list[PairBatch]:
    """Pairs of a chunk of a request with one that it did not bring; as `pair_batches`."""
    return _batches((pair for a in own for b in others for pair in ((a, b), (b, a))), shares, tokens)


def pair_value(first: int, second: int, shares: Sequence[float], tokens: Sequence[int]) -> float:
    """Tokens that a pair in one order saves a later request.

    Its chunks' tokens, in half of the requests that ask for both, in whatever set.
    """
    return shares[first] * shares[second] * (tokens[first] + tokens[second]) / 2


def _batches(chosen: Iterable[tuple[int, int]], shares: Sequence[float], tokens: Sequence[int]) -> list[PairBatch]:
    behind: dict[int, list[int]] = {}
    for first, second in chosen:
        behind.setdefault(first, []).append(second)
    found = []
    for first, seconds in behind.items():
        best = sorted(seconds, key=lambda i: -pair_value(first, i, shares, tokens))
        for begin in range(0, len(best), _BEHIND):
            some = best[begin : begin + _BEHIND]
            saved = sum(pair_value(first, second, shares, tokens) for second in some)
            found.append(PairBatch(saved / (tokens[first] + sum(tokens[i] for i in some)), (first, *some)))
    return sorted(found, key=attrgetter("value"), reverse=True)
