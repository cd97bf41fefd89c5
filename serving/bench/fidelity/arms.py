"""The arms: ways to put together the KV of pages that were computed alone, without or with part of a forward.

| arm | what it does | kind |
|---|---|---|
| exact | full prefill | product |
| blind | canonical KV, relocated (`full-reuse`) | product |
| patch_m | with the rank-m patch of this order (kamera.md eq. 1) | product |
| orbit | with the rank-16 patch of the mean deficit over the predecessors' orders | product |
| composed | with the weighted sum of rank-16 pair patches, as the linker measures it | product |
| mpic_k | the first k tokens of every page computed again in context (mpic.md §4) | product |
| cacheblend_r | the r % of tokens whose KV deviates most in the second layer, computed again in context | product |
| deep | patch_16 in the deepest half of the layers only | product |
| shared | patch_16 with directions from a basis pooled over other items | product |
| first_k | the first k tokens' KV from an exact prefill | research |
| oracle_p | the share p of tokens with the largest true deficit, their KV from an exact prefill | research |
| asked_p | the same, but tokens that show what is asked for come first (query-aware) | research |
| lowrank_k_m | keys from the rank-m approximation of the exact keys, values canonical (ShadowKV-style) | research |
| layers_p | the deepest share p of the layers exact: no partial prefill can do better | research |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvstore.basis import SharedBasis
from kvstore.layout import Layout
from kvstore.patch import Patch, PatchKind, apply, form_patch
from prefill_workers.composing import measured_weights, weighted_sum
from prefill_workers.selection import MEASURED_LAYER, deviations


@dataclass(frozen=True, eq=False)
class PageKV:
    """One page of one item. Tensors are [layers, tokens, features] in the canonical frame.

    `exact` is KV(B|A); `orbit` the mean deficit over the orders of A; `pairs` the deficits behind each predecessor
    alone and `base` that behind the fixed text alone, where they were asked for. `asked` [tokens]: whether a token
    shows what the question is about.
    """

    canonical: Tensor
    exact: Tensor
    orbit: Tensor | None = None
    pairs: tuple[Tensor, ...] = ()
    base: Tensor | None = None
    asked: Tensor | None = None

    @property
    def delta(self) -> Tensor:
        """Δ of this order (kamera.md eq. 2)."""
        return self.exact.float() - self.canonical.float()


@dataclass(frozen=True, eq=False)
class Repaired:
    """A page as an arm links it: KV, tokens that are computed again (sorted), bytes kept beside the canonical KV."""

    kv: Tensor
    again: Tensor | None = None
    nbytes: int = 0


RANKS = (4, 8, 16, 32, 64)
COMMON = 16  # rank of the arms that are measured at one rank only

Arm = Callable[[PageKV], Repaired]


class Arms:
    """Makes arms for one model."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._widest = lru_cache(maxsize=64)(self._formed_widest)

    def _formed_widest(self, page: PageKV) -> Patch:
        limits = (min(page.canonical.shape[1], segment.features) for segment in self.layout.segments)
        return self.formed(page.delta, min(RANKS[-1], min(limits) - 1))

    def own(self, page: PageKV, rank: int) -> Patch:
        """The own patch of a page, cut from the widest that is ordered: one of full rank is not."""
        widest = self._widest(page)
        return widest.truncated(rank) if rank <= widest.rank else self.formed(page.delta, rank)

    def patched(self, page: PageKV, patch: Patch) -> Repaired:
        """Canonical KV with a patch."""
        return Repaired(apply(page.canonical, patch, 0, self.layout), nbytes=patch.nbytes)

    def formed(self, delta: Tensor, rank: int | None, kind: PatchKind = PatchKind.own) -> Patch:
        """The patch of a deficit."""
        return form_patch(delta, self.layout, rank, kind=kind, dtype=self.dtype)

    def patch(self, rank: int | None) -> Arm:
        """patch_m, at full rank for None."""
        if rank is None or rank > RANKS[-1]:
            return lambda page: self.patched(page, self.formed(page.delta, rank))
        return lambda page: self.patched(page, self.own(page, rank))

    def deep(self, rank: int, depth: float = 0.5) -> Arm:
        """deep."""
        return lambda page: self.patched(page, self.own(page, rank).from_depth(depth))

    def orbit(self, rank: int) -> Arm:
        """orbit; the own patch where there is but one order."""

        def arm(page: PageKV) -> Repaired:
            if page.orbit is None:
                return self.patched(page, self.own(page, rank))
            return self.patched(page, self.formed(page.orbit, rank, PatchKind.orbit))

        return arm

    def composed(self, rank: int) -> Arm:
        """composed; the own patch where there is but one antecedent."""

        def arm(page: PageKV) -> Repaired:
            if not page.pairs or page.base is None:
                return self.patched(page, self.own(page, rank))
            pairs = [self.formed(pair, rank, PatchKind.pair) for pair in page.pairs]
            base = self.formed(page.base, rank)
            weights = measured_weights(base, pairs, page.delta[[MEASURED_LAYER]])
            return self.patched(page, weighted_sum(base, pairs, weights[:, None]))

        return arm

    def shared(self, rank: int, basis: SharedBasis) -> Arm:
        """shared."""

        def arm(page: PageKV) -> Repaired:
            patch = form_patch(page.delta, self.layout, rank, dtype=self.dtype, basis=basis)
            return self.patched(page, patch)

        return arm

    def mpic(self, k: int) -> Arm:
        """mpic_k."""
        return lambda page: Repaired(page.canonical, torch.arange(min(k, page.canonical.shape[1])))

    def cacheblend(self, share: float) -> Arm:
        """cacheblend_r, by the product's own measure."""

        def arm(page: PageKV) -> Repaired:
            layer = [MEASURED_LAYER]
            deviation = deviations(page.exact[layer], page.canonical[layer], 0, self.layout)
            return Repaired(page.canonical, _largest(deviation, share))

        return arm

    def first(self, k: int) -> Arm:
        """first_k."""
        return lambda page: self._exact_at(page, torch.arange(min(k, page.canonical.shape[1])))

    def oracle(self, share: float, asked: bool = False) -> Arm:
        """oracle_p, asked_p."""

        def arm(page: PageKV) -> Repaired:
            size = page.delta.square().sum((0, 2)).sqrt()
            if asked and page.asked is not None:
                size = size + page.asked * (size.max() + 1)
            return self._exact_at(page, _largest(size, share))

        return arm

    def _exact_at(self, page: PageKV, tokens: Tensor) -> Repaired:
        kv = page.canonical.clone()
        kv[:, tokens] = page.exact[:, tokens]
        return Repaired(kv, nbytes=kv[:, tokens].nbytes)

    def lowrank_keys(self, rank: int) -> Arm:
        """lowrank_k_m: of the first segment, which holds the keys (MLA: the latent)."""

        def arm(page: PageKV) -> Repaired:
            kv = page.canonical.clone()
            width = self.layout.segments[0].features
            u, s, v = torch.linalg.svd(page.exact[..., :width].float(), full_matrices=False)
            kv[..., :width] = ((u[..., :rank] * s[..., None, :rank]) @ v[:, :rank]).to(kv.dtype)
            kept = rank * (kv.shape[1] + width) * kv.shape[0] * kv.element_size()
            return Repaired(kv, nbytes=kept)

        return arm

    def deep_layers(self, share: float) -> Arm:
        """layers_p."""

        def arm(page: PageKV) -> Repaired:
            kv = page.canonical.clone()
            first = self.layout.layers - round(share * self.layout.layers)
            kv[first:] = page.exact[first:]
            return Repaired(kv, nbytes=kv[first:].nbytes)

        return arm

    def standard(self, basis: SharedBasis | None) -> Mapping[str, Arm]:
        """The arms of the main tables, by name."""
        found: dict[str, Arm] = {"blind": lambda page: Repaired(page.canonical)}
        found |= {f"patch_{rank}": self.patch(rank) for rank in RANKS}
        found |= {"orbit": self.orbit(COMMON), "deep": self.deep(COMMON), "composed": self.composed(COMMON)}
        if basis is not None:
            found["shared"] = self.shared(COMMON, basis)
        found |= {f"mpic_{k}": self.mpic(k) for k in (8, 32)}
        found |= {f"cacheblend_{percent}": self.cacheblend(percent / 100) for percent in (15, 30, 50)}
        found |= {"first_32": self.first(32)}
        found |= {f"oracle_{percent}": self.oracle(percent / 100) for percent in (15, 50)}
        found |= {"asked_15": self.oracle(0.15, asked=True)}
        found |= {"lowrank_k_16": self.lowrank_keys(16), "layers_50": self.deep_layers(0.5)}
        return found


def _largest(sizes: Tensor, share: float) -> Tensor:
    """Indices of the largest share of `sizes`, rounded up, ascending."""
    count = math.ceil(share * len(sizes) - 1e-9)
    return sizes.topk(count).indices.sort().values
