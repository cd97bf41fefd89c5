"""Composition: a patch behind a set from patches behind each of its members. Pure functions.

Attention over several stretches of tokens is the mean of the attention over each, weighted by Z = exp(log-sum-exp).
What a set adds to a token of B is therefore no plain sum of what its members A_i add, but a weighted one,

    Δ(B|S) ≈ Δ(B|P) + Σ c_i (Δ(B|A_i) - Δ(B|P)),    c_i = (Z_i + Z_B) / (Σ_j Z_j + Z_B)

token by token, where P is the fixed prefix: what one page takes of a token's attention the others lose. In the first
layer this is exact, for every head, and its attention takes no context but the pages themselves. Deeper layers follow
the same weights (`orbitserve bench fidelity`, η by composition). There are two ways to tell them (`Weighing`):

| by        | the c_i are                                                     | computed of what has no KV yet     |
|-----------|-----------------------------------------------------------------|------------------------------------|
| kv        | those whose sum is nearest to the second layer's KV in context  | the first layer, the second's KV   |
| attention | what A_i takes of the first layer's attention, over what it     | the first layer's queries and keys |
|           | would take there behind P alone                                 |                                    |

They depend on what the patch of that very order would: where the same chunk comes behind the same others in the same
order again, they are known (`KnownWeights`). Placement makes orders coincide (benchmark `placement`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvstore.operator.patch import Patch, compose
from kvstore.records.keys import DYNAMIC_TENANT
from prefill_workers.link.token_selection import MEASURED_LAYER

_RIDGE = 1e-2  # of the mean square of what the pairs add: keeps weights of nearly equal pairs near one another


def can_be_weighed(parts: Sequence[Patch]) -> bool:
    """True if the patches cover the layer by which they are weighed (deep-only patches do not)."""
    return all(part.first_layer <= MEASURED_LAYER for part in parts)


def measured_weights(base: Patch, pairs: Sequence[Patch], delta: Tensor) -> Tensor:
    """Least-squares weights c_i [pairs, tokens] of a sum's parts: fp32, 0 to 1.

    Their sum is nearest to the measured layer's deficit, each token by itself.

    Args:
        base, pairs: the patches behind the fixed prefix, and behind it and each antecedent.
        delta: Δ(B|S) of the measured layer, [1, tokens, features] fp32.
    """
    start, *others = (_of_measured_layer(part) for part in (base, *pairs))
    added = torch.stack(others, -1) - start[..., None]  # [tokens, features, pairs]
    gram = added.mT @ added
    ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    gram = gram + ridge[:, None, None] * torch.eye(len(pairs))
    solved = torch.linalg.solve(gram, added.mT @ (delta[0].float() - start)[..., None])[..., 0]
    return solved.clamp(0.0, 1.0).T


def weighted_sum(base: Patch, pairs: Sequence[Patch], weights: Tensor) -> Patch:
    """base + Σ c_i (pair_i - base), as one patch of the summed rank.

    `weights`: [pairs, layers or 1, tokens or 1].
    """
    terms = [_times(pair, c) for pair, c in zip(pairs, weights, strict=True)]
    return compose([*terms, _times(base, 1 - weights.sum(0))])


def attention_weights(shares: Tensor) -> Tensor:
    """Weights c_i [pairs, tokens] from the `attention_shares` of all heads: 0 to 1.

    The mean over the heads, by what each pays to A_i.
    """
    taken, alone = shares
    return taken / alone.clamp_min(1e-9)


class KnownWeights:
    """Cache of measured weights, by tenant and key of the patch that their sum stands for.

    It holds the latest `limit` bytes.

    A few KiB each, of a long document hundreds. One tenant's are nothing to another: that a set was linked before is
    nobody else's business. Thread-safe.

    Attributes:
        epoch: ends when anything is dropped. What a link of an earlier epoch has measured is not taken up any more: it
            may be of what was dropped.
    """

    def __init__(self, limit: int = 32 << 20) -> None:
        self._limit, self._held = limit, 0
        self.epoch = 0
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Tensor] = {}  # longest unused first

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tenant: str, patch_key: str) -> Tensor | None:
        """Look up the weights of a sum; None: not known."""
        with self._lock:
            weights = self._known.pop((tenant, patch_key), None)
            if weights is not None:
                self._known[tenant, patch_key] = weights
            return weights

    def put(self, tenant: str, patch_key: str, weights: Tensor, epoch: int) -> None:
        """Keep what a link that was planned in this epoch has measured."""
        with self._lock:
            if epoch != self.epoch:
                return
            before = self._known.pop((tenant, patch_key), None)
            self._known[tenant, patch_key] = weights
            self._held += weights.nbytes - (0 if before is None else before.nbytes)
            while self._held > self._limit:
                self._held -= self._known.pop(next(iter(self._known))).nbytes

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self.epoch += 1
            self._known.clear()
            self._held = 0

    def forget(self, content: str, tenant: str) -> None:
        """Drop all of a tenant's weights, which do not name contents; all of them for a reference."""
        with self._lock:
            self.epoch += 1
            everybodys = tenant == DYNAMIC_TENANT
            self._known = {} if everybodys else {key: kept for key, kept in self._known.items() if key[0] != tenant}
            self._held = sum(kept.nbytes for kept in self._known.values())


def _of_measured_layer(patch: Patch) -> Tensor:
    layer = patch.of_layer(MEASURED_LAYER)
    assert layer is not None  # see `can_be_weighed`
    return layer.dense()[0]


def _times(patch: Patch, by: Tensor) -> Patch:
    return replace(patch, segments=tuple(part.weighted(by) for part in patch.segments))
