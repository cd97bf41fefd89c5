"""Arms: ways to assemble the KV of pages computed alone, with or without partial forwards.

| arm | what it does | kind |
|---|---|---|
| exact | full prefill | product |
| prefix | prefix caching: exact, with what it need not compute counted (see `prefix`) | vLLM |
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
| reprefill_p | shallow layers reused, the deepest share p of the layers computed again in context | research |
| layers_p | the deepest share p of the layers exact: no partial prefill can do better | research |
| shallow_p | the first share p of the layers computed in context, the others canonical | research |

A partial prefill (kamera.md App. C.3: "reusing the shallow layers and recomputing only the deep, entangled ones in
context") starts from the hidden states that the page has where the deep layers begin. What is stored of them was
computed alone, so the deep layers' KV is not that of an exact prefill. `layers_p` has that KV, over the same shallow
layers. `shallow_p` is the "shallow-only refresh" of App. D: the first layers see nothing of those above them, so their
KV in context is an exact prefill's.

Arms called `..._within_p` spend up to p % of the page's KV bytes each (Table 6). Of the research arms, those that
choose tokens keep their KV from an exact prefill, which is more than computing them again in context would give.

`orbit` and `composed` are own patches for pages behind more pages than the study reads in every order
(`study.MOST_PREDECESSORS`), which of the splits only `retrieval` has. `orbit` here has seen the tested order among the
others, as a library that learns from what it serves has; `reorder` tries it in orders that it has not seen.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvstore.operator.apply import apply
from kvstore.operator.basis import SharedBasis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind, deficit, form_patch
from kvstore.operator.svd import Factors, factor
from prefill_workers.link.compose import measured_weights, weighted_sum
from prefill_workers.link.token_selection import MEASURED_LAYER, deviations

if TYPE_CHECKING:
    from serving.bench.fidelity.reader import Reader


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
        return deficit(self.exact, self.canonical)


@dataclass(frozen=True, eq=False)
class Repaired:
    """A page as an arm links it: KV, recomputed tokens (sorted), bytes beside the canonical.

    `apart`: in so many layers, the first, tokens that are computed again see their own page only. `refreshed`: so many
    layers, the first, were computed in context to get this KV. `measured`: in so many layers, the first, all tokens of
    the prompt up to this page are computed to choose its tokens, or to weigh its patches.
    """

    kv: Tensor
    again: Tensor | None = None
    nbytes: int = 0
    apart: int = 0
    refreshed: int = 0
    measured: int = 0

    def computed(self, measured: int) -> float:
        """The share of the page that forwards compute for this request, in tokens times layers.

        `measured`: in so many layers, the first, all of its tokens are, for its own sake or that of a page behind it.
        """
        layers, tokens = self.kv.shape[:2]
        again = 0 if self.again is None else len(self.again)
        whole = max(self.refreshed, measured)
        return (again * (layers - max(self.apart, whole)) + tokens * whole) / (tokens * layers)


def computed_share(pages: Sequence[Repaired]) -> float:
    """Share of a prompt's pages that forwards compute, in tokens times layers."""
    nbytes = [page.kv.nbytes for page in pages]
    measured = [max(page.measured for page in pages[i:]) for i in range(len(pages))]
    shares = [page.computed(first) for page, first in zip(pages, measured, strict=True)]
    return sum(map(operator.mul, shares, nbytes)) / sum(nbytes)


RANKS = (4, 8, 16, 32, 64)
TOKEN_ARMS = ("first", "blend", "oracle", "asked")  # of those within a share of the bytes
COMMON = 16  # rank of the arms that are measured at one rank only
_DEEP = 0.5  # share of the layers

Arm = Callable[[PageKV], Repaired]


class Arms:
    """Makes arms for one model, whose hidden states are `hidden` wide."""

    def __init__(self, layout: Layout, dtype: torch.dtype, hidden: int) -> None:
        self.layout, self.dtype, self.hidden = layout, dtype, hidden
        self._cached = lru_cache(maxsize=32)(lambda page, rank: self.formed(page.delta, rank))
        self._projected = lru_cache(maxsize=32)(self._formed_shared)
        self._keys = lru_cache(maxsize=32)(self._key_factors)

    @classmethod
    def of(cls, reader: Reader) -> Arms:
        """Arms for a reader's model."""
        engine = reader.engine
        return cls(engine.layout, engine.dtype, engine.config.model_config.get_hidden_size())

    def own(self, page: PageKV, rank: int) -> Patch:
        """A page's own patch, cut from the widest one with ordered directions.

        A segment at its full rank is not ordered, so that one is cut from a patch where it is at full rank as well.
        """
        if rank > RANKS[-1]:
            return self.formed(page.delta, rank)
        limits = (min(page.canonical.shape[1], segment.features) for segment in self.layout.segments)
        widest = min([RANKS[-1], *(limit - 1 for limit in limits if limit > rank)])
        return self._cached(page, widest).truncated(rank)

    def patched(self, page: PageKV, patch: Patch) -> Repaired:
        """Canonical KV with a patch."""
        return Repaired(apply(page.canonical, patch, 0, self.layout), nbytes=patch.nbytes)

    def formed(self, delta: Tensor, rank: int | None, kind: PatchKind = PatchKind.own) -> Patch:
        """The patch of a deficit."""
        return form_patch(delta, self.layout, rank, kind=kind, dtype=self.dtype)

    def patch(self, rank: int | None) -> Arm:
        """patch_m, at full rank for None."""
        if rank is None:
            return lambda page: self.patched(page, self.formed(page.delta, None))
        return lambda page: self.patched(page, self.own(page, rank))

    def deep(self, rank: int) -> Arm:
        """deep: the patch of this order in the deepest half of the layers only."""
        return lambda page: self.patched(page, self.own(page, rank).from_depth(_DEEP))

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
            patched = self.patched(page, weighted_sum(base, pairs, weights[:, None]))
            return replace(patched, measured=MEASURED_LAYER + 1)

        return arm

    def shared(self, rank: int, basis: SharedBasis) -> Arm:
        """shared: the patch of this order with directions from a basis pooled over other items."""
        return lambda page: self.patched(page, self._projected(page, basis).truncated(rank))

    def _formed_shared(self, page: PageKV, basis: SharedBasis) -> Patch:
        return form_patch(page.delta, self.layout, RANKS[-1], dtype=self.dtype, basis=basis)

    def mpic(self, k: int) -> Arm:
        """mpic_k: the first k tokens of the page computed again in context (mpic.md §4)."""
        return lambda page: Repaired(page.canonical, torch.arange(min(k, page.canonical.shape[1])))

    def cacheblend(self, share: float) -> Arm:
        """cacheblend_r, by the product's own measure."""

        def arm(page: PageKV) -> Repaired:
            chosen = _largest(self._deviation(page), _rounded_up(share, page))
            return Repaired(page.canonical, chosen, measured=MEASURED_LAYER + 1)

        return arm

    def _deviation(self, page: PageKV) -> Tensor:
        layer = [MEASURED_LAYER]
        return deviations(page.exact[layer], page.canonical[layer], 0, self.layout)

    def first(self, k: int) -> Arm:
        """first_k: the first k tokens' KV from an exact prefill."""
        return lambda page: self._exact_at(page, torch.arange(min(k, page.canonical.shape[1])))

    def oracle(self, share: float, asked: bool = False) -> Arm:
        """oracle_p, asked_p."""
        size = _asked_first if asked else _deficit_size
        return lambda page: self._exact_at(page, _largest(size(page), _rounded_up(share, page)))

    def _exact_at(self, page: PageKV, tokens: Tensor) -> Repaired:
        kv = page.canonical.clone()
        kv[:, tokens] = page.exact[:, tokens]
        return Repaired(kv, nbytes=kv[:, tokens].nbytes)

    def lowrank_keys(self, rank: int) -> Arm:
        """lowrank_k_m: of the first segment, which holds the keys (MLA: the latent)."""

        def arm(page: PageKV) -> Repaired:
            kv = page.canonical.clone()
            left, right, *_ = self._keys(page)
            kv[..., : right.shape[1]] = (left[..., :rank] @ right[..., :rank].mT).to(kv.dtype)
            kept = rank * (left.shape[1] + right.shape[1]) * kv.shape[0] * kv.element_size()
            return Repaired(kv, nbytes=kept)

        return arm

    def _key_factors(self, page: PageKV) -> Factors:
        keys = page.exact[..., : self.layout.segments[0].features].float()
        return factor(keys, min(keys.shape[1:]) - 1)  # at full rank they would not be ordered

    def deep_layers(self, share: float) -> Arm:
        """layers_p: the deepest share p of the layers exact; no partial prefill can do better."""
        first = self.layout.layers - round(share * self.layout.layers)

        def arm(page: PageKV) -> Repaired:
            kv = torch.cat([page.canonical[:first], page.exact[first:]])
            return Repaired(kv, nbytes=kv[first:].nbytes)

        return arm

    def shallow_layers(self, share: float) -> Arm:
        """shallow_p: the first share p of the layers computed in context, the others canonical."""
        count = round(share * self.layout.layers)
        return lambda page: Repaired(torch.cat([page.exact[:count], page.canonical[count:]]), refreshed=count)

    def reprefill(self, share: float) -> Arm:
        """reprefill_p. What it keeps is the page's hidden states where the deep layers begin."""
        apart = self.layout.layers - round(share * self.layout.layers)

        def arm(page: PageKV) -> Repaired:
            tokens = page.canonical.shape[1]
            kept = tokens * self.hidden * page.canonical.element_size()
            return Repaired(page.canonical, torch.arange(tokens), kept, apart)

        return arm

    def standard(self, basis: SharedBasis) -> Mapping[str, Arm]:
        """The arms of the main tables, by name."""
        found: dict[str, Arm] = {"blind": lambda page: Repaired(page.canonical)}
        found |= {f"patch_{rank}": self.patch(rank) for rank in RANKS}
        found |= {"orbit": self.orbit(COMMON), "deep": self.deep(COMMON), "composed": self.composed(COMMON)}
        found |= {"shared": self.shared(COMMON, basis)}
        found |= {f"mpic_{k}": self.mpic(k) for k in (8, 32)}
        found |= {f"cacheblend_{percent}": self.cacheblend(percent / 100) for percent in (15, 30, 50)}
        found |= {"first_32": self.first(32)}
        found |= {f"oracle_{percent}": self.oracle(percent / 100) for percent in (15, 50)}
        found |= {"asked_15": self.oracle(0.15, asked=True)}
        found |= {"lowrank_k_16": self.lowrank_keys(16)}
        found |= {"shallow_50": self.shallow_layers(0.5), "layers_50": self.deep_layers(0.5)}
        return found

    def within(self, percent: int, basis: SharedBasis) -> Mapping[str, Arm]:
        """Arms that spend at most this share of a page's KV bytes; rank RANKS[-1] at most."""
        share = percent / 100

        def widest(rank: Callable[[PageKV, int], Patch]) -> Arm:
            def arm(page: PageKV) -> Repaired:
                allowed = share * page.canonical.nbytes
                count = bisect_right(range(1, RANKS[-1] + 1), allowed, key=lambda r: rank(page, r).nbytes)
                return self.patched(page, rank(page, count)) if count else Repaired(page.canonical)

            return arm

        def tokens(size: Callable[[PageKV], Tensor]) -> Arm:
            return lambda page: self._exact_at(page, _largest(size(page), int(share * page.canonical.shape[1])))

        def keys(page: PageKV) -> Repaired:
            count, features = page.canonical.shape[1:]
            return self.lowrank_keys(int(share * count * features / (count + self.layout.segments[0].features)))(page)

        found = {
            "patch": widest(self.own),
            "deep": widest(lambda page, rank: self.own(page, rank).from_depth(_DEEP)),
            "shared": widest(lambda page, rank: self._projected(page, basis).truncated(rank)),
            "first": tokens(lambda page: -torch.arange(page.canonical.shape[1], dtype=torch.float32)),
            "blend": tokens(self._deviation),
            "oracle": tokens(_deficit_size),
            "asked": tokens(_asked_first),
            "lowrank_k": keys,
        }
        return {f"{name}_within_{percent}": arm for name, arm in found.items()}


def _deficit_size(page: PageKV) -> Tensor:
    return page.delta.square().sum((0, 2)).sqrt()


def _asked_first(page: PageKV) -> Tensor:
    size = _deficit_size(page)
    return size if page.asked is None else size + page.asked * (size.max() + 1)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest, ascending."""
    return sizes.topk(count).indices.sort().values


def _rounded_up(share: float, page: PageKV) -> int:
    return math.ceil(share * page.canonical.shape[1] - 1e-9)
