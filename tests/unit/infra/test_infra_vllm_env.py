"""The environment of engine processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra import vllm_env
from infra.vllm_arguments import kv_pool
from infra.vllm_env import vllm_environment
from infra.vllm_plugin import SHARED_CORES, register


def test_optional_switches_are_absent_unless_given() -> None:
    environment = vllm_environment(kv_cache_gib=2)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment.keys().isdisjoint({"OMP_NUM_THREADS", "VLLM_NIXL_SIDE_CHANNEL_PORT"})
    given = vllm_environment(kv_cache_gib=2, threads=3, nixl_port=5601)
    assert (given["OMP_NUM_THREADS"], given["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("3", "5601")


def test_a_pool_has_the_size_that_is_asked_for_on_a_gpu_and_one_gib_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_environment(kv_cache_gib=None)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    monkeypatch.setattr("infra.vllm_arguments.uses_gpu", lambda: False)
    assert kv_pool(3) == {}
    assert kv_pool(0.25) == {"kv_cache_memory_bytes": 1 << 28}
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(kv_cache_gib=0.25), "it would go before that"
    monkeypatch.setattr("infra.vllm_arguments.uses_gpu", lambda: True)
    assert kv_pool(3) == {"kv_cache_memory_bytes": 3 << 30}
    assert kv_pool(None) == {}


@pytest.mark.parametrize(("cpu_build", "switch"), [(True, "1"), (False, None)])
def test_only_the_cpu_build_does_without_a_compiler(
    cpu_build: bool, switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_env, "is_cpu_build", lambda: cpu_build)
    assert vllm_environment(kv_cache_gib=1).get("TORCH_COMPILE_DISABLE") == switch


def test_where_engines_share_cores_a_models_class_is_looked_at_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.distributed import nixl_utils
    from vllm.model_executor.models import registry

    monkeypatch.setenv(SHARED_CORES, "1")
    # nobody has looked before (an earlier engine of this process may have fixed what the environment said)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", staticmethod(lambda: tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: pytest.fail("in a process of its own"))
    monkeypatch.setattr(nixl_utils, "NixlWrapper", None)
    register()
    assert registry.ModelRegistry.models["Qwen2_5_VLForConditionalGeneration"].inspect_model_cls().supports_multimodal
    assert list(tmp_path.rglob("*Qwen2_5_VL*.json"))


_LOOPBACK = """
import sys, time
import torch
from infra.vllm_plugin import register
from vllm.distributed import nixl_utils

register(), register()
make, config = nixl_utils.NixlWrapper, nixl_utils.nixl_agent_config
asked, reader = (make(name, config(backends=["UCX"])) for name in ("asked", "reader"))
there, here = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
asked.register_memory(there), reader.register_memory(here)
name = reader.add_remote_agent(asked.get_agent_metadata())
source, target = (reader.get_xfer_descs([(data.data_ptr(), data.nbytes, 0)], "DRAM") for data in (there, here))
read = reader.initialize_xfer("READ", target, source, name)
state, until = reader.transfer(read), time.monotonic() + 20
while state != "DONE" and time.monotonic() < until:
    state = reader.check_xfer_state(read)
    time.sleep(0.001)
began, spent = time.monotonic(), time.process_time()
time.sleep(1)
print(state, bool(here.all()), (time.process_time() - spent) / (time.monotonic() - began))
"""


def test_an_agent_answers_reads_by_itself_and_takes_no_core_for_that() -> None:
    pytest.importorskip("nixl")
    environment = {**os.environ, **vllm_environment(kv_cache_gib=1), SHARED_CORES: "1"}
    found = subprocess.run(
        [sys.executable, "-c", _LOOPBACK], env=environment, capture_output=True, text=True, check=True
    )
    state, arrived, share = found.stdout.split()[-3:]
    assert (state, arrived) == ("DONE", "True")
    assert float(share) < 0.5, "two agents that poll without pause take two cores"
