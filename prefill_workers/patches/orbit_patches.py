"""Orbit patches: one per chunk and predecessor *set*, from the mean deficit over orderings.

A request that brings chunks 1-2-3 forms own patches for that order. While the engine is idle the worker also runs the
other orders of the same chunks, behind the prompt's opening alone, and averages each chunk's deficit over the orders of
each set of predecessors (kamera.md §5, "Reorder"). The next request may bring them as 3-1-2 and needs no forward.

Up to four predecessors all orders are run, K! forwards for K chunks, and every set gets its patch. Beyond, every chunk
is run last behind 24 sampled orders of all others, 24·K forwards: the whole set gets orbit patches, nearly all pairs
get pair patches, and what lies between is left to be composed. `PrefillSettings.orbit_chunks` bounds K.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore.operator.patch import ORBIT_ORDERINGS, orderings
from prefill_workers.sequence import Embedded, LinkSequence


@dataclass(frozen=True)
class OrbitChunk:
    """A chunk as it enters background sequences: tokens, positions from 0, embeddings.

    `needs_embeddings`: it cannot be computed without; they may be left to be looked up.
    """

    key: str  # canonical key
    content: str
    token_ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] or [3, tokens], from 0
    embeddings: Tensor | None  # [placeholders that carry one, hidden]
    first: int  # first placeholder, counted from the chunk's start
    mask: Tensor | None = None
    needs_embeddings: bool = False

    @property
    def span(self) -> int:
        """Positions the chunk takes."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class Placed:
    """Position of a chunk in an arrangement: index and position of its first token."""

    chunk: OrbitChunk
    start: int
    position: int


def arrange(
    opening: Sequence[int], order: Sequence[OrbitChunk], blocks: Sequence[int]
) -> tuple[LinkSequence, list[Placed]]:
    """A prompt's opening and the chunks in this order, back to back, as a sequence in `blocks`."""
    flat = torch.arange(len(opening))
    positions = [flat if order[0].positions.dim() == 1 else flat.expand(3, -1)]
    ids, placed, embedded = [torch.tensor(list(opening), dtype=torch.int32)], [], []
    index = position = len(opening)
    for chunk in order:
        placed.append(Placed(chunk, index, position))
        ids.append(chunk.token_ids)
        positions.append(chunk.positions + position)
        if chunk.embeddings is not None:
            embedded.append(Embedded(index + chunk.first, chunk.embeddings, chunk.mask))
        index += len(chunk.token_ids)
        position += chunk.span
    return LinkSequence(torch.cat(ids), torch.cat(positions, dim=-1), blocks, tuple(embedded)), placed


@dataclass
class _Mean:
    """A mean deficit on its way: the sum so far and the orders in it."""

    total: Tensor
    seen: set[tuple[str, ...]]


@dataclass
class OrbitForming:
    """A set of chunks in progress: orders still to run, and deficits summed so far.

    Its patches are keyed by the fixed prefix and formed behind `opening`, what requests have before their chunks.
    """

    prefix: tuple[int, ...]
    chunks: tuple[OrbitChunk, ...]
    tenant: str
    opening: tuple[int, ...]
    orders: Iterator[tuple[OrbitChunk, ...]] = field(init=False)
    _means: dict[tuple[str, frozenset[str]], _Mean] = field(default_factory=dict)
    _done: set[tuple[str, frozenset[str]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.orders = self._orders()

    def _orders(self) -> Iterator[tuple[OrbitChunk, ...]]:
        """Grouped by the last chunk, so that few means are under way at a time."""
        for place, last in enumerate(self.chunks):
            others = [chunk for chunk in self.chunks if chunk is not last]
            for order in orderings(others, seed=place):
                yield (*order, last)

    @property
    def tokens(self) -> int:
        """Length of every arrangement."""
        return len(self.opening) + sum(len(chunk.token_ids) for chunk in self.chunks)

    def wants(self, key: str, before: Sequence[str]) -> bool:
        """True if the deficit of chunk `key` behind `before`, in order, is missing from a mean."""
        others, place = len(self.chunks) - 1, (key, frozenset(before))
        if math.factorial(others) > ORBIT_ORDERINGS and 1 < len(before) < others:
            return False  # sampled orders do not cover the sets in between
        return place not in self._done and (place not in self._means or tuple(before) not in self._means[place].seen)

    def add(self, key: str, before: Sequence[str], delta: Tensor) -> Tensor | None:
        """Take one order's deficit [layers, tokens, features]; returns the mean once it is complete.

        A causal model gives the same deficit whatever follows, so every order of the predecessors counts once.
        """
        place = key, frozenset(before)
        mean = self._means.get(place)
        if mean is None:
            mean = self._means[place] = _Mean(delta, {tuple(before)})
        else:
            mean.total.add_(delta)
            mean.seen.add(tuple(before))
        if len(mean.seen) < min(math.factorial(len(before)), ORBIT_ORDERINGS):
            return None
        del self._means[place]
        self._done.add(place)
        return mean.total.div_(len(mean.seen))
