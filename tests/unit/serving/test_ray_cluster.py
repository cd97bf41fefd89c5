"""Which Ray cluster a command joins: a running one, and none that only left its address behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from serving.deploy import ray_cluster


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
    assert joined(monkeypatch, None) is None


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no address"])
def test_a_dead_clusters_address_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, address: str):
    assert joined(monkeypatch, address) == "local"


def test_an_address_that_the_user_names_is_not_doubted(monkeypatch: pytest.MonkeyPatch):
    assert joined(monkeypatch, "127.0.0.1:1", named="ray://far:10001") is None
