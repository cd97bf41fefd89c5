"""Manifests against KubeRay's schema and Serve's own, and what they say of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from serving.cli.main import app as cli
from serving.config import ConfigError, OrbitServeConfig
from serving.deploy.manifests import ManifestOptions, read, render, warnings

KUBERAY = Path("infra/kuberay")
# Of ray-project/kuberay feeaf72 (Apache-2.0), by `tests.kuberay_schema`.
SCHEMA = Draft202012Validator(json.loads((Path(__file__).parent / "kuberay/rayservice.json").read_text()))


def manifests(options: ManifestOptions | None = None, **sections: Any) -> dict[str, dict[str, Any]]:
    """By kind and name."""
    given = {"model": {"path": "/models/m"}, "files_url": "s3://b/files", "vision": {"replicas": 1}, **sections}
    config = OrbitServeConfig.model_validate(given)
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in render(config, options or ManifestOptions())}


def service(**arguments: Any) -> dict[str, Any]:
    return manifests(**arguments)["RayService/orbitserve"]


def groups(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in one["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"vision": {"replicas": 2}, "decode": {"tensor_parallel_size": 2, "replicas": 3}},
        {"prefill": {"resources": {"fast": 1}, "label_selector": {"zone": "a", "kind": "in(x,y)"}}},
    ],
)
@pytest.mark.parametrize("gpus", [True, False])
def test_manifests_are_what_kuberay_and_serve_take(sections: dict[str, Any], gpus: bool):
    found = service(options=ManifestOptions(gpus=gpus), **sections)
    assert [error.message for error in SCHEMA.iter_errors(found)] == []
    ServeDeploySchema.model_validate(yaml.safe_load(found["spec"]["serveConfigV2"]))


def test_a_misspelled_field_is_refused_by_the_schema():
    """Else the test above could not fail."""
    found = service()
    found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    assert any("maxReplica" in error.message for error in SCHEMA.iter_errors(found))


def test_each_role_has_a_group_that_its_replicas_alone_fit():
    found = service(prefill={"replicas": 2}, vision={"replicas": 0})
    wanted = {}
    (application,) = yaml.safe_load(found["spec"]["serveConfigV2"])["applications"]
    for deployment in application["deployments"]:
        (resource,) = deployment["ray_actor_options"]["resources"]
        wanted[resource] = deployment["name"]
    given = {name: json.loads(json.loads(one["rayStartParams"]["resources"])) for name, one in groups(found).items()}
    assert {name: list(one) for name, one in given.items()} == {
        role: [f"orbitserve-{role}"] for role in ("ingress", "prefill", "decode", "patch", "keeper", "retriever")
    }
    assert wanted["orbitserve-prefill"] == "PrefillWorker"
    assert set(wanted) == {resource for one in given.values() for resource in one}
    assert groups(found)["prefill"]["replicas"] == 2


def test_engines_take_a_gpu_for_each_rank_and_only_with_gpus():
    def limits(one: dict[str, Any], role: str) -> dict[str, Any]:
        return groups(one)[role]["template"]["spec"]["containers"][0]["resources"]["limits"]

    split = {"decode": {"tensor_parallel_size": 2}, "vision": {"replicas": 1}}
    found = service(**split)
    assert [limits(found, role).get("nvidia.com/gpu") for role in ("decode", "prefill", "vision", "keeper")] == [
        *("2", "1", "1"),
        None,
    ]
    without = service(options=ManifestOptions(gpus=False), **split)
    assert "nvidia.com/gpu" not in limits(without, "decode")
    assert "num_gpus: 0" in without["spec"]["serveConfigV2"]


def test_no_pod_runs_as_root_and_none_has_a_secret_in_its_manifest():
    found = manifests(http={"api_keys": {"hush-hush": "one"}}, library={"salt_secret": "whisper", "url": "s3://b/l"})
    text = yaml.safe_dump_all(found.values())
    assert "hush" not in text
    assert "whisper" not in text
    cluster = found["RayService/orbitserve"]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_role_has_a_disruption_budget_that_selects_its_pods():
    found = manifests()
    cluster = found["RayService/orbitserve"]["spec"]["rayClusterConfig"]
    pods = {"head": cluster["headGroupSpec"], **groups(found["RayService/orbitserve"])}
    for role, group in pods.items():
        selected = found[f"PodDisruptionBudget/orbitserve-{role}"]["spec"]["selector"]["matchLabels"]
        assert selected.items() <= group["template"]["metadata"]["labels"].items()


def test_one_replica_at_a_time_may_be_evicted_and_a_worker_is_ready_with_its_proxy():
    found = manifests(prefill={"replicas": 3})
    budgets = {name: one["spec"] for name, one in found.items() if name.startswith("PodDisruptionBudget/")}
    assert not any("maxUnavailable" in one for one in budgets.values()), "pods of a RayCluster take none"
    least = {role: budgets[f"PodDisruptionBudget/orbitserve-{role}"]["minAvailable"] for role in ("head", "prefill")}
    assert least == {"head": 1, "prefill": 2}
    for group in groups(found["RayService/orbitserve"]).values():
        (container,) = group["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/-/healthz"


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"files_url": "files"}, "files_url"),
        ({"http": {"api_keys_file": "/home/me/keys.yaml"}}, "http.api_keys_file"),
        (
            {"http": {"tls_certificate": "/etc/orbitserve/c.pem", "tls_key": "/etc/orbitserve/k.pem"}},
            "http.tls_certificate",
        ),
        ({"vision": {"niceness": 1}}, "vision.replicas"),
    ],
)
def test_what_pods_would_not_share_is_refused_by_name(sections: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        manifests(**sections)


def test_what_would_be_lost_with_a_node_or_is_open_to_all_is_said():
    config = OrbitServeConfig.model_validate({"model": {"path": "/models/m"}, "files_url": "s3://b/files"})
    assert [warning.split()[0] for warning in warnings(config)] == ["library.url", "neither"]
    assert warnings(read(KUBERAY / "orbitserve.yaml")) == []


def test_the_manifests_beside_the_example_are_what_the_command_prints():
    printed = CliRunner().invoke(cli, ["manifests", "--config", str(KUBERAY / "orbitserve.yaml")])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == (KUBERAY / "rayservice.yaml").read_text()


def test_a_field_that_is_unknown_is_named(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("model: {path: /models/m}\nprefil: {replicas: 2}\n")
    printed = CliRunner().invoke(cli, ["manifests", "--config", str(file)])
    assert printed.exit_code == 1
    assert "prefil" in printed.output
