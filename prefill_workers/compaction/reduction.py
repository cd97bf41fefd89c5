"""Anchors, buckets and means of KV entries (elastic_cache.md eq. 1 to 3), and coverage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from prefill_workers.compaction.plan import CompactionPlan


def importance(attention: Iterable[Tensor]) -> Tensor:
    """Importance [stored] of tokens: attention summed over queries, mean over heads (eq. 1).

    `attention`: parts of it, each [heads, queries of a head, tokens, stored].
    """
    return torch.stack([part.sum(2).flatten(0, 1).mean(0) for part in attention]).sum(0)


def coverage(rows: Tensor, plan: CompactionPlan, over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Scores [tokens] by which the best of every group cover its `rows` [tokens, features].

    Farthest point first (Gonzalez 1985): each next token is the one farthest from all that were chosen. Within a factor
    of two no choice of as many leaves less between a token and the nearest that stays. Groups advance side by side.

    Args:
        over_ranks: sum of a tensor over tensor-parallel ranks, each of which has some features.
    """
    lengths = torch.tensor([len(group) for group in plan.groups], device=rows.device)
    width = int(lengths.max())
    at = torch.tensor([group.start for group in plan.groups], device=rows.device)[:, None]
    at = at + torch.arange(width, device=rows.device).minimum(lengths[:, None] - 1)
    is_padding = torch.arange(width, device=rows.device) >= lengths[:, None]
    values = rows[at].float().masked_fill(is_padding[..., None], 0)
    values -= values.sum(1, keepdim=True) / lengths[:, None, None]
    products = over_ranks(values @ values.mT)  # [groups, width, width]
    norms = products.diagonal(dim1=1, dim2=2)
    share = (plan.kept - plan.tokens + int(lengths.sum())) / int(lengths.sum())
    nearest = norms.masked_fill(is_padding, -torch.inf)  # the first is farthest from the mean
    apart = torch.full_like(nearest, torch.inf).masked_fill(is_padding, -torch.inf)
    scores = torch.zeros_like(nearest)
    for step in range(math.ceil(share * width) + 1):
        chosen = nearest.argmax(1, keepdim=True)
        scores.scatter_reduce_(1, chosen, 1 - step / lengths[:, None].float(), "amax")
        to_chosen = products.gather(1, chosen[..., None].expand(-1, 1, width))[:, 0]
        apart = apart.minimum(norms + norms.gather(1, chosen) - 2 * to_chosen).scatter(1, chosen, -1.0)
        nearest = apart
    found = torch.zeros(plan.tokens, device=rows.device)
    return found.index_put_((at[~is_padding],), scores[~is_padding])


def anchors(scores: Tensor, plan: CompactionPlan) -> Tensor:
    """Tokens [layers, kept], ascending, that keep an entry, by `scores` [layers, tokens].

    All that may not be reduced, of a plan that merges at least one in every run, and else the most important.
    """
    scores = scores.float().clone()
    reducible = torch.zeros(plan.tokens, dtype=torch.bool, device=scores.device)
    for run in plan.reducible:
        reducible[run.start : run.stop] = True
        if plan.merges:
            best = scores[:, run.start : run.stop].argmax(1, keepdim=True) + run.start
            scores.scatter_(1, best, torch.inf)
    if plan.first_stays:
        scores[:, 0] = torch.inf
    scores[:, ~reducible] = torch.inf
    return scores.topk(plan.kept).indices.sort().values


def buckets(anchors: Tensor, plan: CompactionPlan) -> Tensor:
    """Bucket [layers, tokens] of every token: its nearest anchor in its own run (eq. 2).

    The border between two is the floor of their midpoint, which belongs to the left one. (As printed, the last bucket
    begins at a token that the one before it also holds: here it begins behind that.)
    """
    layers, n = len(anchors), plan.tokens
    tokens = torch.arange(n, device=anchors.device)
    start, stop = tokens.clone(), tokens + 1
    for run in plan.reducible:
        start[run.start : run.stop], stop[run.start : run.stop] = run.start, run.stop
    before = torch.zeros(layers, n + 1, dtype=torch.long, device=anchors.device)
    before[:, 1:].scatter_(1, anchors, 1)
    before = before.cumsum(1)  # anchors among the first t tokens
    nearest = torch.searchsorted((anchors[:, :-1] + anchors[:, 1:]) // 2, tokens.expand(layers, -1).contiguous())
    return torch.minimum(torch.maximum(nearest, before[:, start]), before[:, stop] - 1)


def means(kv: Tensor, bucket: Tensor, kept: int) -> Tensor:
    """Mean [kept, features] fp32 of one layer's KV [tokens, features] over each bucket (eq. 3)."""
    sums = torch.zeros(kept, kv.shape[1], device=kv.device).index_add_(0, bucket, kv.float())
    return sums / torch.bincount(bucket, minlength=kept)[:, None]
