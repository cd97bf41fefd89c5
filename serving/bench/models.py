"""The models whose times are measured, by what this machine computes on."""

from __future__ import annotations

from pathlib import Path

from infra.gpu import uses_gpu
from infra.machine import multiplies_bf16

CHECKPOINT, LARGE_CHECKPOINT = "qwen2_5_vl-250m", "qwen2_5_vl-7b"
GPU_POOL_GIB = 1  # of KV, as on a CPU


def on_gpu() -> bool:
    """True if engines compute on a GPU here."""
    return uses_gpu()


def measured_model() -> str:
    """The model (of `infra.checkpoints`) whose times are measured.

    On a GPU one of a size that is served there, on a CPU the largest whose prefill is still bearable.
    """
    return LARGE_CHECKPOINT if on_gpu() else CHECKPOINT


def measured_dtype() -> str:
    """The dtype in which they are measured.

    It is bf16, as stored, but on a CPU that is many times slower in it.
    """
    return "bfloat16" if on_gpu() or multiplies_bf16() else "float32"


def load_format(checkpoint: Path) -> str:
    """vLLM's load format, of a checkpoint that may have no weights."""
    return "auto" if any(checkpoint.glob("*.safetensors")) else "dummy"
