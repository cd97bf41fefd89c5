"""vLLM's arguments from a deployment's settings, for all roles.

| role      | function           | model settings | and                                             |
|-----------|--------------------|----------------|-------------------------------------------------|
| prefill   | `prefill_spec`     | all            | `prefill`'s KV pool, ranks and batch            |
| vision    | `vision_spec`      | all            | `vision`'s share of GPU memory                  |
| decode    | `decode_spec`      | all            | `decode`'s KV pool, ranks and sequences         |
| front end | `front_end_config` | no weights, KV | its cache of processed images; it has no engine |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decode_workers.spec import DecodeSpec
from prefill_workers.engine.spec import EngineSpec
from serving.config import OrbitServeConfig
from serving.settings import ModelSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNUSED_GIB = 1  # of KV, which a vision encoder has no use for


def prompt_arguments(model: ModelSettings) -> dict[str, Any]:
    """Model settings of every process that reads prompts, by vLLM's names."""
    return {
        "model": str(model.path),
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "seed": model.seed,
    }


def engine_arguments(model: ModelSettings) -> dict[str, Any]:
    """Model settings of every engine: those of its prompts, weights and KV."""
    return prompt_arguments(model) | {"load_format": model.load_format, "kv_cache_dtype": model.kv_cache_dtype}


def prefill_spec(config: OrbitServeConfig, *, hand_off: bool = True) -> EngineSpec:
    """A prefill engine; without `hand_off` one that computes for the library alone."""
    settings = config.prefill
    return EngineSpec(
        **engine_arguments(config.model),
        block_size=settings.block_size,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_batch_tokens=settings.max_batch_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        hand_off=hand_off,
        device_bytes=config.library.device_bytes,
        buckets=tuple(sorted(length for length in settings.buckets if length <= settings.max_batch_tokens)),
    )


def vision_spec(config: OrbitServeConfig) -> EngineSpec:
    """A vision engine: of the model it has the encoder alone."""
    return EngineSpec(
        **engine_arguments(config.model),
        block_size=config.prefill.block_size,
        max_batch_tokens=config.prefill.max_batch_tokens,
        kv_cache_gib=_UNUSED_GIB,
        gpu_memory_utilization=config.vision.gpu_memory_utilization,
        hand_off=False,
        encoder_only=True,
    )


def decode_spec(config: OrbitServeConfig) -> DecodeSpec:
    """A decode engine, with KV blocks as large as the prefill engine's."""
    settings = config.decode
    return DecodeSpec(
        **engine_arguments(config.model),
        block_size=config.prefill.block_size,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_gib=settings.kv_cache_gib,
        reasoning_parser=config.model.reasoning_parser or "",
        hands_back=config.prefill.may_pull_answers,
    )


def front_end_config(model: ModelSettings, processor_cache_gib: float, longest: int | None = None) -> VllmConfig:
    """vLLM's configuration for a process that renders prompts and has no engine.

    Args:
        longest: most tokens of a prompt with its answer, where that is known better than by the model's settings.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = prompt_arguments(model)
    if longest:
        arguments["max_model_len"] = longest
    return AsyncEngineArgs(
        **arguments, served_model_name=[model.served_name], mm_processor_cache_gb=processor_cache_gib
    ).create_engine_config()
