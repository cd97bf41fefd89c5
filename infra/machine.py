"""Description of this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def multiplies_bf16() -> bool:
    """False where a CPU's bf16 products take many times as long as fp32's.

    vLLM and PyTorch need AVX-512 for them.
    """
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def processor() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
