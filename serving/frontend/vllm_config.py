"""vLLM's configuration for the front end, which has no engine."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from serving.settings import ModelSettings


def front_end_config(model: ModelSettings, processor_cache_gib: float, longest: int | None = None) -> VllmConfig:
    """vLLM's configuration of a model for a process that renders prompts and holds no weights.

    Args:
        longest: most tokens of a prompt with its answer, where that is known better than by the model's settings.
    """
    return AsyncEngineArgs(
        model=str(model.path),
        served_model_name=[model.served_name],
        dtype=model.dtype,
        max_model_len=longest or model.max_model_len,
        trust_remote_code=model.trust_remote_code,
        seed=model.seed,
        mm_processor_cache_gb=processor_cache_gib,
    ).create_engine_config()
