"""Patch form of a deployment: rank, precision and sharing of factors, keys and sizes.

| form | stored per patch | per model |
|---|---|---|
| rank m | m directions per layer and segment: a left factor [tokens], a right one [features] and a scale | - |
| spread | as many in all, where they hold most energy for their bytes | - |
| energy | as few of them as keep so much of the norm, at most `rank` | - |
| depth < 1 (deep-only) | the same for the deepest layers only | - |
| shared basis | left and scale only | right, once (`SharedBasis`) |
| factors | each number of a factor in 8 bits (`int8`) or in the model's dtype (`model`) | fp32 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore.operator.basis import SharedBasis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind, first_patched_layer, form_patch
from kvstore.operator.svd import SCALE_BYTES
from kvstore.records.keys import patch_key
from kvstore.settings import FactorType


class Footprint(NamedTuple):
    """Bytes of a patch: `own` each, `shared` once per model, `canonical` of the KV it patches."""

    own: int
    shared: int
    canonical: int

    def per_patch(self, patches: int) -> float:
        """Bytes of one patch when the shared ones are spread over so many."""
        return self.own + self.shared / patches


@dataclass(frozen=True)
class PatchForm:
    """Parameters of `kvstore.operator.patch.form_patch`; part of a patch's key."""

    rank: int | None = 32
    energy: float | None = None
    depth: float = 1.0
    basis: SharedBasis | None = None
    factors: FactorType = FactorType.int8
    spread: bool = True

    def form(self, delta: Tensor, layout: Layout, kind: PatchKind, dtype: torch.dtype = torch.float32) -> Patch:
        """The patch of a deficit [layers, tokens, features] of a model of this dtype."""
        return form_patch(delta, layout, self.rank, self.energy, kind, self._stored_as(dtype), depth=self.depth,
                          basis=self.basis, spread=self.spread)  # fmt: skip

    def key(self, canonical: str, antecedent: str, kind: PatchKind) -> str:
        """Key of a patch of this form (see `kvstore.records.keys`)."""
        basis = "" if self.basis is None else self.basis.version
        size = (self.rank, self.energy, self.depth, basis, self.factors, self.spread)
        return patch_key(canonical, antecedent, kind, *size)

    def first_layer(self, layers: int) -> int:
        """The first layer that patches of a model of so many layers cover."""
        first = first_patched_layer(self.depth, layers)
        return first if self.basis is None else max(first, self.basis.first_layer)

    def footprint(self, tokens: int, layout: Layout, dtype: torch.dtype, parts: int = 1) -> Footprint:
        """Bytes of a patch for a chunk of `tokens` tokens; an upper bound with `energy` or `spread`.

        `parts`: of how many patches a composed one consists. The kind makes no other difference.
        """
        own, first_layer = 0, self.first_layer(layout.layers)
        for index, segment in enumerate(layout.segments):
            limit = min(tokens, segment.features)
            if self.basis is not None:
                limit = self.basis.directions[index].shape[2]
            rank = limit if self.rank is None else min(self.rank, limit)
            rows = tokens if self.basis is not None else tokens + segment.features
            own += (layout.layers - first_layer) * rank * (rows * self._stored_as(dtype).itemsize + SCALE_BYTES)
        shared = 0 if self.basis is None else self.basis.nbytes
        return Footprint(parts * own, shared, tokens * layout.bytes_per_token(dtype))

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if self.factors is FactorType.int8 else dtype
