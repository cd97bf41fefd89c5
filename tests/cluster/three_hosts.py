"""One service over three hosts: ingress on a; a prefill and a decode worker on b and on c, keeper on one of these.

Each role asks its nodes for a resource of its name, so that a host may be given some roles alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra.reference import DEFAULT_MODEL, weights
from infra.s3_server import s3_server
from tests.cluster.cluster import PORT, WORKER, Cluster
from tests.cluster.hosts import Network
from tests.tcp_proxy import TcpProxy

BUCKET = "cluster"
WORKERS = "bc"  # letters of the hosts with workers


@contextmanager
def three_hosts(base: Path) -> Iterator[Cluster]:
    """The service, ready; its hosts write below `base`.

    Raises:
        S3ServerUnavailable: there is none to be had for the library.
    """
    network = Network(base)
    try:
        with s3_server() as store:
            store.make_bucket(BUCKET)
            way = TcpProxy(store.port, network.here)
            made = Cluster(network, {"a": {"front": 10.0}, **dict.fromkeys(WORKERS, WORKER)})
            made.serve(configuration(store.storage_options(way.url)))
            yield made
            way.close()
    finally:
        network.close()


def configuration(store: dict[str, Any]) -> dict[str, Any]:
    """Two workers of a role on different nodes; small pools, since all of it is one machine."""
    on_workers = {"resources": {"worker": 1}}
    one_a_node = {"replicas": 2, "max_replicas_per_node": 1, "threads": 1, "kv_cache_gib": 0.1}
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
            "resources": {"prefill": 1},
            "self_check": False,
            "loaded_bytes": 200_000_000,
            "fidelity": {"share": 0},
            "orbit_chunks": 0,
        },
        "decode": {**one_a_node, "resources": {"decode": 1}, "max_num_seqs": 8},
    }


def holder(cluster: Cluster, role: str) -> str:
    """Letter of the host that has a role's only replica."""
    (address,) = cluster.replicas()[role]
    return next(letter for letter, host in cluster.network.hosts.items() if host.address == address)


def other(letter: str) -> str:
    """The other host with workers."""
    return WORKERS.replace(letter, "")


def well_on_both(cluster: Cluster) -> float:
    """Seconds until each role has its replicas on both hosts with workers, and all answer."""
    nodes = {cluster.network.hosts[letter].address for letter in WORKERS}
    seconds = cluster.wait_until(
        lambda: all(set(cluster.replicas().get(role, ())) == nodes for role in ("PrefillWorker", "DecodeWorker")),
        600,
        "a prefill and a decode worker on each node",
    )
    return seconds + cluster.wait_until_well()
