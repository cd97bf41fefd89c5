"""Description of this machine."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
