"""A Ray cluster on hosts of `hosts`, by the recipe of infra/README.md, and one OrbitServe service over it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.hosts import Host, Network

REPOSITORY = Path(__file__).parents[2]
HEAD = "a"
PORT = 8100
WORKER = {"worker": 10.0, "prefill": 10.0, "decode": 10.0}  # resources of nodes for every role but the ingress
_OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MB
_START_SECONDS = 900.0
_KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def recipe_environment() -> dict[str, str]:
    """Environment of everything on the hosts: `infra/cluster.env`, one token, and little of ours."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    for line in (REPOSITORY / "infra/cluster.env").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            environment[name] = value
    scripts = str(Path(sys.executable).parent)
    return environment | {
        "PATH": f"{scripts}:{environment.get('PATH', os.defpath)}",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/tmp/home",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/mnt/token",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Of hosts that are one machine, a small one:
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    }


class Cluster:
    """Ray on some hosts, and the service. `close` ends all of it.

    Args:
        network: where the hosts are made.
        nodes: custom resources of each host's node by the host's letter; the first is the head.
    """

    def __init__(self, network: Network, nodes: Mapping[str, Mapping[str, float]]) -> None:
        self.network, self.environment = network, recipe_environment()
        (network.shared / "token").write_text(secrets.token_hex(32))
        self._service: subprocess.Popen[bytes] | None = None
        self._log = network.base / "service.log"
        for letter, resources in nodes.items():
            self.join(letter, resources)

    @property
    def head(self) -> Host:
        """Host of the head node."""
        return self.network.hosts[HEAD]

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return f"http://{self.head.address}:{PORT}"

    def join(self, letter: str, resources: Mapping[str, float]) -> Host:
        """Switch a host on and start its node."""
        host = self.network.up(letter)
        place = ["--head", "--port", "6379"] if letter == HEAD else ["--address", f"{self.head.address}:6379"]
        started = host.run(
            "ray",
            "start",
            *place,
            *("--node-ip-address", host.address),
            *("--num-cpus", "2", "--object-store-memory", str(_OBJECT_STORE_BYTES)),
            *("--resources", json.dumps(dict(resources))),
            *(("--include-dashboard", "false") if letter == HEAD else ()),
            environment=self.environment,
            seconds=240,
        )
        assert started.returncode == 0, started.stdout
        return host

    def serve(self, config: Mapping[str, Any]) -> None:
        """Start the service by `orbitserve serve`, and wait until it serves."""
        file = self.network.shared / "orbitserve.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        self._service = self.head.start(
            *("orbitserve", "serve", "--config", "/mnt/orbitserve.yaml"), environment=self.environment, log=self._log
        )
        until = time.monotonic() + _START_SECONDS
        while "serving" not in (said := self._log.read_text()):
            assert self._service.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.5)

    @property
    def said(self) -> str:
        """Output of `orbitserve serve`."""
        return self._log.read_text()

    def python(self, code: str, seconds: float = 120) -> str:
        """Output of Python code on the head, in a driver that has joined the cluster."""
        file = self.network.shared / f"driver-{secrets.token_hex(4)}.py"
        file.write_text(
            "import asyncio, json, ray\nfrom ray import serve\n"
            f"ray.init(address='{self.head.address}:6379', log_to_driver=False, logging_level='ERROR')\n{code}"
        )
        ran = self.head.run("python", f"/mnt/{file.name}", environment=self.environment, seconds=seconds)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    def replicas(self) -> dict[str, list[str]]:
        """Addresses of the nodes on which each role's replicas are alive."""
        found = self.python(
            "from ray.util.state import list_actors\n"
            "nodes = {one['NodeID']: one['NodeManagerAddress'] for one in ray.nodes() if one['Alive']}\n"
            "from ray._private.state import actors\n"
            "where = {}\n"
            "for one in actors().values():\n"
            "    name = one['Name']\n"
            "    if one['State'] == 'ALIVE' and name.startswith('SERVE_REPLICA::'):\n"
            "        where.setdefault(name.split('#')[1], []).append(nodes.get(one['Address']['NodeID'], 'gone'))\n"
            "print('WHERE', json.dumps(where))\n"
        )
        return json.loads(next(line for line in found.splitlines() if line.startswith("WHERE ")).removeprefix("WHERE "))

    def everywhere(self, role: str, method: str) -> None:
        """Call a method of every replica of a role."""
        self.python(
            "async def call():\n"
            f"    return await serve.get_deployment_handle({role!r}, 'orbitserve').broadcast({method!r})"
            ".results_async()\n"
            "asyncio.run(call())\n"
        )

    def settle(self) -> None:
        """Wait until everything learnt so far is stored."""
        self.everywhere("PrefillWorker", "flush")
        self.everywhere("PatchCompiler", "flush")

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health", timeout=30, trust_env=False)

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Seconds until a condition is true; it may raise httpx' errors meanwhile."""
        began = time.monotonic()
        while True:
            try:
                if condition():
                    return time.monotonic() - began
            except httpx.HTTPError:
                pass
            assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}\n{self.said}"
            time.sleep(0.3)

    def wait_until_well(self, seconds: float = 600) -> float:
        """Seconds until every role answers."""
        return self.wait_until(lambda: self.health().status_code == 200, seconds, "healthy")

    def close(self) -> None:
        """End the service and everything on the hosts."""
        if self._service is not None:
            self._service.kill()
        self.network.close()
        if self._service is not None:
            self._service.wait(20)
