"""The form that a deployment keeps its patches in: how much of a deficit, as what, under which key, in how many bytes.

| form | stored per patch | per model |
|---|---|---|
| rank m | left [layers, tokens, m] and right [layers, features, m] per segment | - |
| energy | the same with the smallest m that keeps so much of the norm, at most `rank` | - |
| depth < 1 (deep-only) | the same for the deepest layers only | - |
| shared basis | left only | right, once (`SharedBasis`) |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore.basis import SharedBasis
from kvstore.chunk import patch_key
from kvstore.layout import Layout
from kvstore.patch import Patch, PatchKind, first_patched_layer, form_patch


class Footprint(NamedTuple):
    """Bytes of a patch: `own` for every patch, `shared` once per model, `canonical` of the KV that it patches."""

    own: int
    shared: int
    canonical: int

    def per_patch(self, patches: int) -> float:
        """Bytes of one patch when the shared ones are spread over so many."""
        return self.own + self.shared / patches


@dataclass(frozen=True)
class PatchForm:
    """Rank, energy, depth and basis of `kvstore.patch.form_patch`; part of a patch's key."""

    rank: int | None = 32
    energy: float | None = None
    depth: float = 1.0
    basis: SharedBasis | None = None

    def form(self, delta: Tensor, layout: Layout, kind: PatchKind, dtype: torch.dtype = torch.float32) -> Patch:
        """The patch of a deficit [layers, tokens, features]."""
        return form_patch(delta, layout, self.rank, self.energy, kind, dtype, depth=self.depth, basis=self.basis)

    def key(self, canonical: str, antecedent: str, kind: PatchKind) -> str:
        """Key of a patch of this form (see `kvstore.chunk`)."""
        basis = "" if self.basis is None else self.basis.version
        return patch_key(canonical, antecedent, kind, self.rank, self.energy, self.depth, basis)

    def footprint(self, tokens: int, layout: Layout, dtype: torch.dtype, parts: int = 1) -> Footprint:
        """Bytes of a patch for a chunk of `tokens` tokens; with `energy`, at most so many.

        `parts`: of how many patches a composed one consists. The kind makes no other difference.
        """
        first_layer = first_patched_layer(self.depth, layout.layers)
        if self.basis is not None:
            first_layer = max(first_layer, self.basis.first_layer)
        own = 0
        for index, segment in enumerate(layout.segments):
            limit = min(tokens, segment.features)
            if self.basis is not None:
                limit = self.basis.directions[index].shape[2]
            rank = limit if self.rank is None else min(self.rank, limit)
            rows = tokens if self.basis is not None else tokens + segment.features
            own += (layout.layers - first_layer) * rows * rank * dtype.itemsize
        shared = 0 if self.basis is None else self.basis.nbytes
        return Footprint(parts * own, shared, tokens * layout.bytes_per_token(dtype))
