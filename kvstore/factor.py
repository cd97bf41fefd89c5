"""Low-rank factors of a deficit, all layers in one call.

| way | when | cost against a full SVD (`orbitserve bench patch-form`) |
|---|---|---|
| identity | full rank | none: any complete basis is exact |
| block Krylov | the Krylov space is at most half as wide as the deficit | about a tenth |
| Gram matrix + eigh | otherwise | about half |

All of them find directions only. The coefficients are always the projection on those directions, so what the directions
span is reproduced to rounding, and the energy that is reported is the energy that the factors keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_OVERSAMPLING = 8
_KRYLOV_BLOCKS = 4  # 3 lose up to 6e-5 of the energy on spectra like a deficit's, 4 lose 4e-7, which is fp32 rounding


class Factors(NamedTuple):
    """delta ≈ left · rightᵀ per layer, and the share of the squared norm that is kept, 0 to 1."""

    left: Tensor  # [layers, tokens, rank]
    right: Tensor  # [layers, features, rank]
    energy: float


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
    if features <= tokens:
        return project(delta, leading_directions(delta, wanted), energy)
    right, left, kept = project(delta.mT, leading_directions(delta.mT, wanted), energy)
    return Factors(left, right, kept)


def project(delta: Tensor, directions: Tensor, energy: float | None = None) -> Factors:
    """The best factors of `delta` [layers, m, n] on given orthonormal directions [layers, n, r], strongest first.

    With `energy`, on as few of them as keep that share of the squared norm, or on all.
    """
    coefficients = delta @ directions
    total = float(delta.square().sum(-1).double().sum())
    shares = coefficients.double().square().sum((0, 1)).cumsum(0) / total if total else torch.ones(directions.shape[2])
    if energy is not None:
        enough = int((shares < energy * (1 - 1e-12)).sum()) + 1
        coefficients, directions = coefficients[..., :enough].contiguous(), directions[..., :enough].contiguous()
    return Factors(coefficients, directions, min(float(shares[coefficients.shape[2] - 1]), 1.0))


def leading_directions(tall: Tensor, rank: int) -> Tensor:
    """The `rank` leading right singular vectors [layers, n, rank] of `tall` [layers, m, n], m >= n, strongest first."""
    krylov = _KRYLOV_BLOCKS * (rank + _OVERSAMPLING)
    return krylov_directions(tall, rank) if 2 * krylov <= tall.shape[2] else gram_directions(tall, rank)


def gram_directions(tall: Tensor, rank: int) -> Tensor:
    """`leading_directions` by all eigenvectors of the Gram matrix, in fp64: squaring costs half of the digits."""
    gram = tall.mT.double() @ tall.double()
    return torch.linalg.eigh(gram).eigenvectors[..., -rank:].flip(-1).float().contiguous()


def krylov_directions(tall: Tensor, rank: int) -> Tensor:
    """`leading_directions` within a block Krylov space of the Gram matrix (Musco and Musco 2015, algorithm 2).

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
    within = torch.linalg.eigh(space.mT @ (gram @ space)).eigenvectors
    return space @ within[..., -rank:].flip(-1)
