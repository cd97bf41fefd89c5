"""Chunks whose KV a forward writes layer by layer while it comes in (mpic.md §3.2).

    load      layer 0 | layer 1 | layer 2 | ...            every chunk of the link, side by side
    forward             layer 0 | layer 1 | layer 2 | ...  relocate, patch and write a layer, then attend to it

So a link whose loads keep ahead of its forward takes as long as the slower of the two, wherever its missing chunks
stand; waiting for whole chunks instead takes both, one after the other, where they stand last. What a load delivers is
known to be sound only when it has ended: until then the link does not finish, and if it was not, what was computed
behind the chunk is computed again (`Linker.advance`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvstore.format import CanonicalRecord
from kvstore.library import Loading
from kvstore.patch import Patch, apply
from prefill_workers.plan import ChunkPlan

_SLACK_SECONDS = 0.1  # how late the layers of one forward may be in all, besides what the forward itself takes


@dataclass(eq=False)
class Arriving:
    """One chunk on its way: `layer` gives its KV, relocated and patched, in the order of the layers.

    `late` once a layer did not come in time: from then on there are none.
    """

    chunk: ChunkPlan
    loading: Loading
    record: CanonicalRecord
    patch: Patch | None
    slots: Tensor  # [tokens] int64, where the chunk's KV goes
    late: bool = False
    waited: float = 0.0  # seconds

    def layer(self, index: int, deadline: float) -> Tensor | None:
        """KV [tokens, features] of a layer; waits for it until `deadline` (monotonic seconds)."""
        if self.late:
            return None
        began = time.monotonic()
        self.late = not self.loading.wait_for_layer(self.record, index, deadline)
        self.waited += time.monotonic() - began
        if self.late:
            return None
        patch = self.patch.of_layer(index) if self.patch else None
        kv, layout = self.record.kv[index : index + 1], self.record.layout.of_one_layer
        return apply(kv, patch, self.chunk.start_position, layout)[0]

    @property
    def seconds_left(self) -> float:
        """When the last layer will be there if the rest comes in as fast as what is there."""
        arrival = self.loading.arrival
        if self.loading.done() or arrival is None:
            return 0.0
        share = arrival.layers / self.record.layout.layers
        return arrival.seconds * (1 - share) / share


class Pace:
    """What a forward takes, as learnt from the ones before, and whether loads keep ahead of it."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def learn(self, tokens: int, seconds: float) -> None:
        """A forward over so many tokens took this long, without waiting for layers."""
        now, before = seconds / tokens, self._seconds_per_token
        self._seconds_per_token = now if before is None else (now + before) / 2

    def keeps_ahead(self, arriving: Sequence[Arriving], tokens: int) -> bool:
        """Whether all layers will be there about when a forward over so many tokens, begun now, needs them."""
        if self._seconds_per_token is None:
            return False
        return max(chunk.seconds_left for chunk in arriving) <= tokens * self._seconds_per_token

    def deadline(self, tokens: int) -> float:
        """When a forward over so many tokens, begun now, stops waiting for layers (monotonic seconds)."""
        return time.monotonic() + 2 * tokens * (self._seconds_per_token or 0.0) + _SLACK_SECONDS
