"""Orbit patches: one patch per chunk and predecessor *set*, from the mean deficit over the set's orderings.

A request that brings chunks 1-2-3 forms own patches for that order. While the engine is idle the worker also runs the
other orders of the same chunks, behind the fixed prefix alone, and averages each chunk's deficit over all orders of
each set of predecessors (kamera.md §5, "Reorder"). The next request may bring them as 3-1-2 and needs no forward.

K chunks cost K! background forwards, so this is for small sets; `PrefillSettings.orbit_chunks` bounds K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from prefill_workers.sequence import Embedded, LinkSequence


@dataclass(frozen=True)
class OrbitChunk:
    """A chunk as it enters background sequences: tokens, positions from 0, embeddings."""

    key: str  # canonical key
    content: str
    token_ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] or [3, tokens], from 0
    embeddings: Tensor | None  # [placeholders that carry one, hidden]; None: a text chunk
    first: int  # first placeholder, counted from the chunk's start
    mask: Tensor | None = None

    @property
    def span(self) -> int:
        """Positions the chunk takes."""
        return int(self.positions.max()) + 1


@dataclass(frozen=True)
class Placed:
    """Where a chunk of an arrangement begins: index of its first token, and that token's position."""

    chunk: OrbitChunk
    start: int
    position: int


def arrange(
    prefix: Sequence[int], order: Sequence[OrbitChunk], blocks: Sequence[int]
) -> tuple[LinkSequence, list[Placed]]:
    """The fixed prefix and the chunks in this order, back to back, as one sequence in `blocks`."""
    flat = torch.arange(len(prefix))
    positions = [flat if order[0].positions.dim() == 1 else flat.expand(3, -1)]
    ids, placed, embedded = [torch.tensor(list(prefix), dtype=torch.int32)], [], []
    index = position = len(prefix)
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
class OrbitForming:
    """One set of chunks on its way to orbit patches: which orders are still to run, and the deficits summed so far."""

    prefix: tuple[int, ...]
    chunks: tuple[OrbitChunk, ...]
    tenant: str
    orders: Iterator[tuple[OrbitChunk, ...]] = field(init=False)
    _sums: dict[tuple[str, frozenset[str]], tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.orders = iter(permutations(self.chunks))

    @property
    def tokens(self) -> int:
        """Length of every arrangement."""
        return len(self.prefix) + sum(len(chunk.token_ids) for chunk in self.chunks)

    def add(self, key: str, predecessors: frozenset[str], delta: Tensor) -> None:
        """Take one order's deficit [layers, tokens, features] of chunk `key` behind `predecessors`."""
        total, count = self._sums.get((key, predecessors), (None, 0))
        self._sums[key, predecessors] = (delta if total is None else total.add_(delta), count + 1)

    def means(self) -> Mapping[tuple[str, frozenset[str]], Tensor]:
        """Mean deficit of every chunk behind every set of the others."""
        return {place: total / count for place, (total, count) in self._sums.items()}
