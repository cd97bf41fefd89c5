"""Start the application on this machine: Ray, Serve, the graph; and say what is happening while the roles come up."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.serve.context import _get_global_client
from rich.console import Console

from serving.app import build
from serving.config import OrbitServeConfig
from serving.ray_cluster import ray_cluster

APPLICATION = "orbitserve"
_ROLES = ("PatchCompiler", "LibraryKeeper", "VisionEncoder", "PrefillWorker", "DecodeWorker", "Ingress")


# Ray Serve's switches for a short way between replicas: gRPC instead of actor calls, one event loop instead of three.
# Serve reads them in every process of the cluster; on a cluster of your own, put them into its environment.
FAST_REQUEST_PATH = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # else 4 MiB: less than a file, pixels or embeddings
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


class StartUpError(RuntimeError):
    """A role could not be started; the message carries its own."""


@contextmanager
def application(config: OrbitServeConfig, console: Console, timeout_s: float = 600.0) -> Iterator[str]:
    """The running application; yields its base URL, and takes everything down again at the end.

    Joins a Ray cluster that is already there (RAY_ADDRESS, or one started on this machine), else starts one.

    Raises:
        StartUpError: a role failed to start, or did not within `timeout_s`; the cluster serves the application already,
            listens elsewhere already, or the port is taken.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_cluster(runtime_env={"env_vars": FAST_REQUEST_PATH}):
        _end_by_signal()  # after Ray, which brings a handler of its own
        try:
            serve.start(http_options={"host": config.http.host, "port": config.http.port})
        except RuntimeError as error:
            raise StartUpError(f"cannot listen on {config.http.host}:{config.http.port}: {error}") from error
        _refuse_elsewhere(config)
        if APPLICATION in serve.status().applications:
            raise StartUpError(f"{APPLICATION!r} is served on this Ray cluster already; end that first, or use another")
        try:
            target = serve.RunTarget(build(config), name=APPLICATION, route_prefix="/")
            serve.run_many([target], wait_for_applications_running=False)
            wait_until_ready(console, timeout_s)
            yield f"http://{config.http.host}:{config.http.port}"
        finally:
            serve.delete(APPLICATION)  # lets running requests end and the engines free what they hold


def _refuse_elsewhere(config: OrbitServeConfig) -> None:
    """Raises StartUpError where Ray Serve runs already and listens elsewhere: it would go on doing so."""
    found, asked = _get_global_client().http_config, config.http
    if (found.host, found.port) != (asked.host, asked.port):
        raise StartUpError(
            f"Ray Serve listens on {found.host}:{found.port} already, not on {asked.host}:{asked.port}; "
            f"pass --host {found.host} --port {found.port}, or end it with `serve shutdown`"
        )


def _end_by_signal() -> None:
    """SIGTERM ends the application as an interrupt does, also while its roles are still coming up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def wait_until_ready(console: Console, timeout_s: float) -> None:
    """Show each role as it becomes healthy.

    Raises:
        StartUpError: a role failed, or time ran out.
    """
    began, ready = time.monotonic(), set[str]()
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None:
            for name in _ROLES:
                deployment = status.deployments.get(name)
                if deployment is None or name in ready:
                    continue
                if deployment.status == "HEALTHY":
                    ready.add(name)
                    console.print(f"  [green]ready[/green] {name:15} {time.monotonic() - began:5.1f} s")
                elif deployment.status in ("UNHEALTHY", "DEPLOY_FAILED"):
                    raise StartUpError(f"{name} could not be started: {deployment.message}")
            if status.status == "RUNNING":
                return
            if status.status == "DEPLOY_FAILED":
                raise StartUpError(status.message)
        if time.monotonic() - began > timeout_s:
            missing = ", ".join(name for name in _ROLES if name not in ready)
            raise StartUpError(f"not ready after {timeout_s:.0f} s: {missing}")
        time.sleep(0.5)  # asking takes 15 ms of CPU, which the roles want for coming up
