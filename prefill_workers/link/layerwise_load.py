"""Layer-wise loads: chunks that a forward writes while their KV comes in (mpic.md §3.2).

    load      layer 0 | layer 1 | layer 2 | ...            every chunk of the link, side by side
    forward             layer 0 | layer 1 | layer 2 | ...  relocate, patch and write a layer, then attend to it

So a link whose loads keep ahead of its forward takes as long as the slower of the two, wherever its missing chunks
stand; waiting for whole chunks instead takes both, one after the other, where they stand last. What a load delivers is
known to be sound only when it has ended: until then the link does not finish, and if it was not, what was computed
behind the chunk is computed again (`Linker.advance`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.apply import apply
from kvstore.operator.basis import SharedBasis
from kvstore.operator.device_kernel import Placement
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch
from kvstore.records.record import CanonicalRecord, PatchRecord
from kvstore.tiers.loading import Loading
from prefill_workers.link.plan import ChunkPlan


@dataclass(eq=False)
class LayerwiseLoad:
    """One chunk's load, layer by layer: `layer` gives its KV, relocated and patched.

    Layers are taken in order. `is_late` once one did not come in time: from then on there are none.
    """

    chunk: ChunkPlan
    slots: Tensor  # [tokens] int64, where the chunk's KV goes
    canonical: CanonicalRecord
    patch: PatchRecord | None
    bound: Patch | None  # the patch with its basis
    loads: tuple[Loading, Loading | None]  # of canonical KV and patch
    is_late: bool = False
    waited: float = 0.0  # seconds

    @classmethod
    def of(cls, chunk: ChunkPlan, slots: Tensor, layout: Layout, basis: SharedBasis | None) -> LayerwiseLoad | None:
        """Begin with a chunk's load; None before the first layer of both KV and patch is there.

        Nor if they do not fit the chunk: what a record says of itself is not checked yet either.
        """
        loads = chunk.lookup.loads if chunk.lookup else None
        if loads is None:
            return None
        canonical, patch = (None if load is None else load.record for load in loads)
        if not isinstance(canonical, CanonicalRecord) or canonical.layout != layout:
            return None
        if canonical.kv.shape[1] != len(slots):
            return None
        if loads[1] is None:
            return cls(chunk, slots, canonical, None, None, loads)
        if not isinstance(patch, PatchRecord):
            return None
        try:
            bound = patch.patch.bind(basis)
            bound.check(canonical.kv, layout)
        except ShapeMismatch:
            return None
        return cls(chunk, slots, canonical, patch, bound, loads)

    def layer(self, index: int, deadline: float) -> Tensor | None:
        """KV [tokens, features] of a layer; waits for it until `deadline` (monotonic seconds)."""
        stored = self.stored(index, deadline)
        if stored is None:
            return None
        return apply(stored.kv, stored.patch, stored.delta, self.canonical.layout.of_one_layer)[0]

    def stored(self, index: int, deadline: float) -> Placement | None:
        """The same before it is relocated and patched: KV [1, tokens, features]."""
        if self.is_late:
            return None
        began = time.monotonic()
        self.is_late = not self._wait_for(index, deadline)
        self.waited += time.monotonic() - began
        if self.is_late:
            return None
        patch = self.bound.of_layer(index) if self.bound else None
        return Placement(self.canonical.kv[index : index + 1], patch, self.chunk.start_position, self.slots)

    @property
    def seconds_left(self) -> float:
        """Seconds until the last layer is there, if the others come in as fast as those before."""
        return max(load.seconds_left for load in self.loads if load is not None)

    def _wait_for(self, index: int, deadline: float) -> bool:
        load, patch_load = self.loads
        if not load.wait_for_layer(self.canonical, index, deadline):
            return False
        if self.patch is None or patch_load is None or index < self.patch.patch.first_layer:
            return True
        return patch_load.wait_for_layer(self.patch, 0, deadline)  # a patch comes as a whole
