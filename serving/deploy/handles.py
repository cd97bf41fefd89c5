"""Handles of deployments for drivers: processes without an event loop."""

from __future__ import annotations

from ray import serve
from ray.serve.handle import DeploymentHandle


def driver_handle(deployment: str, application: str) -> DeploymentHandle:
    """Handle whose answers may be waited for by `result()`.

    Its router runs on a loop of its own, whatever `RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP` says to replicas: a driver
    that has the environment of `infra/cluster.env` could else call nothing.
    """
    handle = serve.get_deployment_handle(deployment, application)
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle
