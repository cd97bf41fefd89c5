"""Latent attention (MLA) on a CPU, of tokens that share a sequence.

vLLM's CPU kernel is one for decoding: a row per token, each of which reads its whole sequence by itself. A prefill over
paged context has to go through it token by token, and nearly all of a forward's time goes there. Here rows that follow
one another with the same blocks are computed together, by matrix products over their sequence's latents. Where every
row has blocks of its own, as in decoding, vLLM's kernel is as good and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import threshold

SCORES = 1 << 18  # products of queries and keys that are held at a time: they stay in a core's cache
NOTHING = (
    2.0**-64
)  # a weight that no fp32 sum of weighted values can tell from 0; yet smaller ones take long to multiply
_FOUND = "_orbitserve_sequences"  # where a forward's attention metadata keeps what its first layer found


@dataclass(frozen=True)
class Sequenced:
    """Rows `start` to `stop` of a batch that read the same `blocks` [n], up to `ends` [rows]."""

    start: int
    stop: int
    blocks: Tensor
    ends: Tensor


def install() -> None:
    """Have engines of this process compute so. Can be called again."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    kind: Any = CPUMLAImpl
    if not hasattr(kind.forward_mqa, "__wrapped__"):
        kind.forward_mqa = _by_sequences(kind.forward_mqa)


def _by_sequences(native: Any) -> Any:
    """`CPUMLAImpl.forward_mqa`; by its own kernel if no rows share a sequence or one is empty."""

    @wraps(native)
    def forward(self: Any, q: Tensor | tuple[Tensor, Tensor], cache: Tensor, metadata: Any, layer: Any) -> Any:
        found = getattr(metadata, _FOUND, None)
        if found is None:
            decode = metadata.decode
            empty = bool((decode.seq_lens == 0).any())
            found = [] if empty else sequences(decode.block_table, decode.seq_lens, cache.shape[1])
            setattr(metadata, _FOUND, found)
        if len(found) in (0, len(metadata.decode.seq_lens)):
            return native(self, q, cache, metadata, layer)
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return attend(queries, cache, found, self.scale, self.kv_lora_rank), None

    return forward


def sequences(tables: Tensor, ends: Tensor, block_size: int) -> list[Sequenced]:
    """Rows of a batch by sequence, from vLLM's `tables` [rows, blocks] and `ends` [rows]."""
    differs = (tables[1:] != tables[:-1]).any(1).nonzero().flatten() + 1
    edges = [0, *differs.tolist(), len(tables)]
    return [
        Sequenced(start, stop, tables[start, : -(-int(ends[start:stop].max()) // block_size)], ends[start:stop])
        for start, stop in pairwise(edges)
    ]


def attend(queries: Tensor, cache: Tensor, found: Sequence[Sequenced], scale: float, rank: int) -> Tensor:
    """softmax(q·k · scale) v of every row, [rows, heads, rank].

    Args:
        queries: [rows, heads, width], as wide as what is stored.
        cache: [blocks, block size, width]; of a token's row all is its key and the first `rank` its value.
    """
    out = queries.new_empty(*queries.shape[:2], rank)
    for one in found:
        latents = _of_blocks(cache, one.blocks).flatten(0, 1).float()
        rows = max(1, SCORES // (queries.shape[1] * len(latents)))
        parts = (part[one.start : one.stop].split(rows) for part in (queries, out))
        for some, into, ends in zip(*parts, one.ends.split(rows), strict=True):
            into.copy_(_attended(some.float(), latents[: int(ends.max())], ends, scale, rank))
    return out


def _of_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Blocks that lie one behind the other are not copied."""
    first, count = int(blocks[0]), len(blocks)
    if torch.equal(blocks, torch.arange(first, first + count, dtype=blocks.dtype)):
        return cache[first : first + count]
    return cache.index_select(0, blocks)


def _attended(queries: Tensor, latents: Tensor, ends: Tensor, scale: float, rank: int) -> Tensor:
    """Attention [rows, heads, rank] of queries over the first `ends` of latents [tokens, width]."""
    scores = (queries.flatten(0, 1) * scale) @ latents.mT
    hidden = torch.arange(len(latents)) >= ends[:, None]
    scores = scores.view(*queries.shape[:2], -1).masked_fill_(hidden[:, None], -torch.inf)
    weights = threshold(scores.softmax(-1), NOTHING, 0.0)
    return (weights.flatten(0, 1) @ latents[:, :rank]).view(*queries.shape[:2], rank)
