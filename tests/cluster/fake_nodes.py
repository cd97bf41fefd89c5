"""A Ray cluster of fake nodes under Ray's autoscaler, and what `autoscale.nodes` makes it do. Run on a host of `hosts`.

`AutoscalingCluster` ends every Ray that it sees in /proc, as it starts and as it ends: on a host of namespaces that is
its own alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import AutoscalingCluster

from autoscale.nodes import Bundle, NodeRequests
from autoscale.planner import request_nodes

PATIENCE_S = 240.0
_OBJECT_STORE_BYTES = 80_000_000
_CONFIG: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 8,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.1,
    "auth": {"ssh_user": "nobody"},
    "file_mounts_sync_continuously": False,
    "file_mounts": {},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{name}_start_ray_commands": [] for name in ("head", "worker")},
}


class FakeCluster(AutoscalingCluster):
    """`AutoscalingCluster` with a configuration of its own: Ray's wheel lacks the file with the usual one."""

    def _generate_config(
        self, head_resources: Mapping[str, float], worker_node_types: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        head = {"resources": dict(head_resources), "node_config": {}, "max_workers": 0}
        return {**_CONFIG, "available_node_types": {**worker_node_types, "ray.head.default": head}}


def nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def until(count: int, what: str) -> None:
    began = time.monotonic()
    while nodes() != count:
        if time.monotonic() - began > PATIENCE_S:
            sys.exit(f"{nodes()} nodes, not {count}: {what}")
        time.sleep(0.3)
    print(f"{count} nodes after {time.monotonic() - began:.0f} s: {what}", flush=True)


def main() -> None:
    """Ask for nodes, for fewer, and for none."""
    if not Path("/tmp/ready").exists():
        sys.exit("this is no host of `hosts`: other Ray clusters would be ended")
    each = {"CPU": 1, "prefill": 1, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = FakeCluster(
        {"CPU": 1, "object_store_memory": _OBJECT_STORE_BYTES},
        {"prefill": {"resources": each, "node_config": {}, "min_workers": 0, "max_workers": 3}},
    )
    cluster.start()
    try:
        ray.init("auto", log_to_driver=False)
        until(1, "the head alone")
        requests, replica = NodeRequests(request_nodes), Bundle({"CPU": 0.5, "prefill": 1.0})
        requests.want([replica, replica], time.monotonic())
        until(3, "two replicas are planned, none has been started")
        requests.want([replica], time.monotonic())
        until(2, "one replica is planned")
        requests.withdraw()
        until(1, "the application has ended")
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
