"""What a replica's process has imported before its role sets the environment up."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["serving.app", "serving.routing.ray_router"])
def test_neither_torch_nor_vllm_is_imported_before_a_role_has_set_threads_and_switches(module: str):
    """OpenMP takes its number of threads when torch is imported: Ray's default is one."""
    look = f"import sys, {module}; print(*({{'torch', 'vllm'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
