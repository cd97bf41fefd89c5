"""Writer of stored KV into a device's pages: one launch a link, copies of what is lacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvstore.operator.device_kernel import Placement, describe, place
from kvstore.operator.directions import Directions, TokenWeights
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.patch import Patch
from prefill_workers.engine.copy_stream import PinnedRing
from prefill_workers.engine.device_cache import DeviceCache

Launch = Callable[..., None]


class DeviceWriter:
    """Writes chunks into one rank's pages (`kvstore.operator.device_kernel`).

    Args:
        cache: copies of chunks and patches that stay on the device.
        launch: starts the kernel, as `device_kernel.place`.
    """

    def __init__(
        self,
        pages: PageTable,
        layout: Layout,
        dtype: torch.dtype,
        ring: PinnedRing,
        cache: DeviceCache[Any],
        launch: Launch = place,
    ) -> None:
        self.ring, self.cache = ring, cache
        self._pages, self._layout, self._dtype, self._launch = pages, layout, dtype, launch

    def write(self, chunks: Sequence[Placement]) -> None:
        """Relocate, patch and write chunks, all layers.

        Their KV and patches are in host memory. It waits for neither copies nor kernel.
        """
        self._write([*self._on_device(chunks)], self._pages, self._layout)

    def write_layer(self, layer: int, chunks: Sequence[Placement]) -> None:
        """Write one layer of chunks: KV [1, tokens, features], patches of it alone; none is kept."""
        addresses = self._pages.addresses[layer : layer + 1]
        self._write(self._sent(chunks), replace(self._pages, addresses=addresses), self._layout.of_one_layer)

    def _write(self, chunks: Sequence[Placement], pages: PageTable, layout: Layout) -> None:
        if not chunks:
            return
        descriptor = describe(chunks, layout, self._dtype)
        (words,) = self.ring.send([descriptor.words])
        self._launch(descriptor, words, pages, layout, self._dtype)

    def _on_device(self, chunks: Sequence[Placement]) -> list[Placement]:
        """The chunks with their KV and patches in device memory; those that are lacking there are sent together."""
        kept = [
            (self.cache.get(chunk.kv), None if chunk.patch is None else self.cache.get(chunk.patch)) for chunk in chunks
        ]
        lacking = [
            chunk._replace(patch=chunk.patch if patch is None else None, kv=chunk.kv if kv is None else chunk.kv[:, :0])
            for chunk, (kv, patch) in zip(chunks, kept, strict=True)
        ]
        found = []
        for chunk, sent, (kv, patch) in zip(chunks, self._sent(lacking), kept, strict=True):
            if kv is None:
                kv = sent.kv
                self.cache.put(chunk.kv, kv, kv.nbytes)
            if patch is None and chunk.patch is not None:
                assert sent.patch is not None
                patch = sent.patch
                self.cache.put(chunk.patch, patch, patch.nbytes)
            found.append(chunk._replace(kv=kv, patch=patch))
        return found

    def _sent(self, chunks: Sequence[Placement]) -> list[Placement]:
        """The chunks with copies of their KV and patches in device memory."""
        tensors = [tensor for chunk in chunks for tensor in (chunk.kv, *_tensors(chunk.patch, self._dtype))]
        sent = iter(self.ring.send(tensors))
        return [chunk._replace(kv=next(sent), patch=_rebuilt(chunk.patch, sent)) for chunk in chunks]


def _tensors(patch: Patch | None, dtype: torch.dtype) -> list[Tensor]:
    """All tensors of a bound patch, as the kernel reads them."""
    if patch is None:
        return []
    found = list[Tensor]()
    for part in patch.segments:
        assert part.right is not None
        found += [_readable(part.left, dtype), _readable(part.right, dtype), part.scale]
        if part.weights is not None:
            found += [part.weights.rows, part.weights.of]
    return found


def _readable(factor: Tensor, dtype: torch.dtype) -> Tensor:
    return factor if factor.dtype in (torch.int8, torch.float32, dtype) else factor.float()


def _rebuilt(patch: Patch | None, tensors: Any) -> Patch | None:
    """The patch with other tensors, in the order of `_tensors`."""
    if patch is None:
        return None
    segments = list[Directions]()
    for part in patch.segments:
        left, right, scale = next(tensors), next(tensors), next(tensors)
        weights = None if part.weights is None else TokenWeights(next(tensors), next(tensors))
        segments.append(replace(part, left=left, right=right, scale=scale, weights=weights))
    return replace(patch, segments=tuple(segments))
