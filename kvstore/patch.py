"""The operator: K̂V(B|A) = R(delta) · (KV(B|∅) + U Vᵀ), values unrotated (kamera.md eq. 1 and 2; DESIGN "The operator").

Pure functions on tensors. A chunk's KV is [layers, tokens, features] (see `kvstore.layout`).

| function | what it does |
|---|---|
| relocate | R(delta) · KV: rotary segments rotated, content segments copied |
| deficit | Δ: what the chunk would have absorbed from its antecedents, fp32, canonical frame |
| orderings, mean_deficit | the orderings of a set, and the mean Δ over them |
| remainder | what a patch leaves of a deficit |
| form_patch | the best rank-m factors of Δ, all layers at once |
| compose | the scaled sum of patches, by concatenating factors |
| relocate_patch | the patch of the relocated chunk: only the small basis V moves |
| apply | relocate + patch, added and rotated in fp32, rounded once |

A patch's kind says which Δ it was formed from:

| kind | Δ | source |
|---|---|---|
| own | deficit(KV(B|A), KV(B|∅)), A in one order | kamera.md eq. 2 |
| orbit | the mean of it over orderings of A | kamera.md §5, Reorder |
| pair | behind one antecedent, A = {A_i} | DESIGN, Kinds |
| composed | c·Σ Δ(B|A_i), a sum of patches; never formed from a Δ | DESIGN, Kinds |
| update | remainder(Δ(B|A'), patch of A): to add to that patch when A has become A' | kamera.md App. D |
| removal | deficit(KV(B|S), KV(B|A,S)): to add to a survivor's KV when A has left | kamera.md §5, survival |

How much of Δ is kept goes with any kind: `rank` or `energy`, `depth` (deep-only patches: the shallow layers' Δ is
small, kamera.md §4 and App. C), and `basis` (shared basis: coefficients only).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore import host_kernel
from kvstore.basis import SharedBasis
from kvstore.errors import ShapeMismatch
from kvstore.factor import factor, project
from kvstore.layout import Layout
from kvstore.rotary import rotate, rotate_

ORBIT_ORDERINGS = 24  # exhaustive to four predecessors, as many samples of more (kamera.md §5, Reorder)
T = TypeVar("T")


class PatchKind(StrEnum):
    """Which deficit a patch was formed from; see the module's table."""

    own = "own"
    orbit = "orbit"
    pair = "pair"
    composed = "composed"
    update = "update"
    removal = "removal"


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors of a deficit, in the canonical frame, for the layers from `first_layer` on.

    `left`: per segment [layers - first_layer, tokens, rank_s]; `right`: per segment
    [layers - first_layer, features_s, rank_s], with rank_s <= rank (a segment's own size caps it).
    `energy`: per segment, the share of the deficit's squared norm that the factors keep, 0 to 1.
    `basis`: version of the shared basis that `right` is part of. Such a patch is stored without it, `right` is then
    empty, and must be bound before use.
    """

    kind: PatchKind
    rank: int
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    energy: tuple[float, ...]
    first_layer: int = 0
    basis: str | None = None

    def __post_init__(self) -> None:
        unbound = not self.right and self.basis is not None
        if len(self.left) != len(self.energy) or not (unbound or len(self.left) == len(self.right)):
            raise ShapeMismatch("a patch needs one left factor, right factor and energy per segment")
        for left, right in zip(self.left, self.right, strict=not unbound):
            if left.dim() != 3 or right.dim() != 3 or left.shape[::2] != right.shape[::2]:
                raise ShapeMismatch(f"factors {list(left.shape)} and {list(right.shape)} do not multiply")

    @property
    def tokens(self) -> int:
        return self.left[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are stored with this patch: a shared basis is not."""
        own = self.left if self.basis else (*self.left, *self.right)
        return sum(factor.nbytes for factor in own)

    def bind(self, basis: SharedBasis | None) -> Patch:
        """The patch, ready for use: one of a shared basis takes its right factors from it, any other is left as it is.

        Raises ShapeMismatch if the patch needs another basis.
        """
        if self.basis is None or self.right:
            return self
        if basis is None or basis.version != self.basis:
            raise ShapeMismatch(f"the patch is made of coefficients of the shared basis {self.basis}")
        parts = zip(basis.from_layer(self.first_layer), self.left, strict=True)
        return replace(self, right=tuple(part[..., : left.shape[2]] for part, left in parts))

    def truncated(self, rank: int) -> Patch:
        """The first `rank` directions: the strongest, unless the patch is of full rank, where they have no order."""
        if rank >= self.rank:
            return self
        left, right = (tuple(part[..., :rank] for part in side) for side in (self.left, self.right))
        return replace(self, rank=rank, left=left, right=right)

    def from_depth(self, depth: float) -> Patch:
        """The patch of the deepest share `depth` of its layers (see `first_patched_layer`)."""
        skipped = first_patched_layer(depth, len(self.left[0]))
        left, right = (tuple(part[skipped:] for part in side) for side in (self.left, self.right))
        return replace(self, left=left, right=right, first_layer=self.first_layer + skipped)

    def of_layer(self, layer: int) -> Patch | None:
        """The patch of this layer alone, for KV [1, tokens, features]; None where it covers none."""
        first = layer - self.first_layer
        if first < 0:
            return None
        left, right = (tuple(part[first : first + 1] for part in side) for side in (self.left, self.right))
        return replace(self, left=left, right=right, first_layer=0)

    def dense(self) -> Tensor:
        """U Vᵀ of every segment: fp32 [layers - first_layer, tokens, features]."""
        self.check_bound()
        products = [u.float() @ v.float().transpose(1, 2) for u, v in zip(self.left, self.right, strict=True)]
        return torch.cat(products, dim=-1)

    def check(self, kv: Tensor, layout: Layout) -> None:
        """Raises ShapeMismatch unless the patch fits this chunk's KV."""
        self.check_bound()
        layers = layout.layers - self.first_layer
        expected = [((layers, kv.shape[1]), (layers, segment.features)) for segment in layout.segments]
        actual = [((*u.shape[:2],), (*v.shape[:2],)) for u, v in zip(self.left, self.right, strict=True)]
        if actual != expected:
            raise ShapeMismatch(f"patch factors {actual} do not fit KV {list(kv.shape)}, which needs {expected}")

    def check_bound(self) -> None:
        """Raises ShapeMismatch unless the patch has its right factors."""
        if not self.right:
            raise ShapeMismatch(f"the patch must be bound to the shared basis {self.basis} first")


def relocate(kv: Tensor, delta: int | float, layout: Layout, out: Tensor | None = None) -> Tensor:
    """R(delta) · KV, [layers, tokens, features]: exact relocation (kamera.md §3). `out` may be `kv` itself."""
    return apply(kv, None, delta, layout, out)


def deficit(conditioned: Tensor, canonical: Tensor) -> Tensor:
    """Δ = R(-delta)·KV(B|A) - KV(B|∅) in fp32; both arguments are already in the canonical frame (kamera.md eq. 2).

    Likewise the removal deficit of a survivor, from KV(B|S) and the KV(B|A,S) that it carries (kamera.md §5).
    """
    if conditioned.shape != canonical.shape:
        raise ShapeMismatch(f"conditioned {list(conditioned.shape)} and canonical {list(canonical.shape)} differ")
    return conditioned.float() - canonical.float()


def orderings(items: Sequence[T], count: int = ORBIT_ORDERINGS, seed: int = 0) -> list[tuple[T, ...]]:
    """All orderings of a set if there are at most `count`, else `count` different ones, the same at every call."""
    if math.factorial(len(items)) <= count:
        return list(permutations(items))
    generator = random.Random(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        drawn[tuple(generator.sample(range(len(items)), len(items)))] = None
    return [tuple(items[place] for place in order) for order in drawn]


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


def remainder(delta: Tensor, patch: Patch) -> Tensor:
    """Δ - U Vᵀ, fp32 [layers, tokens, features]: what an update must add to a patch formed behind another set."""
    left = delta.float().clone()
    covered = left[patch.first_layer :]
    if covered.shape[:2] != patch.left[0].shape[:2]:
        raise ShapeMismatch(f"a patch of {patch.tokens} tokens does not fit a deficit {list(delta.shape)}")
    covered -= patch.dense()
    return left


def first_patched_layer(depth: float, layers: int) -> int:
    """Where a patch begins that covers the deepest share `depth` of the layers, rounded up to whole layers."""
    if not 0.0 < depth <= 1.0:
        raise ShapeMismatch(f"depth must lie in (0, 1], not {depth}")
    return min(int(layers * (1.0 - depth) + 1e-9), layers - 1)


def form_patch(
    deltas: Tensor,
    layout: Layout,
    rank: int | None = None,
    energy: float | None = None,
    kind: PatchKind = PatchKind.own,
    dtype: torch.dtype = torch.float32,
    *,
    depth: float = 1.0,
    basis: SharedBasis | None = None,
) -> Patch:
    """The truncated SVD factors of a deficit [layers, tokens, features], every layer and segment.

    `rank`: factors per layer and segment, capped at min(tokens, features_s); None keeps full rank, exactly.
    `energy`: as few factors, up to `rank`, as keep this share of a segment's squared norm.
    `dtype`: of the stored factors. `depth`: the share of the layers, deepest first, that the patch covers.
    `basis`: project on its first `rank` directions, within the layers that it covers, instead of decomposing.
    """
    layout.check(deltas)
    if rank is not None and rank < 1:
        raise ShapeMismatch(f"rank must be positive, not {rank}")
    if energy is not None and not 0.0 < energy <= 1.0:
        raise ShapeMismatch(f"energy must lie in (0, 1], not {energy}")
    first_layer = first_patched_layer(depth, layout.layers)
    if basis is not None:
        basis.check(layout)
        first_layer = max(first_layer, basis.first_layer)
    segments = [segment.float() for segment in layout.split(deltas[first_layer:])]
    if basis is None:
        factors = [factor(segment, rank, energy) for segment in segments]
    else:
        pairs = zip(segments, basis.from_layer(first_layer), strict=True)
        factors = [project(segment, directions[..., :rank], energy) for segment, directions in pairs]
    return Patch(
        kind=kind,
        rank=max(part.left.shape[2] for part in factors),
        left=tuple(part.left.to(dtype) for part in factors),
        right=tuple(part.right.to(dtype) if basis is None else part.right for part in factors),
        energy=tuple(part.energy for part in factors),
        first_layer=first_layer,
        basis=None if basis is None else basis.version,
    )


def compose(patches: Sequence[Patch], scale: float = 1.0, base: Patch | None = None) -> Patch:
    """scale · Σ patches, as one patch of the summed rank: Δ(B|S) ≈ c·Σ Δ(B|A_i) (DESIGN, Kinds, composed).

    `base`: the patch behind the fixed prefix P alone. Every pair patch behind P and A_i holds its deficit too, so the
    sum counts that once: Δ(B|P) + c·Σ (Δ(B|P,A_i) - Δ(B|P)). A patch and its update are composed with scale 1.
    """
    if not patches:
        raise ShapeMismatch("nothing to compose")
    terms = [(patch, scale) for patch in patches]
    if base is not None:
        terms.append((base, 1.0 - scale * len(patches)))
    first_layer = min(patch.first_layer for patch, _ in terms)
    parts = [(_extended_to(patch, first_layer), weight) for patch, weight in terms]
    segments = range(len(patches[0].left))
    same = len({(patch.basis, patch.first_layer) for patch, _ in terms}) == 1
    if same and patches[0].basis is not None:  # the same directions: coefficients add up, the rank does not
        widest = [max((part for part, _ in parts), key=lambda part: part.left[s].shape[2]) for s in segments]
        left = tuple(_sum_of_coefficients([(part.left[s], weight) for part, weight in parts]) for s in segments)
        right = tuple(widest[s].right[s] for s in segments)
    else:
        left = tuple(torch.cat([part.left[s] * weight for part, weight in parts], dim=2) for s in segments)
        right = tuple(torch.cat([part.right[s] for part, _ in parts], dim=2) for s in segments)
    return Patch(
        kind=PatchKind.composed,
        rank=max(part.shape[2] for part in left),
        left=left,
        right=right,
        energy=tuple(min(part.energy[s] for part, _ in parts) for s in segments),
        first_layer=first_layer,
    )


def _sum_of_coefficients(terms: Sequence[tuple[Tensor, float]]) -> Tensor:
    rank = max(left.shape[2] for left, _ in terms)
    return torch.stack([pad(left.float() * weight, (0, rank - left.shape[2])) for left, weight in terms]).sum(0)


def relocate_patch(patch: Patch, delta: int | float, layout: Layout) -> Patch:
    """The patch in the frame moved by delta: R(delta)(U Vᵀ) = U (R(delta) V)ᵀ, so only V's columns rotate.

    For KV that was relocated before; `apply` rotates the sum instead, which costs nothing more.
    """
    patch.check_bound()
    moved = []
    for segment, right in zip(layout.segments, patch.right, strict=True):
        if not segment.rotary:
            moved.append(right)
            continue
        columns = right.float().transpose(1, 2).unflatten(-1, (segment.heads, segment.width))
        moved.append(rotate(columns, delta, layout.rotary).flatten(-2).transpose(1, 2).to(right.dtype))
    return replace(patch, right=tuple(moved), basis=None)


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
    patch.check_bound()
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
