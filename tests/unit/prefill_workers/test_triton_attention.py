"""vLLM's kernels for GPUs over our rows and pages, without a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.triton_interpreter import run_interpreted


def test_runs_and_stored_chunks_go_through_vllms_triton_kernels() -> None:
    run_interpreted(Path(__file__).with_name("triton_attention.py"))
