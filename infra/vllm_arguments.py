"""vLLM's arguments that the engines of all roles share, from one specification."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from typing import Any

from infra.gpu import BLOCK_SIZE, uses_gpu

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
_ARENA_BYTES = (2 << 30) + (256 << 20)  # of vLLM's arena of tensors, eight of up to 256 MiB, and its message queues


@dataclass(frozen=True)
class ModelEngineSpec:
    """One engine of a model, whatever its role.

    Attributes:
        max_model_len: None: the model's, or what the KV pool holds if that is less.
        block_size: None: 64 on a GPU, on a CPU vLLM's choice.
        kv_cache_gib: KV pool; None: 1 on a CPU, on a GPU what `gpu_memory_utilization` leaves.
    """

    model: str
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    trust_remote_code: bool = False
    kv_cache_dtype: str = "auto"
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments."""
        size = self.block_size or (BLOCK_SIZE if uses_gpu() else None)
        block_size = {} if size is None else {"block_size": size}
        return {
            "model": self.model,
            "dtype": self.dtype,
            "load_format": self.load_format,
            "max_model_len": -1 if self.max_model_len is None else self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "trust_remote_code": self.trust_remote_code,
            "kv_cache_dtype": self.kv_cache_dtype,
            "seed": self.seed,
            "enable_prefix_caching": False,  # the library is the cache; equal placeholder ids stand for unequal images
            "disable_log_stats": True,
            **block_size,
            **cpu_engine_arguments(),
            **kv_pool(self.kv_cache_gib),
        }


def hand_off_arguments() -> dict[str, Any]:
    """Arguments of an engine that hands KV over, or takes it."""
    from vllm.config import KVTransferConfig

    device = "cuda" if uses_gpu() else "cpu"
    connector = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device=device)
    return {"kv_transfer_config": connector}


def shared_tensors(ranks: int) -> dict[str, bool]:
    """Arguments by which several ranks read large tensors of calls in shared memory.

    Else each gets a copy in its message. {} for one rank, and where `/dev/shm` has no room: vLLM would not start.
    """
    if ranks == 1:
        return {}
    if shutil.disk_usage(_SHARED_MEMORY).free < _ARENA_BYTES:
        logger.warning(
            "%s has less than %d MiB free: KV of links is copied to each rank; in containers set --shm-size",
            _SHARED_MEMORY,
            _ARENA_BYTES >> 20,
        )
        return {}
    return {"enable_shm_tensor_arena": True}


def kv_pool(kv_cache_gib: float | None) -> dict[str, int]:
    """KV pool of an engine; {} where vLLM reads the environment or chooses a size.

    With a size of its own an engine may start beside others on the same GPU: vLLM would take what those allocate while
    it measures for its own.
    """
    if kv_cache_gib is None or not (uses_gpu() or kv_cache_gib % 1):
        return {}
    return {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30)}


def cpu_engine_arguments() -> dict[str, Any]:
    """Arguments of every engine on a CPU; {} on a GPU.

    Both for MLA: the kernel of rotary_embedding is wrong on the strided views that it passes for k_pe, and what vLLM
    prefers as its attention on CPUs with AMX takes no fp32. For other models vLLM logs that it cannot use CPU_MLA.
    """
    if uses_gpu():
        return {}
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "attention_backend": "CPU_MLA"}
