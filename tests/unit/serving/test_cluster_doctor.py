"""Judgement of what the nodes of a cluster say; the nodes themselves are in tests/cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serving.cli import cluster_doctor as doctor
from serving.cli.main import app as cli
from serving.deploy.launch import FAST_REQUEST_PATH
from serving.settings import RoleSettings

OURS = {"python": "3.11.7", "ray": "2.60.0"}


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (OURS, None),
        ({**OURS, "ray": "2.59.0"}, "ray 2.59.0 (here 2.60.0)"),
        ({"python": "3.11.7"}, "ray missing (here 2.60.0)"),
        ({**OURS, "vllm": "0.32.0"}, "vllm 0.32.0 (here missing)"),
    ],
)
def test_a_version_that_differs_is_named_with_both(found: dict[str, str], named: str | None):
    result = doctor.judge_versions("10.0.0.2", found, OURS)
    assert result.ok == (named is None)
    assert named is None or result.detail == named
    assert bool(result.remedy) == (named is not None)


def test_a_switch_that_ray_was_started_without_is_named():
    assert doctor.judge_environment("n", dict(FAST_REQUEST_PATH)).ok
    found = doctor.judge_environment("n", {**FAST_REQUEST_PATH, "RAY_SERVE_USE_GRPC_BY_DEFAULT": None})
    assert not found.ok
    assert found.detail == "RAY_SERVE_USE_GRPC_BY_DEFAULT=None"


@pytest.mark.parametrize(("remote", "ok"), [(100.5, True), (101.4, True), (102.7, False), (97.9, False)])
def test_a_clock_is_wrong_only_as_far_as_the_round_trip_proves(remote: float, ok: bool):
    assert doctor.judge_clock("n", 100.0, remote, 101.0).ok == ok


def test_a_checkpoint_is_told_apart_by_configuration_and_weights(tmp_path: Path):
    assert doctor.digest_of(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    first = doctor.digest_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    second = doctor.digest_of(tmp_path)
    assert len({None, first, second}) == 3
    assert doctor.judge_model("n", second, second, tmp_path).ok
    assert "another" in doctor.judge_model("n", first, second, tmp_path).detail
    assert "no checkpoint" in doctor.judge_model("n", None, None, tmp_path).detail


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),
        ({"resources": {"prefill": 1}}, True),
        ({"resources": {"decode": 1}}, False),
        ({"num_cpus": 9}, False),
        ({"label_selector": {"zone": "a"}}, True),
        ({"label_selector": {"zone": "b"}}, False),
        ({"label_selector": {"zone": "!b"}}, True),  # not judged: Ray's to place
    ],
)
def test_a_node_fits_a_role_by_resources_and_labels(settings: dict[str, Any], fits: bool):
    node = doctor.Node("id", "10.0.0.2", {"CPU": 8, "prefill": 1}, {"zone": "a"})
    assert node.fits(RoleSettings.model_validate({"num_gpus": 0, **settings})) == fits


def test_without_a_cluster_the_command_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "running_address", lambda: None)
    ran = CliRunner().invoke(cli, ["doctor", "--cluster"], env={"COLUMNS": "200"})
    assert ran.exit_code == 1
    assert "no Ray cluster runs here" in ran.output
