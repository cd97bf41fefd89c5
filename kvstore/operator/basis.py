"""Shared bases: directions of the deficit that belong to the model, not to a chunk.

A patch on a basis has only its coefficients for the chunk (kamera.md §4).

A basis is pooled once from patches that a model formed. From then on forming a patch is a projection, no decomposition,
and a patch stores its coefficients and the basis' version; the basis is bound before it is applied (`Patch.bind`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.layout import Layout
from kvstore.operator.svd import leading_directions

if TYPE_CHECKING:
    from kvstore.operator.patch import Patch


@dataclass(frozen=True, eq=False)
class SharedBasis:
    """Orthonormal directions for the layers from `first_layer` on, strongest first; fp32.

    `directions`: per segment [layers - first_layer, features_s, rank_s].
    """

    directions: tuple[Tensor, ...]
    first_layer: int = 0

    def __post_init__(self) -> None:
        if not self.directions:
            raise ShapeMismatch("a basis needs directions for at least one segment")
        for part in self.directions:
            if part.dim() != 3 or part.dtype != torch.float32 or part.shape[2] > part.shape[1]:
                raise ShapeMismatch(f"directions are fp32 [layers, features, rank], not {part.dtype} {[*part.shape]}")

    @property
    def rank(self) -> int:
        """Number of directions of the segment that has most."""
        return max(part.shape[2] for part in self.directions)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.directions)

    @cached_property
    def version(self) -> str:
        """64 hex digits that name these numbers; coefficients fit this basis and no other."""
        hasher = blake3(derive_key_context="orbitserve 2026 shared basis v1")
        hasher.update(repr((self.first_layer, [tuple(part.shape) for part in self.directions])).encode())
        for part in self.directions:
            hasher.update(part.detach().cpu().numpy().tobytes())
        return hasher.hexdigest()

    def from_layer(self, first_layer: int) -> tuple[Tensor, ...]:
        """The directions for the layers from `first_layer` on, not before the basis' own."""
        return tuple(part[first_layer - self.first_layer :] for part in self.directions)

    def check(self, layout: Layout) -> None:
        """Raise ShapeMismatch unless the basis was made for this layout."""
        expected = [(layout.layers - self.first_layer, segment.features) for segment in layout.segments]
        actual = [(*part.shape[:2],) for part in self.directions]
        if actual != expected:
            raise ShapeMismatch(f"the basis has directions of {actual}, the {layout.family} layout needs {expected}")


def pool_basis(patches: Sequence[Patch], rank: int) -> SharedBasis:
    """Pool patches: the `rank` directions per layer and segment that keep most of their norm.

    The patches cover the same layers and have directions of their own; more of them, and of higher rank than `rank`,
    describe the model better. A segment gets fewer directions if it, or all patches together, have fewer.
    """
    if rank < 1:
        raise ShapeMismatch(f"rank must be positive, not {rank}")
    first_layers = {patch.first_layer for patch in patches}
    if len(first_layers) != 1 or any(patch.basis for patch in patches):
        raise ShapeMismatch("a basis is pooled from patches with directions of their own, over the same layers")
    segments = zip(*(patch.segments for patch in patches), strict=True)
    directions = [_pool([part.factors() for part in parts], rank) for parts in segments]
    return SharedBasis(tuple(directions), first_layers.pop())


def _pool(factors: Sequence[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """Leading directions [layers, features, r] of the stacked products left · rightᵀ.

    The products are never multiplied out.
    """
    # (L Rᵀ)ᵀ (L Rᵀ) = R (LᵀL) Rᵀ: the columns R (LᵀL)^½ have the product's Gram matrix, at the patch's rank.
    columns = torch.cat([right @ _root(left.mT @ left) for left, right in factors], dim=2)
    features, count = columns.shape[1:]
    rank = min(rank, features, count)
    if count >= features:
        return leading_directions(columns.mT, rank).contiguous()
    return torch.linalg.qr(columns @ leading_directions(columns, rank)).Q.contiguous()


def _root(gram: Tensor) -> Tensor:
    """A matrix H with H Hᵀ = gram, for Gram matrices [layers, r, r] of any rank."""
    values, vectors = torch.linalg.eigh(gram.double())
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).float()
