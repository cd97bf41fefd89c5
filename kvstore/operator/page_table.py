"""Addresses and strides by which a device kernel finds the features of a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.operator.layout import Layout


@dataclass(frozen=True)
class PageTable:
    """The paged KV cache of all layers, as columns of features that lie side by side.

    A column is a head of keys or of values (GQA), or so many features of the latent as k_pe has (MLA). Element
    `columns[c, 2]` of token 0 of a block is its first; strides are in elements.

    Attributes:
        addresses: [layers] int64, of each layer's cache, on the device.
        columns: [columns, 3] int64 on the device: a column's first feature in canonical KV, in its segment, and its
            first element in a block.
        first: columns of the first segment.
        width: features of a column.
        dtype: of the pages' numbers.
        is_aligned: columns begin at multiples of 16 bytes, in pages and in canonical KV of two bytes a number.
    """

    addresses: Tensor
    columns: Tensor
    first: int
    width: int
    block_stride: int
    token_stride: int
    block_size: int
    dtype: torch.dtype
    is_aligned: bool

    @classmethod
    def of(
        cls,
        caches: Sequence[Tensor],
        elements: Tensor,
        layout: Layout,
        ranks: int = 1,
        share: Tensor | None = None,
    ) -> PageTable | None:
        """The table of layers' caches [blocks, ...]; None where a column's features lie apart.

        Args:
            elements: [block_size, local features], as `prefill_workers.engine.pages.learnt` finds them: the element of
                `cache[block].flatten()` that has feature f of token t.
            ranks: tensor-parallel ranks over which the heads are split.
            share: [local features] of `layout` that this rank has; None: all of them.
        """
        segments = [segment.share(ranks) for segment in layout.segments]
        widths = {segment.width for segment in segments if segment.heads > 1 or segment.rotary}
        width = min(widths)
        if len(widths) > 1 or width % 2 or len(segments) != 2 or any(part.features % width for part in segments):
            return None
        if len({(cache.shape, cache.stride(), cache.dtype) for cache in caches}) != 1:
            return None
        within, tokens = torch.arange(width), torch.arange(len(elements))[:, None, None]
        features = torch.arange(layout.features) if share is None else share
        kv = features[::width]
        places = _physical(elements, caches[0])
        heads = places[0, ::width]
        token_stride = int(places[-1, 0] - places[0, 0]) // max(1, len(places) - 1)
        expected = (heads[:, None] + within + token_stride * tokens).flatten(1)
        if not torch.equal(expected, places) or not torch.equal((kv[:, None] + within).flatten(), features):
            return None
        second, device = layout.segments[0].features, caches[0].device
        strides = (caches[0].stride(0), token_stride)
        addresses = [cache.data_ptr() for cache in caches]
        starts = [*addresses, 2 * width, *(caches[0].itemsize * heads).tolist()]
        return cls(
            addresses=torch.tensor(addresses).to(device),
            columns=torch.stack([kv, torch.where(kv < second, kv, kv - second), heads], dim=1).to(device),
            first=segments[0].features // width,
            width=width,
            block_stride=strides[0],
            token_stride=strides[1],
            block_size=len(places),
            dtype=caches[0].dtype,
            is_aligned=all(number % 16 == 0 for number in (*starts, *strides)),
        )


def _physical(elements: Tensor, cache: Tensor) -> Tensor:
    """Offsets in memory of elements of `cache[block].flatten()`."""
    offsets = torch.zeros_like(elements)
    left = elements
    for size, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
        offsets += left % size * stride
        left = left // size
    return offsets
