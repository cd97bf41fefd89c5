"""The Ray cluster of a command: one that runs already, else its own while it runs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.services import find_bootstrap_address

from infra.ports import LOOPBACK
from serving.replicas.process import ONE_MACHINE

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0
# Of a cluster on this machine, where all processes share its processors.
_SETTINGS = {
    "RAY_worker_niceness": "0",  # replicas are servers: at Ray's 15 any other process goes first
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # by itself Serve looks after every deployment ten times a second
    "RAY_memory_monitor_refresh_ms": "0",  # where others fill the memory it takes the proxy or controller first
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",  # a proxy that died is missed sooner than after 10
}


@contextmanager
def ray_cluster(**options: Any) -> Iterator[None]:
    """Join this process's cluster, the one that RAY_ADDRESS names, or one on this machine.

    Without any, a cluster is started, and ended at the end. It is told `_SETTINGS`; what the environment says stands.

    Args:
        options: further ones of `ray.init`.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if (address := _address()) == "local":
        environment = options.get("runtime_env", {})
        variables = {**environment.get("env_vars", {}), ONE_MACHINE: "1"}
        options["runtime_env"] = {**environment, "env_vars": variables}
        options["_node_ip_address"] = LOOPBACK
    with _loopback_allowed() if address == "local" else nullcontext():
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _loopback_allowed() -> Iterator[None]:
    """Context in which Ray takes a loopback address for a node's.

    Everything in a cluster under one listens on it alone. Ray would put the machine's own in its place, as other nodes
    could not reach it; but on systems where it knows no others.
    """
    allowed = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = allowed


def running_address() -> str | None:
    """Address of RAY_ADDRESS's cluster, or of one on this machine; None: there is none."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    left = find_bootstrap_address(None)
    return left if left is not None and _answers(left) else None


def _address() -> str | None:
    """Address for `ray.init`: None for a cluster that is there, `local` for one to be started.

    A killed cluster leaves its address behind, and Ray would wait for it.
    """
    if os.environ.get("RAY_ADDRESS"):
        return None
    left = find_bootstrap_address(None)
    if left is None:
        return "local"
    if _answers(left):
        return None
    logger.warning("no Ray cluster answers at %s, the address that the last one left: starting another", left)
    return "local"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False
