"""The vision encoder role: pixels in, embeddings out.

It holds the vision tower and nothing else of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infra.cpu import openmp
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.image_batches import Pixels
from prefill_workers.engine.spec import EngineSpec


class VisionEncoder:
    """Encodes processed images by an engine whose `spec` says `encoder_only`. Not thread-safe."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = PrefillEngine(spec)
        self.images = 0
        openmp.release()  # the calling thread's; another may be the one that encodes

    def encode(self, items: Sequence[Pixels]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of each image, a handful at a time."""
        self.images += len(items)
        return self._engine.encode(items)

    def shutdown(self) -> None:
        """Free the tower."""
        self._engine.shutdown()
