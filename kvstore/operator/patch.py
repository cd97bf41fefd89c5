"""The operator: K̂V(B|A) = R(delta) · (KV(B|∅) + U Vᵀ), values unrotated.

See kamera.md eq. 1 and 2. Pure functions on tensors. A chunk's KV is [layers, tokens, features] (see
`kvstore.operator.layout`).

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
| pair | behind one antecedent, A = {A_i} | `prefill_workers.link.compose` |
| composed | c·Σ Δ(B|A_i), a sum of patches; never formed from a Δ | `prefill_workers.link.compose` |
| update | remainder(Δ(B|A'), patch of A): to add to that patch when A has become A' | kamera.md App. D |
| removal | deficit(KV(B|S), KV(B|A,S)): to add to a survivor's KV when A has left | kamera.md §5, survival |

How much of Δ is kept goes with any kind: `rank` or `energy`, `depth` (deep-only patches: the shallow layers' Δ is
small, kamera.md §4 and App. C), `spread` (which layers and segments have them), and `basis` (shared basis: coefficients
only). Factors are floats or int8 (`kvstore.operator.directions`).
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

from kvstore.errors import ShapeMismatch
from kvstore.operator.basis import SharedBasis
from kvstore.operator.directions import Directions, joined
from kvstore.operator.layout import Layout
from kvstore.operator.svd import factor, project, spread_factors, squared_norm

ORBIT_ORDERINGS = 24  # exhaustive to four predecessors, as many samples of more (kamera.md §5, Reorder)
T = TypeVar("T")


class PatchKind(StrEnum):
    """Kind of deficit a patch was formed from; see the module's table."""

    own = "own"
    orbit = "orbit"
    pair = "pair"
    composed = "composed"
    update = "update"
    removal = "removal"


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors of a deficit, in the canonical frame, from layer `first_layer` on.

    `rank`: directions per layer and segment at most, or on average where they are spread; a segment's own size caps it.
    `segments`: the directions kept of each segment. `energy`: per segment, the share of the deficit's squared norm that
    they keep, 0 to 1. `basis`: version of the shared basis that their right factors are part of. Such a patch is stored
    without them and must be bound before use.
    """

    kind: PatchKind
    rank: int
    segments: tuple[Directions, ...]
    energy: tuple[float, ...]
    first_layer: int = 0
    basis: str | None = None

    def __post_init__(self) -> None:
        if len(self.segments) != len(self.energy):
            raise ShapeMismatch("a patch needs directions and an energy of every segment")
        if len({(part.tokens, len(part.ranks)) for part in self.segments}) != 1:
            raise ShapeMismatch("the segments of a patch have the same tokens and layers")
        if self.basis is None and any(part.right is None for part in self.segments):
            raise ShapeMismatch("a patch needs both factors of its directions, or a shared basis")

    @property
    def tokens(self) -> int:
        return self.segments[0].tokens

    @property
    def nbytes(self) -> int:
        """Bytes that are stored with this patch: a shared basis is not."""
        return sum(part.nbytes for part in self.unbound.segments)

    @property
    def unbound(self) -> Patch:
        """The patch as it is stored: without the right factors that a shared basis has."""
        if self.basis is None:
            return self
        return replace(self, segments=tuple(replace(part, right=None) for part in self.segments))

    def on_host(self) -> Patch:
        """The patch in the host's memory, where records are kept."""
        return replace(self, segments=tuple(part.on_host() for part in self.segments))

    def bind(self, basis: SharedBasis | None) -> Patch:
        """The patch with its right factors, taken from the shared basis it was formed on, if any.

        Raises ShapeMismatch if the patch needs another basis.
        """
        if self._bound:
            return self
        if basis is None or basis.version != self.basis:
            raise ShapeMismatch(f"the patch is made of coefficients of the shared basis {self.basis}")
        parts = zip(self.segments, basis.from_layer(self.first_layer), strict=True)
        return replace(self, segments=tuple(segment.on(part) for segment, part in parts))

    def truncated(self, rank: int) -> Patch:
        """At most the first `rank` directions of every layer and segment.

        They are the strongest, unless the patch is of full rank, where they have no order.
        """
        if rank >= self.rank and all(max(part.ranks) <= rank for part in self.segments):
            return self
        return replace(self, rank=min(rank, self.rank), segments=tuple(part.truncated(rank) for part in self.segments))

    def from_depth(self, depth: float) -> Patch:
        """The patch of the deepest share `depth` of its layers (see `first_patched_layer`)."""
        skipped = first_patched_layer(depth, len(self.segments[0].ranks))
        segments = tuple(part.layers(skipped) for part in self.segments)
        return replace(self, segments=segments, first_layer=self.first_layer + skipped)

    def of_layer(self, layer: int) -> Patch | None:
        """The patch of this layer alone, for KV [1, tokens, features]; None where it covers none."""
        first = layer - self.first_layer
        if first < 0:
            return None
        return replace(self, segments=tuple(part.layers(first, first + 1) for part in self.segments), first_layer=0)

    def of_tokens(self, start: int, stop: int) -> Patch:
        """The patch of the tokens from `start` to `stop` alone."""
        if (start, stop) == (0, self.tokens):
            return self
        return replace(self, segments=tuple(part.of_tokens(start, stop) for part in self.segments))

    def dense(self) -> Tensor:
        """U Vᵀ of every segment: fp32 [layers - first_layer, tokens, features]."""
        self.check_bound()
        return torch.cat([part.dense() for part in self.segments], dim=-1)

    def check(self, kv: Tensor, layout: Layout) -> None:
        """Raise ShapeMismatch unless the patch fits this chunk's KV."""
        self.check_bound()
        layers = layout.layers - self.first_layer
        expected = [(layers, kv.shape[1], segment.features) for segment in layout.segments]
        actual = [(len(part.ranks), part.tokens, part.features) for part in self.segments]
        if actual != expected:
            raise ShapeMismatch(f"patch factors {actual} do not fit KV {list(kv.shape)}, which needs {expected}")

    def check_bound(self) -> None:
        """Raise ShapeMismatch unless the patch has its right factors."""
        if not self._bound:
            raise ShapeMismatch(f"the patch must be bound to the shared basis {self.basis} first")

    @property
    def _bound(self) -> bool:
        return all(part.right is not None for part in self.segments)


def deficit(conditioned: Tensor, canonical: Tensor) -> Tensor:
    """Δ = R(-delta)·KV(B|A) - KV(B|∅) in fp32, both canonical already (kamera.md eq. 2).

    Likewise the removal deficit of a survivor, from KV(B|S) and the KV(B|A,S) that it carries (kamera.md §5).
    """
    if conditioned.shape != canonical.shape:
        raise ShapeMismatch(f"conditioned {list(conditioned.shape)} and canonical {list(canonical.shape)} differ")
    return conditioned.to(torch.float32, copy=True).sub_(canonical)  # no third fp32 tensor


def orderings(items: Sequence[T], count: int = ORBIT_ORDERINGS, seed: int = 0) -> list[tuple[T, ...]]:
    """All orderings of a set if at most `count`, else `count` different ones; deterministic."""
    if math.factorial(len(items)) <= count:
        return list(permutations(items))
    generator = random.Random(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        drawn[tuple(generator.sample(range(len(items)), len(items)))] = None
    return [tuple(items[place] for place in order) for order in drawn]


def mean_deficit(deltas: Sequence[Tensor]) -> Tensor:
    """Mean of deficits over orderings of one antecedent set, fp32 (kamera.md §5, orbit patch)."""
    if not deltas:
        raise ShapeMismatch("a mean needs at least one deficit")
    total = torch.zeros_like(deltas[0], dtype=torch.float32)
    for delta in deltas:
        if delta.shape != total.shape:
            raise ShapeMismatch("deficits of one chunk must have one shape")
        total += delta
    return total.div_(len(deltas))


def remainder(delta: Tensor, patch: Patch) -> Tensor:
    """Δ - U Vᵀ, fp32 [layers, tokens, features]: what an update must add to another set's patch."""
    left = delta.float().clone()
    covered = left[patch.first_layer :]
    if covered.shape[:2] != (len(patch.segments[0].ranks), patch.tokens):
        raise ShapeMismatch(f"a patch of {patch.tokens} tokens does not fit a deficit {list(delta.shape)}")
    covered -= patch.dense()
    return left


def first_patched_layer(depth: float, layers: int) -> int:
    """First layer of a patch that covers the deepest share `depth` of the layers (rounded up)."""
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
    spread: bool = False,
) -> Patch:
    """Factor a deficit [layers, tokens, features] by truncated SVD, per layer and segment.

    `rank`: factors per layer and segment, capped at min(tokens, features_s); None keeps full rank, exactly.
    `energy`: as few factors, up to `rank`, as keep this share of a segment's squared norm.
    `dtype`: of the stored factors, int8 among them. `depth`: the share of the layers, deepest first, that are covered.
    `basis`: project on its first `rank` directions, within the layers that it covers, instead of decomposing.
    `spread`: `rank` is what the bytes allow on average; which directions have them is decided over all layers and
    segments by their energy, and `energy` is a share of all of it. Of a shared basis every layer keeps the same.
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
    if basis is not None:
        pairs = zip(segments, basis.from_layer(first_layer), strict=True)
        factors = [project(segment, directions[..., :rank], energy) for segment, directions in pairs]
    elif spread:
        factors = spread_factors(segments, rank, energy, dtype.itemsize)
    else:
        factors = [factor(segment, rank, energy) for segment in segments]
    kept = [Directions.of(part.left, part.right, part.ranks).to(dtype, right=basis is None) for part in factors]
    shares = [part.energy for part in factors]
    if dtype is torch.int8:
        shares = [_share(part.dense(), segment) for part, segment in zip(kept, segments, strict=True)]
    widest = max(math.ceil(len(part.scale) / len(part.ranks)) for part in kept)
    return Patch(
        kind=kind,
        rank=widest if rank is None else min(rank, widest),
        segments=tuple(kept),
        energy=tuple(shares),
        first_layer=first_layer,
        basis=None if basis is None else basis.version,
    )


def _share(approximation: Tensor, segment: Tensor) -> float:
    """The share of a segment's squared norm that an approximation, which it uses up, keeps."""
    total = squared_norm(segment)
    return max(0.0, 1.0 - squared_norm(approximation.sub_(segment)) / total) if total else 1.0


def compose(patches: Sequence[Patch], scale: float = 1.0, base: Patch | None = None) -> Patch:
    """scale · Σ patches, as one patch of the summed rank: Δ(B|S) ≈ c·Σ Δ(B|A_i).

    `base`: the patch behind the fixed prefix P alone. Every pair patch behind P and A_i holds its deficit too, so the
    sum counts that once: Δ(B|P) + c·Σ (Δ(B|P,A_i) - Δ(B|P)). A patch and its update are composed with scale 1.
    """
    if not patches:
        raise ShapeMismatch("nothing to compose")
    terms = [(patch, scale) for patch in patches]
    if base is not None:
        terms.append((base, 1.0 - scale * len(patches)))
    for patch, _ in terms:
        patch.check_bound()
    first_layer = min(patch.first_layer for patch, _ in terms)
    same = patches[0].basis is not None and len({(patch.basis, patch.first_layer) for patch, _ in terms}) == 1
    total = _sum_of_coefficients if same else joined  # the same directions: coefficients add up, the rank does not
    segments = []
    for index in range(len(patches[0].segments)):
        parts = [(patch.segments[index].below(patch.first_layer - first_layer), weight) for patch, weight in terms]
        segments.append(total([part.weighted(weight) for part, weight in parts]))
    energy = tuple(map(min, zip(*(patch.energy for patch, _ in terms), strict=True)))
    ranks = [patch.rank for patch, _ in terms]
    return Patch(PatchKind.composed, max(ranks) if same else sum(ranks), tuple(segments), energy, first_layer)


def _sum_of_coefficients(parts: Sequence[Directions]) -> Directions:
    """The sum of several that have the first directions of one shared basis."""
    widest = max(parts, key=lambda part: len(part.scale))
    total = torch.zeros_like(widest.left, dtype=torch.float32)
    for part in parts:
        rows = torch.tensor(widest.starts)[part.layer] + part.place
        total[rows] += part.weighted_left.float() * part.scale[:, None]
    return replace(widest, left=total, scale=torch.ones_like(widest.scale), weights=None)


def set_kind(predecessors: int) -> PatchKind:
    """Patch kind for a set of so many predecessors in any order: one predecessor makes a pair."""
    return PatchKind.pair if predecessors == 1 else PatchKind.orbit
