"""Low-rank factors of a deficit, all layers in one call.

| way | when | cost against a full SVD (benchmark `patch-form`) |
|---|---|---|
| identity | full rank | none: any complete basis is exact |
| block Krylov | the Krylov space is at most two thirds as wide as the deficit | a tenth to a third |
| Gram matrix + eigh | otherwise | about a half |

All of them find directions only. The coefficients are always the projection on those directions, so what the directions
span is reproduced to rounding, and the energy that is reported is the energy that the factors keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_OVERSAMPLING = 8
_MOST = 2  # times the average rank, the most that a layer has of directions that are spread
SCALE_BYTES = 4  # of a direction's scale
_KRYLOV_BLOCKS = 4  # 3 lose up to 6e-5 of the energy on spectra like a deficit's, 4 lose 4e-7, which is fp32 rounding


class Factors(NamedTuple):
    """delta ≈ left · rightᵀ per layer, and the share of the squared norm that is kept, 0 to 1."""

    left: Tensor  # [layers, tokens, rank]
    right: Tensor  # [layers, features, rank]
    energy: float
    ranks: Tensor | None = None  # [layers]: how many of the directions, the first ones, each layer keeps; None: all


def factor(delta: Tensor, rank: int | None = None, energy: float | None = None) -> Factors:
    """The best factors of `delta` [layers, tokens, features] fp32 of one rank over all layers.

    `rank`: at most this many directions, capped at min(tokens, features); None: no cap, and without `energy` exact.
    `energy`: as few of them as keep this share of the squared norm over all layers.
    """
    layers, tokens, features = delta.shape
    limit = min(tokens, features)
    wanted = limit if rank is None else min(rank, limit)
    if wanted == limit and energy is None:
        identity = torch.eye(limit, device=delta.device).expand(layers, limit, limit)
        return Factors(delta, identity, 1.0) if features <= tokens else Factors(identity, delta.mT, 1.0)
    return _ordered(delta, wanted, energy)


def spread_factors(segments: Sequence[Tensor], rank: int | None, energy: float | None, itemsize: int) -> list[Factors]:
    """Factors [layers, tokens, features_s] of all segments, kept by energy per byte.

    The first layer gets next to none: its KV follows from the token alone, so its deficit is rounding, in every model.

    `rank`: as many in all as if every layer and segment kept so many, at most twice as many in one layer.
    `energy`: as few as keep this share of the squared norm over all layers and segments; neither: all, exactly.
    `itemsize`: bytes of a number of the factors as they are stored.
    """
    if rank is None and energy is None:
        return [factor(segment) for segment in segments]
    limits = [min(segment.shape[1:]) for segment in segments]
    widest = [limit if rank is None else min(_MOST * rank, limit) for limit in limits]
    found = [_ordered(segment, wanted) for segment, wanted in zip(segments, widest, strict=True)]
    prices = [itemsize * sum(segment.shape[1:]) + SCALE_BYTES for segment in segments]
    budget = needed = math.inf
    if rank is not None:
        even = sum(min(rank, limit) * price for limit, price in zip(limits, prices, strict=True))
        budget = even * len(segments[0])
    if energy is not None:
        needed = energy * (1 - 1e-12) * sum(map(squared_norm, segments))
    gains = [(_energies(part.left) * _energies(part.right)).cpu() for part in found]
    ranks = _most_for_their_bytes(gains, prices, budget, needed)
    return [
        part._replace(ranks=count, energy=_share_of_first(gain, count, segment))
        for part, gain, count, segment in zip(found, gains, ranks, segments, strict=True)
    ]


def _most_for_their_bytes(gains: Sequence[Tensor], prices: Sequence[int], budget: float, needed: float) -> list[Tensor]:
    """Number of directions [layers] to keep per segment: those with the largest gain per byte.

    `gains`: per segment, what each direction [layers, rank] keeps of the squared norm, falling; `prices`: bytes of a
    direction of each segment; `budget`: bytes in all; `needed`: of the gains, where fewer bytes are enough.
    """
    gain = torch.cat([part.flatten() for part in gains])
    price = torch.cat([torch.full((part.numel(),), price) for part, price in zip(gains, prices, strict=True)])
    order = (gain / price).argsort(descending=True, stable=True)
    before = gain[order].cumsum(0) - gain[order]
    chosen = order[(price[order].cumsum(0) <= budget) & (before < needed) & (gain[order] > 0)]
    kept = torch.zeros(len(order), dtype=torch.int64)
    kept[chosen if len(chosen) else order[:1]] = 1  # a patch of nothing has a direction too
    parts = kept.split([part.numel() for part in gains])
    return [part.view_as(gain).sum(1) for part, gain in zip(parts, gains, strict=True)]


def _share_of_first(gain: Tensor, ranks: Tensor, segment: Tensor) -> float:
    """The share of a segment's squared norm that the first `ranks` [layers] directions keep."""
    kept = gain[torch.arange(gain.shape[1]) < ranks[:, None]].sum()
    total = squared_norm(segment)
    return min(float(kept) / total, 1.0) if total else 1.0


def squared_norm(delta: Tensor) -> float:
    """The squared norm of a deficit [layers, tokens, features], summed in fp64."""
    return float(torch.linalg.vector_norm(delta, dim=-1).double().square().sum())


def _energies(vectors: Tensor) -> Tensor:
    """Squared column norms of [layers, m, n]: [layers, n] fp64, without a temporary."""
    return torch.linalg.vector_norm(vectors, dim=1).double().square()


def _ordered(delta: Tensor, rank: int, energy: float | None = None) -> Factors:
    """`factor` by decomposition also at full rank: strongest direction first."""
    if delta.shape[2] <= delta.shape[1]:
        return project(delta, leading_directions(delta, rank), energy)
    right, left, kept, _ = project(delta.mT, leading_directions(delta.mT, rank), energy)
    return Factors(left, right, kept)


def project(delta: Tensor, directions: Tensor, energy: float | None = None) -> Factors:
    """Best factors of `delta` [layers, m, n] on directions [layers, n, r], strongest first.

    With `energy`, on as few of them as keep that share of the squared norm, or on all.
    """
    coefficients = delta @ directions
    total = squared_norm(delta)
    shares = _energies(coefficients).sum(0).cumsum(0) / total if total else torch.ones(directions.shape[2])
    if energy is not None:
        enough = int((shares < energy * (1 - 1e-12)).sum()) + 1
        coefficients, directions = coefficients[..., :enough].contiguous(), directions[..., :enough].contiguous()
    return Factors(coefficients, directions, min(float(shares[coefficients.shape[2] - 1]), 1.0))


def leading_directions(tall: Tensor, rank: int) -> Tensor:
    """The `rank` leading right singular vectors [layers, n, rank] of `tall` [layers, m, n].

    m >= n; strongest first.
    """
    krylov = _KRYLOV_BLOCKS * (rank + _OVERSAMPLING)
    return krylov_directions(tall, rank) if 3 * krylov <= 2 * tall.shape[2] else gram_directions(tall, rank)


def gram_directions(tall: Tensor, rank: int) -> Tensor:
    """`leading_directions` by all eigenvectors of the Gram matrix.

    Squaring costs half of the digits: in fp32 directions with less than about 1e-6 of the strongest one's energy are
    found among each other, not apart.
    """
    return _eigenvectors(tall.mT @ tall)[..., -rank:].flip(-1).contiguous()


def krylov_directions(tall: Tensor, rank: int) -> Tensor:
    """`leading_directions` within a block Krylov space of the Gram matrix.

    Musco and Musco 2015, algorithm 2.

    A subspace iteration throws its earlier iterates away; keeping them makes the same products count more than once.
    Only white noise, which no few directions describe, is found less well than it could be: by 2 % of the energy kept.
    """
    layers, _, features = tall.shape
    generator = torch.Generator().manual_seed(0)  # the same deficit must give the same patch
    start = torch.randn(features, rank + _OVERSAMPLING, generator=generator).to(tall.device)
    gram = tall.mT @ tall
    blocks = [torch.linalg.qr(gram @ start.expand(layers, -1, -1)).Q]
    while len(blocks) < _KRYLOV_BLOCKS:
        blocks.append(torch.linalg.qr(gram @ blocks[-1]).Q)
    space = torch.linalg.qr(torch.cat(blocks, 2)).Q
    within = _eigenvectors(space.mT @ (gram @ space))
    return space @ within[..., -rank:].flip(-1)


def _eigenvectors(symmetric: Tensor) -> Tensor:
    """Eigenvectors of symmetric fp32 matrices [layers, n, n], largest eigenvalues last.

    LAPACK gives up, once in many thousand calls, on a matrix that has one eigenvalue many times over in fp32, such as
    the zeros of a deficit of low rank. In fp64 their rounding differs and they are told apart.
    """
    try:
        return torch.linalg.eigh(symmetric).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.linalg.eigh(symmetric.double()).eigenvectors.to(symmetric.dtype)
