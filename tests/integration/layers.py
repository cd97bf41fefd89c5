"""A tier whose canonicals come in layer by layer, held until a test or a forward lets them go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from rig import Page, Part, Rig

from infra.families import Family
from kvstore.library import Library
from kvstore.records.seal import find_seal
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Blob, Tier
from kvstore.tiers.faults import WrappedTier
from kvstore.tiers.memory import MemoryTier
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.scheduler.cost_model import ForwardCostModel

FIRST_LAYERS = 2  # are there at once
_TEXT = "quite a few words that stand between two pictures, more than a forward takes along for nothing "


class LayerTier(WrappedTier):
    """The first layers of every canonical come through at once, the others when `held` is set."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.held = threading.Event()
        self.damaged: dict[str, bytes] = {}  # by the key of a canonical, behind which bytes of it one is not as stored

    def open(self, key: str) -> Blob | None:
        buffer = self.get(key)
        if buffer is None or "/canonical/" not in key:
            return None if buffer is None else Blob(buffer)
        seal = find_seal(buffer)
        for name, behind in self.damaged.items():
            if name in key:
                data = bytearray(buffer)
                place = data.find(behind) + len(behind) if behind else seal.end - 1
                data[place] ^= 1
                buffer = pa.py_buffer(bytes(data))
        passes = seal.first + FIRST_LAYERS * seal.stride

        def read(start: int, end: int) -> Iterator[memoryview]:
            if end > passes:
                assert self.held.wait(30)
            yield memoryview(buffer)[start:end]

        return Blob(buffer, read)


class Eager(ForwardCostModel):
    """Begins a forward when the first layers of all chunks are there, and lets the tier go on if it has patience."""

    def __init__(self, tier: LayerTier, patience: float) -> None:
        super().__init__()
        self._tier, self._patience = tier, patience

    def keeps_ahead(self, arriving: Sequence[LayerwiseLoad], tokens: int) -> bool:
        arrivals = [chunk.loads[0].arrival for chunk in arriving]
        begins = len(arriving) == 3 and all(arrival and arrival.layers == FIRST_LAYERS for arrival in arrivals)
        if begins and self._patience:
            self._tier.held.set()
        return begins

    def deadline(self, tokens: int) -> float:
        return super().deadline(tokens) + self._patience


def parts_of(family: Family) -> list[Part]:
    """A prompt of three chunks with text around them."""
    chunk: Callable[[int], Part] = (lambda number: number) if family.image else Page
    return [_TEXT, chunk(1), _TEXT, chunk(2), _TEXT, chunk(3), "What follows?"]


def teach(engine: PrefillEngine, family: Family, directory: Path) -> tuple[Tier, dict[int, float]]:
    """A tier that holds what linking the parts teaches, at full rank, and what vLLM's own prefill of them answers."""
    tier = MemoryTier()
    library = Library(LibrarySettings(directory=None), engine.fingerprint, [tier])
    rig = Rig(engine, directory, library=library, orbit_chunks=0, family=family)
    try:
        reference = rig.vllm_logprobs(parts_of(family))
        rig.link(parts_of(family))
    finally:
        rig.close()
    return tier, reference


def cold_rig(
    make_rig: Callable[..., Rig], engine: PrefillEngine, family: Family, tier: LayerTier, patience: float = 30.0
) -> Rig:
    """A worker that knows only what the tier holds, and learns nothing.

    `patience`: how long its forwards wait for layers; 0: not at all, and the tier is left to the test.
    """
    settings = LibrarySettings(directory=None, tier_failures=1000, load_timeout_s=30)
    library = Library(settings, engine.fingerprint, [tier])
    return make_rig(engine, library=library, learns=False, cost_model=Eager(tier, patience), family=family)
