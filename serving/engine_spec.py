"""Engine specifications from settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.config import OrbitServeConfig

if TYPE_CHECKING:
    from prefill_workers.engine.engine import EngineSpec


def engine_spec(config: OrbitServeConfig, tensor_parallel_size: int, hand_off: bool) -> EngineSpec:
    """What a prefill or vision engine is built from."""
    from prefill_workers.engine.engine import EngineSpec

    model, prefill = config.model, config.prefill
    return EngineSpec(
        model=str(model.path),
        dtype=model.dtype,
        load_format=model.load_format,
        max_model_len=model.max_model_len,
        block_size=prefill.block_size,
        tensor_parallel_size=tensor_parallel_size,
        max_batch_tokens=prefill.max_batch_tokens,
        kv_cache_gib=prefill.kv_cache_gib,
        gpu_memory_utilization=prefill.gpu_memory_utilization,
        trust_remote_code=model.trust_remote_code,
        hand_off=hand_off,
        kv_cache_dtype=model.kv_cache_dtype,
        seed=model.seed,
    )
