"""Settings of the decode role."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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
    max_num_seqs: int = Field(16, ge=1, description="Sequences that decode together.")
