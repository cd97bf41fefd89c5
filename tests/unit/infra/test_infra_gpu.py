"""GPUs that are not here: fake devices, drivers and build tools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import gpu, vllm_env
from infra.gpu import NoUsableGpu, gpus, missing_build_tools, uses_gpu
from infra.vllm_arguments import ModelEngineSpec
from infra.vllm_env import vllm_environment


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """vLLM's CUDA build, on a machine without a GPU."""
    monkeypatch.setattr(gpu, "is_cpu_build", lambda: False)
    monkeypatch.setattr(vllm_env, "is_cpu_build", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_the_installed_vllm_decides_not_what_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not uses_gpu(), "this is the CPU build"
    assert gpus() == []
    monkeypatch.setattr(gpu, "is_cpu_build", lambda: False)
    assert uses_gpu()


@pytest.mark.parametrize(
    ("cuda", "driver", "visible", "said"),
    [
        ("13.0", None, None, "driver 580 or newer; there is no driver here"),
        ("13.0", "550.54.14", None, "driver 580 or newer; the driver here is 550.54.14. Update it"),
        ("12.8", "550.54.14", "", "525 or newer; the driver here is 550.54.14, and CUDA_VISIBLE_DEVICES=''"),
        ("13.0", "580.65.06", None, "torch finds no GPU"),
        (None, "580.65.06", None, "torch is not one"),
    ],
)
def test_a_cuda_build_without_a_usable_device_says_why(
    cuda: str | None, driver: str | None, visible: str | None, said: str, cuda_build: pytest.MonkeyPatch
) -> None:
    cuda_build.setattr("torch.version.cuda", cuda)
    cuda_build.setattr(gpu, "driver_version", lambda: driver)
    if visible is not None:
        cuda_build.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoUsableGpu) as refused:
        ModelEngineSpec("model").arguments()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("driver_version\n570.133", "570.133"),
        ("", None),
    ],
)
def test_the_drivers_version_is_read(said: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_ask", lambda *_: said)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert gpu.driver_version() == version


def test_devices_are_told_with_memory_and_capability(cuda_build: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="H200", total_memory=139 << 30, major=9, minor=0)
    cuda_build.setattr("torch.cuda.is_available", lambda: True)
    cuda_build.setattr("torch.cuda.device_count", lambda: 2)
    cuda_build.setattr("torch.cuda.get_device_properties", lambda _: device)
    assert gpus() == [("H200", 139 << 30, (9, 0))] * 2


def test_a_compiler_and_headers_are_asked_for_by_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    *compiler, headers = missing_build_tools()
    assert compiler == ["gcc", "libc6-dev"]
    assert headers.startswith("python3.")
    assert headers.endswith("-dev")
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(0o755)
    assert missing_build_tools() == []


def test_engines_on_gpus_have_exact_products_reads_over_cuda_ipc_and_larger_blocks(
    cuda_build: pytest.MonkeyPatch,
) -> None:
    assert ModelEngineSpec("model", block_size=16)
    cuda_build.setattr("torch.cuda.is_available", lambda: True)
    environment = vllm_environment(kv_cache_gib=None)
    assert environment["TRITON_F32_DEFAULT"] == "ieee"
    assert environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
    assert ModelEngineSpec("model").arguments()["block_size"] == 64
    assert ModelEngineSpec("model", block_size=16).arguments()["block_size"] == 16


def test_only_engines_with_our_extension_need_vllms_first_runner(cuda_build: pytest.MonkeyPatch) -> None:
    switch = "VLLM_USE_V2_MODEL_RUNNER"
    assert vllm_environment(kv_cache_gib=None)[switch] == "0"
    assert switch not in vllm_environment(kv_cache_gib=None, own_runner=False)
    cuda_build.setattr(vllm_env, "is_cpu_build", lambda: True)
    assert vllm_environment(kv_cache_gib=None, own_runner=False)[switch] == "0", "CPUs have no other"


def test_an_engine_on_a_cpu_keeps_vllms_blocks_and_needs_no_gpus_switches() -> None:
    assert "block_size" not in ModelEngineSpec("model").arguments()
    assert vllm_environment(kv_cache_gib=1).keys().isdisjoint(vllm_env.GPU_ENVIRONMENT)
