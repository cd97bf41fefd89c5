"""Settings of the decode role."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from infra.gpu import DECODE_SEQUENCES
from infra.vllm_env import is_cpu_build


class DecodeSettings(BaseModel):
    """The decode worker: a stock vLLM engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="KV pool in GiB. None: 1 on a CPU; on a GPU what gpu_memory_utilization leaves beside the weights.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory that vLLM may take.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks over which one replica's model is split.")
    max_num_seqs: int = Field(
        default_factory=lambda: 16 if is_cpu_build() else DECODE_SEQUENCES,
        ge=1,
        description=f"Sequences that decode together; 16 by default on CPUs, else {DECODE_SEQUENCES}.",
    )
