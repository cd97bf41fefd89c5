"""Which Ray cluster a command joins: a running one, and none that only left its address behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from serving.deploy import ray_cluster
from serving.replicas.process import ONE_MACHINE, address_for_peers


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of somebody who answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def joined(monkeypatch: pytest.MonkeyPatch, left: str | None, named: str = "") -> str | None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda _: left)
    return ray_cluster._address()


def test_a_cluster_that_answers_is_left_to_ray_to_join(monkeypatch: pytest.MonkeyPatch, listening: int):
    assert joined(monkeypatch, f"127.0.0.1:{listening}") is None


def test_without_any_one_is_started(monkeypatch: pytest.MonkeyPatch):
    assert joined(monkeypatch, None) == "local"


@pytest.mark.parametrize(("named", "alone"), [("", "1"), ("10.0.0.1:6379", None)])
def test_replicas_are_told_where_no_other_machine_can_have_any(
    monkeypatch: pytest.MonkeyPatch, named: str, alone: str | None
):
    given: dict[str, Any] = {}
    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(ray_cluster, "find_bootstrap_address", lambda _: None)
    for name in ray_cluster._SETTINGS:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: given.update(options))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)
    with ray_cluster.ray_cluster(runtime_env={"env_vars": {"A": "b"}}):
        pass
    variables = given["runtime_env"]["env_vars"]
    assert variables["A"] == "b"
    assert variables.get(ONE_MACHINE) == alone
    assert given.get("_node_ip_address") == ("127.0.0.1" if alone else None)
    monkeypatch.setenv(ONE_MACHINE, alone or "")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    assert address_for_peers() == ("127.0.0.1" if alone else "10.1.2.3")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no address"])
def test_a_dead_clusters_address_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, address: str):
    assert joined(monkeypatch, address) == "local"


def test_an_address_that_the_user_names_is_not_doubted(monkeypatch: pytest.MonkeyPatch):
    assert joined(monkeypatch, "127.0.0.1:1", named="ray://far:10001") is None
