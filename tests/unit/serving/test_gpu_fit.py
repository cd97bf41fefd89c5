"""Roles on GPUs: refused at start where they would wait for ever, with settings that fit."""

from __future__ import annotations

import io

import pytest
import yaml
from rich.console import Console

from infra.gpu import Gpu, NoUsableGpu
from serving import settings
from serving.cli import doctor_gpu
from serving.cli.doctor_gpu import check_build_tools, probe_gpus
from serving.config import OrbitServeConfig
from serving.deploy import launch
from serving.deploy.gpu_fit import reserved, shortage
from serving.deploy.launch import StartUpError


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings, doctor_gpu):
        monkeypatch.setattr(module, "is_cpu_build", lambda: False)


def config(**sections: object) -> OrbitServeConfig:
    return OrbitServeConfig.model_validate({"model": {"path": "model"}, **sections})


def test_every_engine_reserves_a_gpu_a_rank_and_others_none() -> None:
    found = reserved(config(prefill={"replicas": 2, "tensor_parallel_size": 2}))
    assert found == {"vision": [1], "prefill": [2, 2], "decode": [1]}
    assert "vision" not in reserved(config(vision={"replicas": 0}))


@pytest.mark.parametrize(("available", "roles"), [(1, {"vision", "prefill", "decode"}), (2, {"vision"})])
def test_what_is_proposed_fits(available: int, roles: set[str]) -> None:
    said = shortage(reserved(config()), [available])
    assert said is not None
    assert said.startswith(f"the roles reserve 3 GPUs (vision 1, prefill 1, decode 1), and there are {available}")
    proposed = yaml.safe_load(said.split("\n\n")[1])
    assert proposed.keys() == roles
    assert shortage(reserved(config(**proposed)), [available]) is None


def test_enough_gpus_are_not_remarked_upon_and_without_any_nothing_is_proposed() -> None:
    assert shortage(reserved(config()), [3]) is None
    assert "Add GPUs" in (shortage(reserved(config()), [0]) or "")
    assert "tensor_parallel_size" in (shortage(reserved(config(prefill={"tensor_parallel_size": 4})), [1]) or "")


@pytest.mark.parametrize(
    ("roles", "nodes", "fits"),
    [
        ({"vision": [0.6], "prefill": [0.6], "decode": [0.6]}, [2], False),
        ({"vision": [0.6], "prefill": [0.6], "decode": [0.6]}, [3], True),
        ({"vision": [0.4], "prefill": [0.6], "decode": [0.5, 0.5]}, [2], True),
        ({"vision": [0.1] * 10}, [1], True),
        ({"prefill": [2], "decode": [1]}, [1, 1, 1], False),
        ({"prefill": [2], "decode": [1]}, [1, 2], True),
        ({"prefill": [3], "decode": [2, 2]}, [4, 3], True),
        ({"prefill": [1], "vision": [0.3], "decode": [0.3]}, [1, 1], True),
        ({"prefill": [1], "vision": [0.3], "decode": [0.8]}, [1, 1], False),
    ],
)
def test_a_share_is_of_one_gpu_and_a_replicas_gpus_are_of_one_node(
    roles: dict[str, list[float]], nodes: list[float], fits: bool
) -> None:
    said = shortage(roles, nodes)
    assert (said is None) is fits
    if said is not None and sum(map(sum, roles.values())) <= sum(nodes):
        assert "a share of one GPU, or GPUs of one node" in said


def test_too_few_gpus_are_refused_on_one_node_and_told_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    node = {"Alive": True, "Resources": {"GPU": 1.0, "CPU": 8.0}}
    monkeypatch.setattr(launch.ray, "nodes", lambda: [node, {"Alive": False, "Resources": {}}])
    with pytest.raises(StartUpError, match=r"num_gpus: 0\.3"):
        launch._refuse_too_few_gpus(config(), Console(file=out))
    monkeypatch.setattr(launch.ray, "nodes", lambda: [node, {"Alive": True, "Resources": {"CPU": 8.0}}])
    launch._refuse_too_few_gpus(config(), Console(file=out))
    assert "wait until there are more" in out.getvalue()


def test_the_doctor_names_devices_and_roles_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Gpu("H200", 139 << 30, (9, 0))
    monkeypatch.setattr(doctor_gpu, "gpus", lambda: [device])
    devices, roles = probe_gpus('{"prefill": [1], "decode": [1]}')
    assert (devices.ok, devices.detail) == (True, "H200 (139 GiB, sm_90)")
    assert not roles.ok
    assert "num_gpus: 0.4" in roles.detail
    assert [result.ok for result in probe_gpus('{"prefill": [1]}')] == [True, True]


def test_the_doctor_says_why_there_is_no_gpu_and_what_triton_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NoUsableGpu("the driver here is 550")

    monkeypatch.setattr(doctor_gpu, "gpus", refuse)
    [result] = probe_gpus()
    assert (result.ok, result.detail) == (False, "the driver here is 550")
    monkeypatch.setattr(doctor_gpu, "missing_build_tools", lambda: ["gcc"])
    [result] = check_build_tools()
    assert (result.ok, result.remedy) == (False, "apt-get install gcc")


@pytest.mark.parametrize(("seconds", "ok"), [(0.01, True), (0.5, False)])
def test_a_hand_off_over_tcp_fails(seconds: float, ok: bool) -> None:
    result = doctor_gpu._verdict("cuda", 1 << 28, seconds, "DONE", same=True)
    assert result.ok is ok
    assert "GB/s" in result.detail
    assert not doctor_gpu._verdict("cuda", 1 << 28, 0.01, "DONE", same=False).ok


def test_a_hand_off_is_measured_between_two_gpus_where_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, devices in ((1, ("cuda:0", "cuda:0")), (4, ("cuda:0", "cuda:1"))):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert doctor_gpu._devices() == devices
    way = " from cuda:1 to cuda:0 without peer access"
    assert way in doctor_gpu._verdict("cuda", 1 << 28, 0.5, "DONE", same=True, way=way).detail
    monkeypatch.setattr(doctor_gpu, "is_cpu_build", lambda: True)
    assert doctor_gpu._devices() == ("cpu", "cpu")
