"""The environment of engine processes."""

import pytest

from infra import vllm_env
from infra.vllm_env import vllm_environment


def test_optional_switches_are_absent_unless_given() -> None:
    environment = vllm_environment(kv_cache_gib=2)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment.keys().isdisjoint({"OMP_NUM_THREADS", "VLLM_NIXL_SIDE_CHANNEL_PORT"})
    given = vllm_environment(kv_cache_gib=2, threads=3, nixl_port=5601)
    assert (given["OMP_NUM_THREADS"], given["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("3", "5601")


@pytest.mark.parametrize(("cpu_build", "switch"), [(True, "1"), (False, None)])
def test_only_the_cpu_build_does_without_a_compiler(
    cpu_build: bool, switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_env, "is_cpu_build", lambda: cpu_build)
    assert vllm_environment(kv_cache_gib=1).get("TORCH_COMPILE_DISABLE") == switch
