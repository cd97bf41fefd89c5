"""Ray's autoscaler, which adds and removes nodes as replicas are planned; its nodes are processes of one host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import recipe_environment
from tests.cluster.hosts import Network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_nodes_come_before_a_replica_is_started_and_go_when_none_is_planned(network: Network):
    host = network.up("a")
    environment = recipe_environment() | {"RAY_AUTH_MODE": "disabled"}
    script = Path(__file__).with_name("fake_nodes.py")
    ran = host.run(sys.executable, script, environment=environment, seconds=1100)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout
    assert "3 nodes after" in ran.stdout
