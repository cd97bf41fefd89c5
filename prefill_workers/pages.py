"""How a block of the KV cache keeps its tokens, and reading them out of it.

Attention kernels lay a block out as they like: the CPU's, for one, interleaves pairs of features in keys and pairs of
tokens in values, as its matrix instructions want them. That is regular, so blocks are read as strided views of what
lies in them, which takes a third of the time of picking single numbers. A layout that is not regular is picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """The numbers Σ digit · stride, as digits of these sizes count up in mixed radix, the last one fastest."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def like(cls, numbers: Tensor) -> Grid:
        """The only grid that can hold `numbers` [n] less the first of them; whether it does is for `numbers` to say."""
        sizes, strides = [], []
        while len(numbers) > 1:
            steps = numbers.diff()
            sizes.append(1 + int((steps == steps[0]).int().cumprod(0).sum()))
            strides.append(int(steps[0]))
            numbers = numbers[:: sizes[-1]]
        return cls(tuple(reversed(sizes)), tuple(reversed(strides)))

    def numbers(self) -> Tensor:
        """[n]; the first is 0."""
        numbers = torch.zeros(1, dtype=torch.long)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            numbers = (numbers[:, None] + torch.arange(size) * stride).flatten()
        return numbers


@dataclass(frozen=True)
class Pages:
    """Where a block keeps its tokens' features.

    Args:
        elements: [block_size, features], the element of a block that holds feature f of token t; on the cache's device.
        parts: features from, to, and the grids of their tokens and of themselves, where these describe them.
    """

    elements: Tensor
    parts: Sequence[tuple[int, int, tuple[Grid, Grid] | None]]

    @classmethod
    def of(cls, elements: Tensor, widths: Sequence[int], device: torch.device) -> Pages:
        """Of `elements` [block_size, features], whose segments are so many features wide."""
        parts = []
        for start, stop in pairwise(accumulate(widths, initial=0)):
            mine = elements[:, start:stop]
            grids = Grid.like(mine[:, 0]), Grid.like(mine[0])
            tokens, features = (grid.numbers() for grid in grids)
            regular = len(tokens) == len(mine) and len(features) == stop - start
            regular = regular and torch.equal(mine[0, 0] + tokens[:, None] + features, mine)
            parts.append((start, stop, grids if regular else None))
        return cls(elements.to(device), parts)

    def read(self, blocks: Tensor, out: Tensor) -> None:
        """Copy what lies in `blocks` [n, elements], contiguous, to `out` [n, block_size, features], contiguous."""
        for start, stop, grids in self.parts:
            elements, rows = self.elements[:, start:stop], out[..., start:stop]
            if grids is None:
                rows.copy_(blocks.index_select(1, elements.flatten()).view_as(rows))
                continue
            tokens, features = grids
            sizes = (len(blocks), *tokens.sizes, *features.sizes)
            strides = (blocks.stride(0), *tokens.strides, *features.strides)
            rows.view(sizes).copy_(blocks.as_strided(sizes, strides, int(elements[0, 0])))
