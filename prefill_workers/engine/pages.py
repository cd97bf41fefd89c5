"""Layout of a block of the KV cache, and reading tokens out of it.

Attention kernels lay a block out as they like: the CPU's, for one, interleaves pairs of features in keys and pairs of
tokens in values, as its matrix instructions want them. That is regular, so blocks are read as strided views of what
lies in them, which takes a third of the time of picking single numbers. A layout that is not regular is picked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Numbers Σ digit · stride, with digits in mixed radix, the last one fastest."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def like(cls, numbers: Tensor) -> Grid:
        """The only grid that could hold `numbers` [n] less the first; the caller checks it."""
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


class _Part(NamedTuple):
    """Features `start` to `stop` of a token: block element `first` and grids, or `elements`."""

    start: int
    stop: int
    first: int
    tokens: Grid
    features: Grid
    elements: Tensor | None  # [block_size * features], on the cache's device; None: the grids say it


@dataclass(frozen=True)
class Pages:
    """Positions of tokens' features in a block, segment by segment."""

    parts: Sequence[_Part]

    @classmethod
    def of(cls, elements: Tensor, widths: Sequence[int], device: torch.device) -> Pages:
        """Pages from `elements` [block_size, features]: the block element of feature f of token t.

        `widths`: of the segments, in features.
        """
        parts = []
        for start, stop in pairwise(accumulate(widths, initial=0)):
            mine = elements[:, start:stop]
            grids = Grid.like(mine[:, 0]), Grid.like(mine[0])
            tokens, features = (grid.numbers() for grid in grids)
            regular = len(tokens) == len(mine) and len(features) == stop - start
            regular = regular and torch.equal(mine[0, 0] + tokens[:, None] + features, mine)
            picked = None if regular else mine.flatten().to(device)
            parts.append(_Part(start, stop, int(mine[0, 0]), *grids, picked))
        return cls(parts)

    def read(self, blocks: Tensor, out: Tensor) -> None:
        """Copy blocks [n, elements] to `out` [n, block_size, features], both contiguous."""
        for part in self.parts:
            rows = out[..., part.start : part.stop]
            if part.elements is not None:
                rows.copy_(blocks.index_select(1, part.elements).view_as(rows))
                continue
            sizes = (len(blocks), *part.tokens.sizes, *part.features.sizes)
            strides = (blocks.stride(0), *part.tokens.strides, *part.features.strides)
            rows.view(sizes).copy_(blocks.as_strided(sizes, strides, part.first))


def learnt(size: int, features: int, whole: int, through: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Block element of feature f of token t, [size, features]; None if some do not come back.

    Known numbers are written and looked for, one pass per digit, since a dtype holds only small ones exactly.

    Args:
        whole: numbers below are exact in the dtype.
        through: writes numbers [size, features] as a block's tokens; the block's elements [size · features] int64 then.
    """
    code = torch.arange(size * features)
    found, scale = torch.zeros_like(code), 1
    while scale < len(code):
        found += scale * through((code // scale % whole).view(size, features))
        scale *= whole
    return found.argsort().view(size, features) if torch.equal(found.sort().values, code) else None
