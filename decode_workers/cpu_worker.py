"""vLLM's CPU worker, on a host that it shares with other engines."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from decode_workers import elimination
from infra.cpu import openmp


class SharingCPUWorker(CPUWorker):
    """Has its threads sleep between the parallel regions of a step while others compute.

    Its attention leaves out what requests with a window have dropped (see `elimination`).
    """

    def init_device(self) -> None:
        """See vLLM's `Worker.init_device`."""
        super().init_device()
        elimination.serve(self.model_runner)

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        """See vLLM's `Worker.execute_model`."""
        openmp.consider_others()
        return super().execute_model(*arguments, **options)
