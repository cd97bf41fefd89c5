"""KV in and out of the blocks of one rank, on whatever device they lie."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvstore.operator import device_kernel
from kvstore.operator.apply import relocate, turn
from kvstore.operator.device_kernel import Placement
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from prefill_workers.engine.attention_layers import AttentionLayers, UnsupportedEngine
from prefill_workers.engine.copy_stream import RING_BYTES, CudaCopyStream, PinnedRing
from prefill_workers.engine.device_cache import DeviceCache
from prefill_workers.engine.device_writer import DeviceWriter
from prefill_workers.engine.pages import Pages, learnt

logger = logging.getLogger(__name__)

_GATHERED_BYTES = 64 << 20  # of KV that is read from a device, gathered there at once


class KVBlocks:
    """Blocks of one rank's layers, with KV in them.

    They are written by the backend's own update op, and read through the page layout that `learn` finds.

    Args:
        dtype: the model's, in which KV comes and is given.

    Attributes:
        pages: that layout; None before it is learnt.
        ring: way of copies to a device and back; None on a CPU.
        writer: writer of stored KV, on a device whose pages its kernel can write.
        layer_layout: one layer's share of the layout.
    """

    pages: Pages | None = None
    ring: PinnedRing | None = None
    writer: DeviceWriter | None = None
    layer_layout: Layout

    def __init__(self, attention: AttentionLayers, device: torch.device, dtype: torch.dtype) -> None:
        self._attention, self._device, self._dtype = attention, device, dtype
        self._share: Tensor | None = None  # [local features] this rank's features; None: all of them

    def learn(self, layout: Layout, block: int, rank: int, ranks: int, device_bytes: int) -> bool:
        """Take a rank's share of the layout, and find where a block keeps feature f of token t.

        Backends differ (the CPU kernel transposes keys inside a block, and differently for each dtype), so the layout
        is not assumed but read off, with the backend's own update op (`pages.learnt`).

        Args:
            device_bytes: device memory for copies of stored chunks.

        Returns:
            Whether `place` can be called.

        Raises:
            UnsupportedEngine: the backend's writes cannot be inverted.
        """
        self._share = layout.share(rank, ranks) if ranks > 1 else None
        self._attention.segments = [segment.share(ranks) for segment in layout.segments]
        self.layer_layout = replace(layout, layers=1, segments=tuple(self._attention.segments))
        size, features = self._attention.block_size, self._attention.features
        slots = (torch.arange(size) + block * size).to(self._device)

        def through(numbers: Tensor) -> Tensor:
            self._attention.update(0, numbers.to(self._device, self._dtype), slots)
            page = self._attention.elements(0)[block].flatten().float().cpu().round().long()
            if page.numel() != numbers.numel():
                raise UnsupportedEngine(f"a block holds {page.numel()} elements, expected {numbers.numel()}")
            return page

        whole = 128 if self._attention.quantised is None else 8  # numbers below are exact in bfloat16, and in any fp8
        elements = learnt(size, features, whole, through)
        if elements is None:
            raise UnsupportedEngine(
                f"{self._attention.backend} with KV cache dtype {self._attention.cache_dtype!r} does not give back "
                "what is written"
            )
        self.pages = Pages.of(elements, [segment.features for segment in self._attention.segments], self._device)
        if self._device.type != "cuda":
            return False
        self.ring = PinnedRing(CudaCopyStream(self._device), RING_BYTES)
        caches = [self._attention.elements(layer) for layer in range(layout.layers)]
        has_kernel = device_kernel.is_available() and device_kernel.may_store(
            caches[0].dtype, torch.cuda.get_device_capability(self._device)
        )
        pages = PageTable.of(caches, elements, layout, ranks, self._share) if has_kernel else None
        if pages is None:
            logger.warning(
                "stored KV is patched on the host: %s keeps pages of %s as no kernel of ours writes them here",
                self._attention.backend,
                caches[0].dtype,
            )
            return False
        device_bytes = device_bytes if ranks == 1 else 0  # of several, each call brings objects that end with it
        self.writer = DeviceWriter(pages, layout, self._dtype, self.ring, DeviceCache(device_bytes))
        nothing = torch.zeros(layout.layers, 1, layout.features, dtype=self._dtype)
        self.place([Placement(nothing, None, 0, torch.tensor([block * size]))])  # compiled before a request needs it
        return True

    def write(self, kv: Tensor, slots: Tensor) -> None:
        """Store `kv` [layers, tokens, features] in its slots by the backend's own update op."""
        mine, slots = self.sent(kv if self._share is None else kv[..., self._share], slots)
        for layer, rows in enumerate(mine.unbind(0)):
            self._attention.update(layer, rows, slots)

    def copy(self, sources: Sequence[int], targets: Sequence[int], tokens: int, shift: int) -> None:
        """Copy the KV of the first `tokens` tokens in blocks `sources` to blocks `targets`.

        On the device; keys are turned by `shift` positions.
        """
        size = self._attention.block_size
        index = torch.arange(tokens)
        slots = torch.tensor(targets)[index // size] * size + index % size
        (slots,) = self.sent(slots)
        layers, rotation = range(len(self._attention.names)), None
        if shift and self.ring is not None:
            cos, sin = self.sent(*self.layer_layout.rotary.rotation(shift, "cpu"))
            rotation = cos, sin
        for layer, rows in enumerate(self.stored(sources, 0, tokens, layers)):
            if rotation is not None:
                turn(rows, rotation, self.layer_layout)
            elif shift:
                of_layer = rows[None]
                relocate(of_layer, shift, self.layer_layout, out=of_layer)
            self._attention.update(layer, rows.to(self._dtype), slots)

    def place(self, chunks: Sequence[Placement]) -> None:
        """Relocate, patch and write stored chunks on the device, from host memory."""
        assert self.writer is not None
        self.writer.write(chunks)

    def on_device(self, chunks: Sequence[Tensor]) -> tuple[int, list[bool]] | None:
        """Version of the device's copies of stored KV, and which of these it has; from any thread.

        None where none are kept.
        """
        cache = None if self.writer is None else self.writer.cache
        if cache is None or not cache.limit_bytes:
            return None
        return cache.version, [cache.holds(kv) for kv in chunks]

    def free_ended(self) -> None:
        """Free the device's copies of stored KV that host memory has dropped."""
        if self.writer is not None:
            self.writer.cache.drop_ended()

    def read(self, blocks: Sequence[int], first: int, count: int, layers: Sequence[int] | None = None) -> Tensor:
        """KV of `count` tokens from `first` on in `blocks`: [layers, count, local features].

        Of the layers named, or of all.
        """
        chosen = range(len(self._attention.names)) if layers is None else layers
        out = torch.empty(len(chosen), count, self._attention.features, dtype=self._dtype)
        if self.ring is None:
            for rows, stored in zip(out, self.stored(blocks, first, count, chosen), strict=True):
                rows.copy_(stored)
            return out
        at_once = max(1, _GATHERED_BYTES // max(1, out[:1].nbytes))  # layers: device memory is vLLM's
        for start in range(0, len(chosen), at_once):
            some = chosen[start : start + at_once]
            gathered = torch.empty(len(some), *out.shape[1:], dtype=self._dtype, device=self._device)
            for rows, stored in zip(gathered, self.stored(blocks, first, count, some), strict=True):
                rows.copy_(stored)
            self.ring.fetch(gathered, out[start : start + at_once])
        return out

    def stored(self, blocks: Sequence[int], first: int, count: int, layers: Sequence[int]) -> Iterator[Tensor]:
        """`read` layer by layer, [count, local features] on the device, in one reused buffer."""
        if self.pages is None:
            raise RuntimeError("learn has not run")
        size, features = self._attention.block_size, self._attention.features
        (used,) = self.sent(torch.tensor(blocks)[first // size : -(-(first + count) // size)])
        skip = first % size
        whole = torch.empty(len(used), size, features, dtype=self._attention.cache(0).dtype, device=self._device)
        stored = whole if self._attention.quantised is None else whole.view(self._attention.quantised)
        for layer in layers:
            self.pages.read(self._attention.cache(layer)[used].flatten(1), whole)
            yield stored.view(-1, features)[skip : skip + count]

    def sent(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on the device, without waiting for copies."""
        if self.ring is not None:
            return self.ring.send(tensors)
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]
