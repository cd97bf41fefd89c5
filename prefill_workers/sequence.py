"""Token runs, and the sequence whose KV is being put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start` up to `stop` of a sequence, to be computed."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the placeholder tokens that begin at `start`."""

    start: int
    embeddings: Tensor  # [tokens, hidden]
    mask: Tensor | None = None  # [placeholder tokens] bool: which of them carry an embedding; None = all


@dataclass(eq=False)
class LinkSequence:
    """Sequence whose KV is being put together in `blocks`.

    `positions` are already shifted so that the last token's position equals its index. RoPE is relative: so an engine
    that knows nothing of images, and counts positions by index, goes on from this KV as the model would.
    """

    token_ids: Tensor  # [n] int32
    positions: Tensor  # [n] or [3, n] int64
    blocks: Sequence[int]
    embedded: Sequence[Embedded] = field(default_factory=tuple)

    def __len__(self) -> int:
        return len(self.token_ids)

    def embedding_rows(self, index: Tensor) -> tuple[Tensor | None, Tensor]:
        """Embeddings of the tokens at `index` (ascending) that carry one.

        Returns them, and the mask over `index` that says which tokens these are.
        """
        mask = torch.zeros(len(index), dtype=torch.bool)
        rows: list[Tensor] = []
        for item in self.embedded:
            count = len(item.embeddings) if item.mask is None else len(item.mask)
            inside = (index >= item.start) & (index < item.start + count)
            local = index[inside] - item.start
            if item.mask is None:
                mask |= inside
            else:
                carries = item.mask[local]
                mask[inside] = carries
                local = (item.mask.long().cumsum(0) - 1)[local[carries]]
            rows.append(item.embeddings[local])
        return (torch.cat(rows) if rows and bool(mask.any()) else None), mask


def complement(runs: Sequence[Run], stop: int, start: int = 0) -> list[Run]:
    """Runs between `runs` (in order, disjoint), within the tokens `start` up to `stop`."""
    edges = [start, *(edge for run in runs for edge in (run.start, run.stop)), stop]
    return merge_runs([Run(a, b) for a, b in list(pairwise(edges))[::2]])


def split_runs(runs: Sequence[Run], budget: int) -> tuple[list[Run], list[Run]]:
    """Cut `runs` after `budget` tokens: those of this forward, and those of a later one.

    Tokens only attend to earlier tokens of their sequence, so any cut in sequence order is exact.
    """
    now: list[Run] = []
    for i, run in enumerate(runs):
        if budget <= 0:
            return now, list(runs[i:])
        if len(run) > budget:
            cut = run.start + budget
            return [*now, Run(run.start, cut)], [Run(cut, run.stop), *runs[i + 1 :]]
        now.append(run)
        budget -= len(run)
    return now, []


Work = Sequence[tuple[LinkSequence, Sequence[Run]]]  # sequences, and what is to be computed of each


def split_work(
    work: Work, budget: int
) -> tuple[list[tuple[LinkSequence, list[Run]]], list[tuple[LinkSequence, list[Run]]]]:
    """Work of one forward of up to `budget` tokens, and what is left for later ones."""
    now, later = [], []
    for sequence, runs in work:
        taken, rest = split_runs(runs, budget)
        budget -= sum(map(len, taken))
        if taken:
            now.append((sequence, taken))
        if rest:
            later.append((sequence, rest))
    return now, later


def forwards(work: Work, budget: int) -> Iterator[list[tuple[LinkSequence, list[Run]]]]:
    """Work of one forward after another, of up to `budget` tokens each, over several sequences."""
    pending = [(sequence, list(runs)) for sequence, runs in work if runs]
    while pending:
        now, pending = split_work(pending, budget)
        yield now


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """Join runs that touch: fewer rows, same tokens. Runs must be in order and disjoint."""
    for left, right in pairwise(runs):
        if left.stop > right.start:
            raise ValueError(f"runs overlap: {left} and {right}")
    merged: list[Run] = []
    for run in runs:
        if not len(run):
            continue
        if merged and merged[-1].stop == run.start:
            merged[-1] = Run(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return merged


def union(runs: Sequence[Run]) -> list[Run]:
    """Runs, in any order and overlapping as they like, as disjoint ones in order."""
    joined: list[Run] = []
    for run in sorted((run for run in runs if len(run)), key=lambda run: run.start):
        if joined and run.start <= joined[-1].stop:
            joined[-1] = Run(joined[-1].start, max(joined[-1].stop, run.stop))
        else:
            joined.append(run)
    return joined
