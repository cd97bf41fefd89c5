"""Vision encoder replicas: pixels to embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from serving.config import OrbitServeConfig
from serving.engine_spec import vision_spec
from serving.replicas.process import MOST_FAILURES, enter_vllm, replica_name
from serving.scaling.meters import WorkMeter

if TYPE_CHECKING:
    from torch import Tensor


class VisionEncoder:
    """Vision role: pixels to embeddings, for chunks not seen yet."""

    def __init__(self, config: OrbitServeConfig) -> None:
        settings = config.vision
        self._meter, self._waiting = WorkMeter(), 0
        enter_vllm(settings, kv_cache_gib=None)
        from prefill_workers.engine.vision_encoder import VisionEncoder as Encoder

        self._encoder = Encoder(vision_spec(config))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vision")
        self._failing = 0
        self._meter.ready()

    async def encode(self, items: Sequence[tuple[str, Any]]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of (modality, processed item) pairs."""
        import torch

        self._waiting += len(items)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, list(items))
        except torch.AcceleratorError:  # what else fails, as for want of memory, is its request's
            self._failing += 1
            raise
        finally:
            self._waiting -= len(items)
        self._failing = 0
        return found

    async def alive(self) -> str:
        """This replica's name."""
        return replica_name()

    def _encode(self, items: list[tuple[str, Any]]) -> list[Tensor]:
        began = time.perf_counter()
        found: list[Tensor] = self._encoder.encode(items)
        self._meter.done(time.perf_counter() - began, max(len(items), 1))
        return found

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where the role is scaled; see `autoscale.signals`."""
        counted = self._meter.counted()
        mean = counted["compute_s"] / counted["links"] if counted["links"] else 0.0
        return {**counted, "waiting": self._waiting, "queued_s": self._waiting * mean}

    async def signals(self) -> tuple[str, dict[str, float]]:
        """This replica's name, and its signals for the planner."""
        return replica_name(), await self.record_autoscaling_stats()

    async def stats(self) -> dict[str, Any]:
        """Number of encoded images."""
        return {"images": self._encoder.images}

    async def check_health(self) -> None:
        """Raise when the engine encodes nothing any more (a GPU's lost context)."""
        if self._failing >= MOST_FAILURES:
            raise RuntimeError(f"the encoder failed {self._failing} times in a row")
