"""Rank-one directions of one segment's patch, in 8 bits or floats, per layer as many as pay.

Layers lie one after another without padding, so a layer that needs many directions costs no bytes in those that need
few. A direction has one scale, which is all that 8 bits need: its left and right factor are stored relative to their
largest elements, and the scale is the product of what each was divided by.

Sums of patches give every token weights of its own (`prefill_workers.link.compose`). These stay beside the factors, so
that a sum of patches in 8 bits is one too: what adds it to KV multiplies as it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore.errors import ShapeMismatch

_STEPS = 127  # of int8, either side of zero
_LEAST = 1e-30  # divides rows of zeros


class TokenWeights(NamedTuple):
    """Per-token factors of the directions' left factors."""

    rows: Tensor  # [rows, tokens] fp32
    of: Tensor  # [directions] int64: the row of each


@dataclass(frozen=True, eq=False)
class Directions:
    """Δ ≈ Σ scale · left ⊗ right over each layer's directions, strongest first; one segment.

    `left` [directions, tokens] and `right` [directions, features]: int8 or floats; `scale` [directions] fp32;
    `ranks`: how many directions each layer has. `right` None: directions of a shared basis, of which each layer has its
    first ones (`Patch.bind`). `weights` None: every token's is 1.
    """

    left: Tensor
    right: Tensor | None
    scale: Tensor
    ranks: tuple[int, ...]
    weights: TokenWeights | None = None

    def __post_init__(self) -> None:
        count = sum(self.ranks)
        sides = [self.left] if self.right is None else [self.left, self.right]
        fit = all(side.dim() == 2 and len(side) == count for side in sides) and self.scale.shape == (count,)
        if self.weights is not None:
            fit = fit and self.weights.of.shape == (count,) and self.weights.rows.shape[1:] == (self.tokens,)
        if not fit:
            shapes = [list(part.shape) for part in (*sides, self.scale, *(self.weights or ()))]
            raise ShapeMismatch(f"factors {shapes} are not {count} directions")

    @classmethod
    def of(cls, left: Tensor, right: Tensor | None, ranks: Tensor | None = None) -> Directions:
        """Directions from factors [layers, tokens, rank] and [layers, features, rank].

        `ranks` [layers]: keep only the first so many of each layer.
        """
        layers, _, rank = left.shape
        ranks = torch.full((layers,), rank) if ranks is None else ranks
        kept = torch.arange(rank) < ranks[:, None]
        scale = torch.ones(int(ranks.sum()), device=left.device)
        return cls(left.mT[kept], None if right is None else right.mT[kept], scale, tuple(ranks.tolist()))

    @property
    def tokens(self) -> int:
        return self.left.shape[1]

    @property
    def features(self) -> int:
        assert self.right is not None
        return self.right.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, a bound shared basis included."""
        weights = 0 if self.weights is None else self.weights.rows.nbytes + self.weights.of.nbytes
        return self.left.nbytes + self.scale.nbytes + (0 if self.right is None else self.right.nbytes) + weights

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offsets of each layer's directions, and the total count."""
        return (0, *accumulate(self.ranks))

    @cached_property
    def layer(self) -> Tensor:
        """The layer [directions] that each direction belongs to."""
        return torch.repeat_interleave(torch.tensor(self.ranks, dtype=torch.int64))

    @cached_property
    def place(self) -> Tensor:
        """Each direction's place [directions] within its layer."""
        return torch.arange(len(self.layer)) - torch.tensor(self.starts)[self.layer]

    def to(self, dtype: torch.dtype, *, right: bool = True) -> Directions:
        """The same in another precision, int8 rounded to 127 steps; `right` False keeps that side."""
        left, scale = _in_precision(self.weighted_left, dtype)
        if self.right is None or not right:
            return replace(self, left=left, scale=self.scale * scale, weights=None)
        other, factor = _in_precision(self.right, dtype)
        return replace(self, left=left, right=other, scale=self.scale * scale * factor, weights=None)

    def on_host(self) -> Directions:
        """The same in the host's memory."""
        right = None if self.right is None else self.right.cpu()
        weights = None if self.weights is None else TokenWeights(*(part.cpu() for part in self.weights))
        return replace(self, left=self.left.cpu(), right=right, scale=self.scale.cpu(), weights=weights)

    def on(self, basis: Tensor) -> Directions:
        """Bound to the directions [layers, features, rank] of a shared basis (or its suffix)."""
        return replace(self, right=basis.mT[self.layer, self.place])

    def layers(self, first: int, stop: int | None = None) -> Directions:
        """The directions of the layers from `first` to `stop`."""
        rows = slice(self.starts[first], self.starts[len(self.ranks) if stop is None else stop])
        return self._rows(rows, self.ranks[first:stop])

    def below(self, layers: int) -> Directions:
        """The same with so many empty layers before them."""
        return replace(self, ranks=(0,) * layers + self.ranks)

    def of_tokens(self, start: int, stop: int) -> Directions:
        """The same directions of the tokens from `start` to `stop`."""
        weights = self.weights
        if weights is not None:
            weights = weights._replace(rows=weights.rows[:, start:stop].contiguous())
        return replace(self, left=self.left[:, start:stop].contiguous(), weights=weights)

    def truncated(self, rank: int) -> Directions:
        """At most the first `rank` of every layer."""
        if max(self.ranks) <= rank:
            return self
        return self._rows(self.place < rank, tuple(min(own, rank) for own in self.ranks))

    def weighted(self, weight: float | Tensor) -> Directions:
        """Times a number, or times one for each layer and token, [layers or 1, tokens or 1]."""
        if not isinstance(weight, Tensor):
            return replace(self, scale=self.scale * weight)
        if len(weight) not in (1, len(self.ranks)):
            raise ShapeMismatch(f"weights {list(weight.shape)} are not of {len(self.ranks)} layers")
        if weight.shape[1] == 1:
            return replace(self, scale=self.scale * weight.expand(len(self.ranks), 1)[self.layer, 0])
        of = self.layer.to(weight.device) if len(weight) > 1 else weight.new_zeros(len(self.scale), dtype=torch.int64)
        weights = TokenWeights(weight.float().contiguous(), of)
        return replace(self, left=self.weighted_left, weights=weights)

    @property
    def weighted_left(self) -> Tensor:
        """The left factors [directions, tokens], times the tokens' weights where there are any."""
        return self.left if self.weights is None else self.left.float() * self.weights.rows[self.weights.of]

    def factors_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """fp32 factors [rank, tokens] and [rank, features] of one layer."""
        assert self.right is not None
        rows = slice(*self.starts[layer : layer + 2])
        left = self.left[rows].float() * self.scale[rows, None]
        if self.weights is not None:
            left *= self.weights.rows[self.weights.of[rows]]
        return left, self.right[rows].float()

    def factors(self) -> tuple[Tensor, Tensor]:
        """fp32 factors [layers, tokens, rank] and [layers, features, rank], zero-padded in rank."""
        assert self.right is not None
        sides = []
        for side in (self.weighted_left.float() * self.scale[:, None], self.right.float()):
            padded = side.new_zeros(len(self.ranks), max(self.ranks), side.shape[1])
            padded[self.layer, self.place] = side
            sides.append(padded.mT)
        return sides[0], sides[1]

    def dense(self) -> Tensor:
        """The sum: fp32 [layers, tokens, features]."""
        if len(self.ranks) == 1:
            left, right = self.factors_of(0)
            return (left.t() @ right)[None]
        left, right = self.factors()
        return left @ right.mT

    def _rows(self, rows: slice | Tensor, ranks: tuple[int, ...]) -> Directions:
        right = None if self.right is None else self.right[rows]
        weights = None if self.weights is None else TokenWeights(self.weights.rows, self.weights.of[rows])
        return Directions(self.left[rows], right, self.scale[rows], ranks, weights)


def joined(parts: Sequence[Directions]) -> Directions:
    """Sum of several over the same layers, by concatenating the directions of each layer."""

    def by_layer(sides: Sequence[Tensor]) -> Tensor:
        return torch.cat(
            [
                side[part.starts[layer] : part.starts[layer + 1]]
                for layer in range(len(parts[0].ranks))
                for part, side in zip(parts, sides, strict=True)
            ]
        )

    return Directions(
        by_layer([part.left for part in parts]),
        by_layer([part.right for part in parts if part.right is not None]),
        by_layer([part.scale for part in parts]),
        tuple(map(sum, zip(*(part.ranks for part in parts), strict=True))),
        _joined_weights(parts, by_layer),
    )


def _joined_weights(parts: Sequence[Directions], by_layer: Callable[[Sequence[Tensor]], Tensor]) -> TokenWeights | None:
    if all(part.weights is None for part in parts):
        return None
    rows, of, count = list[Tensor](), list[Tensor](), 0
    for part in parts:
        of_one_row = part.scale.new_zeros(len(part.scale), dtype=torch.int64)
        weights = part.weights or TokenWeights(part.scale.new_ones(1, part.tokens), of_one_row)
        rows.append(weights.rows)
        of.append(weights.of + count)
        count += len(weights.rows)
    return TokenWeights(torch.cat(rows), by_layer(of))


def _in_precision(side: Tensor, dtype: torch.dtype) -> tuple[Tensor, float | Tensor]:
    """The factor in a precision, and what each of its rows must be multiplied by."""
    if dtype is not torch.int8:
        return side.to(dtype), 1.0
    step = side.float().abs().amax(1) / _STEPS
    return (side.float() / step.clamp_min(_LEAST)[:, None]).round_().to(torch.int8), step
