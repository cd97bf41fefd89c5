"""Placement of stored KV: relocated, patched and written into blocks (kamera.md eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infra.groups import within
from kvstore.operator.apply import apply
from kvstore.operator.device_kernel import Placement
from kvstore.operator.patch import Patch
from prefill_workers.engine.device_timer import DeviceSpan
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.sequence import Run

_BYTES = 64 << 20  # of KV that is handed to the engine at once, unless one chunk alone has more


class PlacedChunk(NamedTuple):
    """Stored KV of a chunk, and its place in a sequence.

    `kv`: canonical, [layers, tokens, features]; `position`: of its first token, in the shifted frame; `run`: its tokens
    in the sequence; `kv_lasts`, `patch_lasts`: see `Placement`.
    """

    kv: Tensor
    patch: Patch | None
    position: int
    run: Run
    kv_lasts: bool = False
    patch_lasts: bool = False

    def within(self, start: int, stop: int) -> PlacedChunk | None:
        """Part in tokens `start` up to `stop` of the sequence; None: it has none there."""
        run = Run(max(start, self.run.start), min(stop, self.run.stop))
        if run == self.run:
            return self
        if run.start >= run.stop:
            return None
        first, last = run.start - self.run.start, run.stop - self.run.start
        patch = None if self.patch is None else self.patch.of_tokens(first, last)
        return self._replace(kv=self.kv[:, first:last], patch=patch, run=run, kv_lasts=False)


def write_chunks(engine: PrefillEngine, blocks: Sequence[int], chunks: Sequence[PlacedChunk]) -> list[DeviceSpan]:
    """Relocate, patch and write chunks of the sequence in `blocks`.

    On a GPU all in one launch; else small ones together: a write walks all layers.

    Returns: what of it a device computes when this has returned; nothing on a CPU.
    """
    if not chunks:
        return []
    if engine.places_on_device:
        placements = [
            Placement(
                one.kv,
                one.patch,
                one.position,
                engine.slots(blocks, one.run.start, one.run.stop),
                one.kv_lasts,
                one.patch_lasts,
            )
            for one in chunks
        ]
        span = engine.place(placements)
        return [] if span is None else [span]
    layout, spans = engine.layout, list[DeviceSpan]()
    for group in within(_BYTES // layout.bytes_per_token(engine.dtype), chunks, lambda chunk: len(chunk.run)):
        ends = torch.tensor([len(chunk.run) for chunk in group]).cumsum(0).tolist()
        kv = torch.empty(layout.layers, ends[-1], layout.features, dtype=engine.dtype)
        for chunk, end in zip(group, ends, strict=True):
            apply(chunk.kv, chunk.patch, chunk.position, layout, out=kv[:, end - len(chunk.run) : end])
        slots = torch.cat([engine.slots(blocks, chunk.run.start, chunk.run.stop) for chunk in group])
        if (span := engine.write_kv(kv, slots)) is not None:
            spans.append(span)
    return spans
