"""Hosts of namespaces for this folder's tests, and one service over three of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.s3_server import S3ServerUnavailable
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import Network, missing
from tests.cluster.three_hosts import three_hosts


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A switch without hosts."""
    if reason := missing():
        pytest.skip(reason)
    made = Network(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The ingress on host a; a prefill and a decode worker on b and on c; keeper and compiler on one of these."""
    if reason := missing():
        pytest.skip(reason)
    try:
        with three_hosts(tmp_path_factory.mktemp("cluster")) as made:
            yield made
    except S3ServerUnavailable as error:
        pytest.skip(f"no S3 server: {error}")
