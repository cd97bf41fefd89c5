"""Writer of stored KV into a device's pages: one launch a link, copies of what is lacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from infra.groups import within
from kvstore.operator.device_kernel import Placement, describe, place
from kvstore.operator.directions import TokenWeights
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.patch import Patch
from prefill_workers.engine.copy_stream import PinnedRing
from prefill_workers.engine.device_cache import DeviceCache

Launch = Callable[..., None]


class DeviceWriter:
    """Writes chunks into one rank's pages (`kvstore.operator.device_kernel`).

    Args:
        cache: copies that stay on the device, of KV and patches that last.
        launch: starts the kernel, as `device_kernel.place`.
        at_once: bytes of KV in one launch, unless one chunk alone has more: what no copy stays of is freed behind it.
    """

    def __init__(
        self,
        pages: PageTable,
        layout: Layout,
        dtype: torch.dtype,
        ring: PinnedRing,
        cache: DeviceCache[Any],
        launch: Launch = place,
        at_once: int = 512 << 20,
    ) -> None:
        self.ring, self.cache = ring, cache
        self._pages, self._layout, self._dtype, self._launch = pages, layout, dtype, launch
        self._at_once = at_once

    def write(self, chunks: Sequence[Placement]) -> None:
        """Relocate, patch and write chunks, all layers: in one launch, unless they take much memory.

        Their KV and patches are in host memory. It waits for neither copies nor kernel.
        """
        for group in within(self._at_once, chunks, lambda chunk: chunk.kv.nbytes):
            self._write(self._on_device(group), self._pages, self._layout)

    def write_layer(self, layer: int, chunks: Sequence[Placement]) -> None:
        """Write one layer of chunks: KV [1, tokens, features], patches of it alone; none is kept."""
        kv = self.ring.send([chunk.kv for chunk in chunks])
        patches = iter(self._copies([chunk.patch for chunk in chunks if chunk.patch is not None]))
        there = [
            chunk._replace(kv=rows, patch=None if chunk.patch is None else next(patches))
            for chunk, rows in zip(chunks, kv, strict=True)
        ]
        pages = replace(self._pages, addresses=self._pages.addresses[layer : layer + 1])
        self._write(there, pages, self._layout.of_one_layer)

    def _write(self, chunks: Sequence[Placement], pages: PageTable, layout: Layout) -> None:
        if not chunks:
            return
        descriptor = describe(chunks, layout, self._dtype)
        (words,) = self.ring.send([descriptor.words])
        self._launch(descriptor, words, pages, layout, self._dtype)

    def _on_device(self, chunks: Sequence[Placement]) -> list[Placement]:
        """The chunks with KV and patches in device memory; what is lacking there is sent together."""
        found: dict[int, Any] = {
            id(part): self.cache.get(part) for chunk in chunks for part in (chunk.kv, chunk.patch) if part is not None
        }
        lasting = {id(chunk.kv) for chunk in chunks if chunk.kv_lasts}
        lasting |= {id(chunk.patch) for chunk in chunks if chunk.patch_lasts}
        lacking = {
            id(part): part
            for chunk in chunks
            for part in (chunk.kv, chunk.patch)
            if part is not None and found[id(part)] is None
        }
        for (number, part), copy in zip(lacking.items(), self._copies(list(lacking.values())), strict=True):
            found[number] = copy
            if number in lasting:
                self.cache.put(part, copy, sum(tensor.nbytes for tensor in _tensors(copy, self._dtype)))
        return [chunk._replace(kv=found[id(chunk.kv)], patch=found.get(id(chunk.patch))) for chunk in chunks]

    def _copies(self, parts: Sequence[Tensor | Patch]) -> list[Any]:
        """Copies of KV and patches in device memory, each in memory of its own."""
        sent = self.ring.send_groups([_tensors(part, self._dtype) for part in parts])
        return [_rebuilt(part, tensors) for part, tensors in zip(parts, sent, strict=True)]


def _tensors(part: Tensor | Patch, dtype: torch.dtype) -> list[Tensor]:
    """All tensors of KV or of a bound patch, as the kernel reads them."""
    if isinstance(part, Tensor):
        return [part]
    found = list[Tensor]()
    for segment in part.segments:
        assert segment.right is not None
        found += [_readable(segment.left, dtype), _readable(segment.right, dtype), segment.scale]
        if segment.weights is not None:
            found += [segment.weights.rows, segment.weights.of]
    return found


def _readable(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return factor if factor.dtype in (torch.int8, torch.float32, dtype) else factor.float()


def _rebuilt(part: Tensor | Patch, tensors: Sequence[Tensor]) -> Tensor | Patch:
    """The same with other tensors, in the order of `_tensors`."""
    left = iter(tensors)
    if isinstance(part, Tensor):
        return next(left)
    segments = [
        replace(
            segment,
            left=next(left),
            right=next(left),
            scale=next(left),
            weights=None if segment.weights is None else TokenWeights(next(left), next(left)),
        )
        for segment in part.segments
    ]
    return replace(part, segments=tuple(segments))
