"""The operator: K̂V(B|A) = R(delta) · (KV(B|∅) + U Vᵀ), values unrotated (kamera.md eq. 1 and 2; DESIGN "The operator").

Pure functions on tensors. A chunk's KV is [layers, tokens, features] (see `kvstore.layout`).

| function | what it does |
|---|---|
| relocate | R(delta) · KV: rotary segments rotated, content segments copied |
| deficit | Δ: what the chunk would have absorbed from its antecedents, fp32, canonical frame |
| mean_deficit | the mean Δ over orderings of a set: the source of an orbit patch |
| form_patch | the best rank-m factors of Δ, all layers at once |
| compose | the scaled sum of patches, by concatenating factors |
| relocate_patch | the patch of the relocated chunk: only the small basis V moves |
| apply | relocate + patch, added and rotated in fp32, rounded once |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from kvstore import host_kernel
from kvstore.errors import ShapeMismatch
from kvstore.layout import Layout
from kvstore.rotary import rotate, rotate_


class PatchKind(StrEnum):
    """What a patch was formed from (DESIGN, "The operator", Kinds)."""

    own = "own"
    orbit = "orbit"
    deep = "deep"
    pair = "pair"
    composed = "composed"
    update = "update"
    removal = "removal"
    shared = "shared"


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors of a deficit, in the canonical frame, for the layers from `first_layer` on.

    `left`: per segment [layers - first_layer, tokens, rank_s]; `right`: per segment
    [layers - first_layer, features_s, rank_s], with rank_s <= rank (a segment's own size caps it).
    `energy`: per segment, the share of the deficit's squared norm that the factors keep, 0 to 1.
    """

    kind: PatchKind
    rank: int
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    energy: tuple[float, ...]
    first_layer: int = 0

    def __post_init__(self) -> None:
        if not len(self.left) == len(self.right) == len(self.energy):
            raise ShapeMismatch("a patch needs one left factor, right factor and energy per segment")
        for left, right in zip(self.left, self.right, strict=True):
            if left.dim() != 3 or right.dim() != 3 or left.shape[::2] != right.shape[::2]:
                raise ShapeMismatch(f"factors {list(left.shape)} and {list(right.shape)} do not multiply")

    @property
    def tokens(self) -> int:
        return self.left[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for factor in (*self.left, *self.right))

    def dense(self) -> Tensor:
        """U Vᵀ of every segment: fp32 [layers - first_layer, tokens, features]. For tests and measurement."""
        products = [u.float() @ v.float().transpose(1, 2) for u, v in zip(self.left, self.right, strict=True)]
        return torch.cat(products, dim=-1)

    def check(self, kv: Tensor, layout: Layout) -> None:
        """Raises ShapeMismatch unless the patch fits this chunk's KV."""
        layers = layout.layers - self.first_layer
        expected = [((layers, kv.shape[1]), (layers, segment.features)) for segment in layout.segments]
        actual = [((*u.shape[:2],), (*v.shape[:2],)) for u, v in zip(self.left, self.right, strict=True)]
        if actual != expected:
            raise ShapeMismatch(f"patch factors {actual} do not fit KV {list(kv.shape)}, which needs {expected}")


def relocate(kv: Tensor, delta: int | float, layout: Layout, out: Tensor | None = None) -> Tensor:
    """R(delta) · KV, [layers, tokens, features]: exact relocation (kamera.md §3). `out` may be `kv` itself."""
    return apply(kv, None, delta, layout, out)


def deficit(conditioned: Tensor, canonical: Tensor) -> Tensor:
    """Δ = R(-delta)·KV(B|A) - KV(B|∅) in fp32; both arguments are already in the canonical frame (kamera.md eq. 2)."""
    if conditioned.shape != canonical.shape:
        raise ShapeMismatch(f"conditioned {list(conditioned.shape)} and canonical {list(canonical.shape)} differ")
    return conditioned.float() - canonical.float()


def mean_deficit(deltas: Sequence[Tensor]) -> Tensor:
    """The mean of deficits over orderings of one antecedent set, fp32 (kamera.md §5, orbit patch)."""
    if not deltas:
        raise ShapeMismatch("a mean needs at least one deficit")
    total = torch.zeros_like(deltas[0], dtype=torch.float32)
    for delta in deltas:
        if delta.shape != total.shape:
            raise ShapeMismatch("deficits of one chunk must have one shape")
        total += delta
    return total.div_(len(deltas))


def form_patch(
    deltas: Tensor,
    layout: Layout,
    rank: int | None = None,
    energy: float | None = None,
    kind: PatchKind = PatchKind.own,
    dtype: torch.dtype = torch.float32,
) -> Patch:
    """The truncated SVD factors of a deficit [layers, tokens, features], every layer and segment.

    `rank`: factors per layer and segment, capped at min(tokens, features_s); None keeps full rank, exactly.
    `energy`: instead of, or below, `rank`: the smallest rank that keeps this share of a segment's squared norm.
    `dtype`: of the stored factors. A deep patch covers the deepest half of the layers only.
    """
    layout.check(deltas)
    if rank is not None and rank < 1:
        raise ShapeMismatch(f"rank must be positive, not {rank}")
    if energy is not None and not 0.0 < energy <= 1.0:
        raise ShapeMismatch(f"energy must lie in (0, 1], not {energy}")
    first_layer = layout.layers // 2 if kind is PatchKind.deep else 0
    factors = [_factor(segment.float(), rank, energy) for segment in layout.split(deltas[first_layer:])]
    return Patch(
        kind=kind,
        rank=max(left.shape[2] for left, _, _ in factors),
        left=tuple(left.to(dtype) for left, _, _ in factors),
        right=tuple(right.to(dtype) for _, right, _ in factors),
        energy=tuple(kept for _, _, kept in factors),
        first_layer=first_layer,
    )


def compose(patches: Sequence[Patch], scale: float = 1.0) -> Patch:
    """scale · Σ patches, as one patch of the summed rank: Δ(B|S) ≈ c·Σ Δ(B|A_i) (DESIGN, Kinds, composed)."""
    if not patches:
        raise ShapeMismatch("nothing to compose")
    first_layer = min(patch.first_layer for patch in patches)
    parts = [_extended_to(patch, first_layer) for patch in patches]
    segments = range(len(parts[0].left))
    left = tuple(torch.cat([part.left[s] for part in parts], dim=2) * scale for s in segments)
    right = tuple(torch.cat([part.right[s] for part in parts], dim=2) for s in segments)
    return Patch(
        kind=PatchKind.composed,
        rank=max(factor.shape[2] for factor in left),
        left=left,
        right=right,
        energy=tuple(min(part.energy[s] for part in parts) for s in segments),
        first_layer=first_layer,
    )


def relocate_patch(patch: Patch, delta: int | float, layout: Layout) -> Patch:
    """The patch in the frame moved by delta: R(delta)(U Vᵀ) = U (R(delta) V)ᵀ, so only V's columns rotate.

    For KV that was relocated before; `apply` rotates the sum instead, which costs nothing more.
    """
    moved = []
    for segment, right in zip(layout.segments, patch.right, strict=True):
        if not segment.rotary:
            moved.append(right)
            continue
        columns = right.float().transpose(1, 2).unflatten(-1, (segment.heads, segment.width))
        moved.append(rotate(columns, delta, layout.rotary).flatten(-2).transpose(1, 2).to(right.dtype))
    return replace(patch, right=tuple(moved))


def apply(kv: Tensor, patch: Patch | None, delta: int | float, layout: Layout, out: Tensor | None = None) -> Tensor:
    """R(delta) · (KV + U Vᵀ), [layers, tokens, features], summed and rotated in fp32, rounded once to kv.dtype.

    `patch` None only relocates. `out`: any tensor of kv's shape and dtype, strided as the caller likes; it may be
    `kv` itself but must not otherwise overlap it. With no patch and delta = 0 the values are kv's, bit for bit.
    """
    layout.check(kv)
    if patch is not None:
        patch.check(kv, layout)
    if out is None:
        out = torch.empty_like(kv)
    elif out.shape != kv.shape or out.dtype != kv.dtype:
        raise ShapeMismatch(f"out is {out.dtype} {list(out.shape)}, expected {kv.dtype} {list(kv.shape)}")
    if patch is None and delta == 0:
        return out if out is kv else out.copy_(kv)
    if not host_kernel.apply(kv, patch, delta, layout, out):
        _apply_by_layer(kv, patch, delta, layout, out)
    return out


def _apply_by_layer(kv: Tensor, patch: Patch | None, delta: int | float, layout: Layout, out: Tensor) -> None:
    """`apply` in plain torch, for any device: one layer's fp32 copy at a time stays in cache."""
    total = torch.empty(kv.shape[1:], dtype=torch.float32, device=kv.device)
    places = layout.slices()
    for layer in range(layout.layers):
        total.copy_(kv[layer])
        for index, segment in enumerate(layout.segments):
            part = total[:, places[segment.name]]
            if patch is not None and layer >= patch.first_layer:
                left, right = (side[index][layer - patch.first_layer].float() for side in (patch.left, patch.right))
                part.addmm_(left, right.t())
            if segment.rotary:
                rotate_(part.unflatten(-1, (segment.heads, segment.width)), delta, layout.rotary)
        out[layer].copy_(total)


def _extended_to(patch: Patch, first_layer: int) -> Patch:
    """The same patch, its factors preceded by zeros for the layers from `first_layer` on."""
    missing = patch.first_layer - first_layer
    if missing == 0:
        return patch

    def extended(factor: Tensor) -> Tensor:
        return torch.cat([factor.new_zeros(missing, *factor.shape[1:]), factor])

    return replace(
        patch,
        left=tuple(extended(factor) for factor in patch.left),
        right=tuple(extended(factor) for factor in patch.right),
        first_layer=first_layer,
    )


# Below this share of the full rank a few subspace iterations beat a full eigendecomposition: rank 16 of
# [16 layers, 1024 tokens, 512 features] takes 70 ms against 300 ms on two cores.
_SUBSPACE_SHARE = 4
_SUBSPACE_ITERATIONS = 6
_OVERSAMPLING = 8


def _factor(delta: Tensor, rank: int | None, energy: float | None) -> tuple[Tensor, Tensor, float]:
    """(left [layers, tokens, r], right [layers, features, r], energy kept) of one segment's deficit, fp32."""
    layers, tokens, features = delta.shape
    limit = min(tokens, features)
    wanted = limit if rank is None else min(rank, limit)
    if wanted == limit and energy is None:
        # Any complete orthonormal basis is exact; the identity needs no decomposition at all.
        identity = torch.eye(limit, device=delta.device).expand(layers, limit, limit)
        return (delta, identity, 1.0) if features <= tokens else (identity, delta.transpose(1, 2), 1.0)
    if features > tokens:
        right, left, kept = _project(delta.transpose(1, 2), wanted, energy)
    else:
        left, right, kept = _project(delta, wanted, energy)
    return left, right, kept


def _project(tall: Tensor, rank: int, energy: float | None) -> tuple[Tensor, Tensor, float]:
    """(tall · V, V, energy kept), V [layers, n, r] the leading right singular vectors of tall [layers, m, n], m >= n.

    Projecting on an orthonormal basis reproduces what the basis spans to rounding, however inexact the small
    eigenvalues of the Gram matrix are.
    """
    total = tall.square().sum(-1).double().sum()
    if energy is None and _SUBSPACE_SHARE * (rank + _OVERSAMPLING) <= tall.shape[2]:
        basis = _leading_subspace(tall, rank)
    else:
        eigenvalues, vectors = torch.linalg.eigh(tall.transpose(1, 2).double() @ tall.double())
        if energy is not None:
            captured = eigenvalues.clamp(min=0).flip(-1).sum(0).cumsum(0)
            rank = min(rank, int((captured < energy * total * (1 - 1e-12)).sum().item()) + 1)
        basis = vectors[..., -rank:].flip(-1).float()
    coefficients = tall @ basis
    kept = float(coefficients.double().square().sum() / total) if total > 0 else 1.0
    return coefficients, basis.contiguous(), min(kept, 1.0)


def _leading_subspace(tall: Tensor, rank: int) -> Tensor:
    """The leading right singular vectors by subspace iteration with oversampling (Halko, Martinsson, Tropp 2011)."""
    layers, _, features = tall.shape
    generator = torch.Generator().manual_seed(0)  # the same deficit must give the same patch
    start = torch.randn(features, rank + _OVERSAMPLING, generator=generator).to(tall.device)
    basis, gram = start.expand(layers, -1, -1), tall.transpose(1, 2) @ tall
    for _ in range(_SUBSPACE_ITERATIONS):
        basis = torch.linalg.qr(gram @ basis).Q
    projected = (tall @ basis).double()
    _, vectors = torch.linalg.eigh(projected.transpose(1, 2) @ projected)
    return basis @ vectors[..., -rank:].flip(-1).float()
