"""Start of the application on this machine: Ray, Serve, the graph, with progress."""

from __future__ import annotations

import logging
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from rich.console import Console

from infra.machine import multiplies_bf16
from infra.models import stored_dtype
from infra.ports import url_host
from infra.vllm_env import is_cpu_build
from serving.app import build
from serving.config import OrbitServeConfig
from serving.deploy.gpu_fit import reserved, shortage
from serving.deploy.handles import driver_handle
from serving.deploy.ray_cluster import ray_cluster
from serving.settings import HttpSettings, ModelSettings, RoleSettings

APPLICATION = "orbitserve"
_ROLES = ("PatchCompiler", "LibraryKeeper", "VisionEncoder", "PrefillWorker", "DecodeWorker", "Ingress")


# Ray Serve's switches for a short way between replicas: gRPC instead of actor calls, one event loop instead of three;
# and what bounds headers in its proxies.
# Serve reads them in every process of the cluster; for a cluster of your own `infra/cluster.env` says them again.
FAST_REQUEST_PATH = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # else 4 MiB: less than a file, pixels or embeddings
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serving.proxy_protocol:set_up_proxy",
    "grpc_proxy": "",  # else gRPC takes http_proxy, as Ray's own does not
}
_ANY_HOST = ("0.0.0.0", "::", "127.0.0.1", "::1", "localhost")  # that every node can listen on
_START_SECONDS, _END_SECONDS = 1800.0, 30.0


class StartUpError(RuntimeError):
    """A role could not be started; the message carries its own."""


@contextmanager
def application(config: OrbitServeConfig, console: Console) -> Iterator[str]:
    """The running application; yields its base URL, and takes everything down again at the end.

    Joins a Ray cluster that is already there (RAY_ADDRESS, or one started on this machine), else starts one.

    Raises:
        StartUpError: a role failed to start, or did not within half an hour; the GPUs are too few; the cluster serves
            the application already, listens elsewhere already, or the port is taken; the TLS files cannot be used.
    """
    _check_tls(config.http)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with ray_cluster(runtime_env={"env_vars": FAST_REQUEST_PATH}):
        _end_by_signal()  # after Ray, which brings a handler of its own
        try:
            everywhere = config.http.host in _ANY_HOST
            serve.start(
                proxy_location="EveryNode" if everywhere else "HeadOnly",
                http_options={
                    "host": config.http.host,
                    "port": config.http.port,
                    "ssl_keyfile": _name(config.http.tls_key),
                    "ssl_certfile": _name(config.http.tls_certificate),
                },
            )
        except RuntimeError as error:
            raise StartUpError(f"cannot listen on {config.http.host}:{config.http.port}: {error}") from error
        _refuse_elsewhere(config)
        if APPLICATION in serve.status().applications:
            raise StartUpError(f"{APPLICATION!r} is served on this Ray cluster already; end that first, or use another")
        _warn_of_apart(config, console)
        _warn_of_slow_products(config.model, console)
        _refuse_too_few_gpus(config, console)
        try:
            target = serve.RunTarget(build(config), name=APPLICATION, route_prefix="/")
            try:
                serve.run_many([target], wait_for_applications_running=False)
            except RayServeException as error:  # another application has the prefix
                raise StartUpError(str(error)) from error
            _wait_until_ready(console)
            longest = driver_handle("Ingress", APPLICATION).longest.remote().result()
            console.print(f"  prompts with their answers have up to {longest} tokens; {_logs()}")
            yield f"{'https' if config.http.tls_key else 'http'}://{url_host(config.http.host)}:{config.http.port}"
        finally:
            _end(config)


def _end(config: OrbitServeConfig) -> None:
    """End the application: running requests end, as long as they may take, and engines free what they hold."""
    patience = max(role.graceful_shutdown_timeout_s for _, role in config if isinstance(role, RoleSettings))
    until = time.monotonic() + patience + _END_SECONDS
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION, _blocking=False)  # else it waits for a minute at most
    while APPLICATION in serve.status().applications and time.monotonic() < until:
        time.sleep(0.1)


def _refuse_elsewhere(config: OrbitServeConfig) -> None:
    """Raises StartUpError where Ray Serve runs already and listens elsewhere: it would go on doing so."""
    found, asked = _get_global_client().http_config, config.http
    if (found.host, found.port) != (asked.host, asked.port):
        raise StartUpError(
            f"Ray Serve listens on {found.host}:{found.port} already, not on {asked.host}:{asked.port}; "
            f"pass --host {found.host} --port {found.port}, or end it with `serve shutdown`"
        )
    if found.ssl_certfile != _name(asked.tls_certificate):
        raise StartUpError(
            f"Ray Serve runs already with the TLS certificate {found.ssl_certfile}, not {asked.tls_certificate}; "
            "end it with `serve shutdown`"
        )


def _check_tls(http: HttpSettings) -> None:
    """Raises StartUpError where the proxy could not use the TLS files: it would not say so."""
    if http.tls_certificate is None or http.tls_key is None:
        return
    try:
        no_passphrase = lambda: ""  # noqa: E731 - else OpenSSL asks for it on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http.tls_certificate, http.tls_key, no_passphrase)
    except OSError as error:  # also that they are no pair
        raise StartUpError(f"cannot use http.tls_certificate and http.tls_key: {error.strerror or error}") from error


def _refuse_too_few_gpus(config: OrbitServeConfig, console: Console) -> None:
    """Raises StartUpError where roles would wait for GPUs for ever; of a cluster that may grow, it says so alone."""
    nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    short = shortage(reserved(config), nodes)
    if short is None:
        return
    if len(nodes) == 1:
        raise StartUpError(short)
    console.print(f"[yellow]warning:[/yellow] {short}\nRoles wait until there are more.")


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _warn_of_apart(config: OrbitServeConfig, console: Console) -> None:
    """Say where replicas on different nodes would each have files of their own."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes < 2:
        return
    found = []
    if "://" not in config.files_url:
        found.append(
            f"files_url is a directory, {config.files_url}: unless that is on storage that all of them share, replicas "
            "on one do not find what another one was sent"
        )
    if config.library.url is None:
        found.append("library.url is not set: what is learnt on a node is lost with it, and the keeper sees no patches")
    for problem in found:
        console.print(f"[yellow]warning:[/yellow] there are {nodes} nodes, and {problem}", markup=True)


def _warn_of_slow_products(model: ModelSettings, console: Console) -> None:
    """Say where the model is to be computed in bf16 on a CPU that cannot do so at speed."""
    if not is_cpu_build() or multiplies_bf16():  # the head of GPU nodes may have none
        return
    if (stored_dtype(model.path) if model.dtype == "auto" else model.dtype) == "bfloat16":
        console.print(
            "[yellow]warning:[/yellow] without AVX-512 bf16 takes many times as long as fp32 on a CPU; set "
            "`model.dtype: float32`"
        )


def _logs() -> str:
    """Where the replicas' logs are, on the node of each."""
    node = ray._private.worker._global_node  # None in a client of a cluster elsewhere
    folder = node.get_logs_dir_path() if node is not None else "/tmp/ray/session_latest/logs"
    return f"logs of the replicas: {Path(folder) / 'serve'}"


def _end_by_signal() -> None:
    """SIGTERM ends the application as an interrupt does, also while its roles are still coming up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def _wait_until_ready(console: Console) -> None:
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
                    raise StartUpError(f"{name} could not be started: {deployment.message}\n{_logs()}")
            if status.status == "RUNNING":
                return
            if status.status == "DEPLOY_FAILED":
                raise StartUpError(f"{status.message}\n{_logs()}")
        if time.monotonic() - began > _START_SECONDS:
            awaited = status.deployments if status is not None else _ROLES
            missing = ", ".join(name for name in _ROLES if name in awaited and name not in ready)
            raise StartUpError(f"not ready after {_START_SECONDS:.0f} s: {missing}\n{_logs()}")
        time.sleep(0.5)  # asking takes 15 ms of CPU, which the roles want for coming up
