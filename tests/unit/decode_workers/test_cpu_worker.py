"""The worker of a decode engine on a CPU."""

import pytest
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("vLLM's CPU worker", allow_module_level=True)

from vllm.v1.worker.cpu_worker import CPUWorker

from decode_workers.cpu_worker import SharingCPUWorker
from infra.cpu import openmp


def test_others_are_considered_before_every_step(monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []
    monkeypatch.setattr(openmp, "consider_others", lambda: seen.append("others"))
    monkeypatch.setattr(CPUWorker, "execute_model", lambda self, step: seen.append(step) or "output")
    worker = object.__new__(SharingCPUWorker)
    assert [worker.execute_model(step) for step in (1, 2)] == ["output", "output"]
    assert seen == ["others", 1, "others", 2]
