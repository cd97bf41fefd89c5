"""Hosts of namespaces for this folder's tests, and one service over three of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import PORT, WORKER, Cluster
from hosts import Network, missing

from infra.reference import DEFAULT_MODEL, weights
from infra.s3_server import S3ServerUnavailable, s3_server
from tests.tcp_proxy import TcpProxy

BUCKET = "cluster"


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
    network = Network(tmp_path_factory.mktemp("cluster"))
    try:
        with s3_server() as store:
            store.make_bucket(BUCKET)
            way = TcpProxy(store.port, network.here)
            made = Cluster(network, {"a": {"front": 10.0}, "b": WORKER, "c": WORKER})
            made.serve(configuration(store.storage_options(way.url)))
            yield made
            way.close()
    except S3ServerUnavailable as error:
        pytest.skip(f"no S3 server: {error}")
    finally:
        network.close()


def configuration(store: dict[str, Any]) -> dict[str, Any]:
    """Two workers of a role on different nodes; small pools, since all of it is one machine."""
    on_workers = {"resources": {"worker": 1}}
    one_a_node = {**on_workers, "replicas": 2, "max_replicas_per_node": 1, "threads": 1, "kv_cache_gib": 0.1}
    return {
        "model": {"path": str(weights(DEFAULT_MODEL)), "dtype": "float32", "max_model_len": 2048},
        "http": {"host": "0.0.0.0", "port": PORT},
        "library": {
            "directory": "/tmp/orbitserve/library",
            "url": f"s3://{BUCKET}/library",
            "storage_options": store,
            "object_store_bytes": 40_000_000,
            "memory_bytes": 100_000_000,
        },
        "files_url": f"s3://{BUCKET}/files",
        "vision": {"replicas": 0},
        "ingress": {"resources": {"front": 1}, "processor_cache_gib": 0.1},
        "keeper": on_workers,
        "patch": {**on_workers, "rank": 16},
        "prefill": {
            **one_a_node,
            "self_check": False,
            "loaded_bytes": 200_000_000,
            "fidelity": {"share": 0},
            "orbit_chunks": 0,
        },
        "decode": {**one_a_node, "max_num_seqs": 8},
    }
