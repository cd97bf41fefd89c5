"""Tests that run under Triton's interpreter, which must be chosen before kernels are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: Path) -> None:
    """Run a file of tests in a process of its own, where kernels are interpreted on the host.

    Raises AssertionError with its output if one fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
