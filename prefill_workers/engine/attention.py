"""First-layer attention of tokens to earlier ones, from queries and keys, in fp32.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from prefill_workers.sequence import Run

_SCORES = 1 << 24  # that are held at once, 4 bytes each


def paid(queries: Tensor, keys: Tensor, first: int, scale: float) -> Iterator[Tensor]:
    """Attention [heads, queries of a head, tokens, stored], fp32, of some tokens at a time.

    Args:
        queries: [tokens, heads · queries of a head · width] of tokens that follow one another.
        keys: [stored, heads, width] fp32 of all tokens up to the last of these, or further.
        first: the index of the first of these tokens among the stored ones.
        scale: of the products of queries and keys.
    """
    stored, heads, width = keys.shape
    grouped = queries.float().unflatten(1, (heads, -1, width)) * scale
    at = torch.arange(stored, device=keys.device)
    for part in grouped.split(max(1, _SCORES // (grouped.shape[1] * grouped.shape[2] * stored))):
        scores = torch.einsum("nkgd,lkd->kgnl", part, keys)
        yield scores.masked_fill_(at > at[first : first + len(part), None], -torch.inf).softmax(-1)
        first += len(part)


def attended(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention output [tokens, heads · queries of a head · width] fp32 of a sequence's start.

    `values`: [stored, heads, width] fp32; the others as for `paid`.
    """
    parts = [torch.einsum("kgnl,lkd->nkgd", part, values) for part in paid(queries, keys, 0, scale)]
    return torch.cat(parts).flatten(1)


def paid_to(others: Sequence[Run], queries: Tensor, keys: Tensor, first: int, scale: float) -> Tensor:
    """`attention_shares` of stretches of stored tokens, [2, others, tokens].

    Other arguments as for `paid`.
    """
    member = keys.new_zeros(len(keys), len(others))
    for i, other in enumerate(others):
        member[other.start : other.stop, i] = 1.0
    shares = []
    for attention in paid(queries, keys, first, scale):
        masses = (attention @ member).flatten(0, 1).permute(2, 0, 1)
        shares.append(attention_shares(masses / (1 - masses.sum(0)).clamp_min(1e-6)))
    return torch.cat(shares, -1)


def attention_shares(ratios: Tensor) -> Tensor:
    """Antecedents' attention mass, together and alone: [2, pairs, tokens], summed over heads.

    `ratios`: r_i = Z_i / Z_B of the first layer, [pairs, heads, tokens].
    """
    return torch.stack([ratios / (1 + ratios.sum(0)), ratios / (1 + ratios)]).sum(2)
