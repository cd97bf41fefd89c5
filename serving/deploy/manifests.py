"""Kubernetes manifests of a configuration: a KubeRay RayService with a group per role.

| object              | what                                                                                         |
|---------------------|----------------------------------------------------------------------------------------------|
| RayService          | Serve's configuration; the head, without roles; a group per role, a pod per replica          |
| PodDisruptionBudget | one replica of a role at a time may be evicted, and the head not at all                      |
| NetworkPolicy       | pods of the service reach one another; from elsewhere only the HTTP port is reached          |

Not rendered, so that no secret stands in a manifest: the Secret `NAME-config` with the configuration file itself, and
the claim for the models; `infra/kuberay/README.md` says how to make them. Ray's token is made by KubeRay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from serving.config import ConfigError, OrbitServeConfig
from serving.deploy.launch import APPLICATION, FAST_REQUEST_PATH
from serving.scaling.roles import ROLES, pinned
from serving.settings import RoleSettings

CONFIG_DIRECTORY = "/etc/orbitserve"
MODELS = "/models"
LABEL = "orbitserve.io/role"
_ENGINES = ("vision", "prefill", "decode")
_AGENT_PORT, _RAYLET = 52365, "/api/local_raylet_healthz"  # of a node's dashboard agent: whether its raylet lives
_USER = 1000  # of the image, see infra/Containerfile
_IDLE_SECONDS = 300  # of a node before the autoscaler takes it: longer than a replica's start
_END_SECONDS = 30  # of a pod, behind the answers under way


@dataclass(frozen=True)
class ManifestOptions:
    """Facts that the configuration does not have.

    Attributes:
        name: of the RayService, and the beginning of all other names.
        image: container image with OrbitServe and the configuration's vLLM.
        gpus: render for vLLM's CUDA build, where engines take a GPU for each rank.
        engine_cpus: processors of a pod with an engine; others have one.
        engine_memory_gib: memory of such a pod; others have 4, the retriever's vectors besides.
    """

    name: str = APPLICATION
    image: str = "orbitserve:latest"
    gpus: bool = True
    engine_cpus: int = 8
    engine_memory_gib: int = 32


def render(config: OrbitServeConfig, options: ManifestOptions) -> list[dict[str, Any]]:
    """Manifests of a service, the RayService first.

    Raises:
        ConfigError: the configuration cannot be served from several nodes, or leaves open what a pod would have.
    """
    _refuse_single(config)
    _refuse_unclear(config)
    config = pinned(config)
    roles = [role for role in ROLES if bounds(getattr(config, role))[1] > 0]
    groups = [_group(config, options, role) for role in roles]
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": options.name, "labels": _labels(options)},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(config, options, roles), sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": metadata.version("ray"),
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": _IDLE_SECONDS},
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(config, options, "head"),
                },
                "workerGroupSpecs": groups,
            },
        },
    }
    budgets = [_budget(config, options, role) for role in ("head", *roles)]
    return [service, *budgets, _network_policy(config, options)]


def serve_config(config: OrbitServeConfig, options: ManifestOptions, roles: list[str]) -> dict[str, Any]:
    """Serve's own configuration: the application, each role pinned to its group's pods."""
    deployments = []
    for role in roles:
        settings: RoleSettings = getattr(config, role)
        actor: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": _gpus(config, options, role)}
        if settings.reserved_memory_bytes:
            actor["memory"] = settings.reserved_memory_bytes
        if settings.label_selector:
            actor["label_selector"] = settings.label_selector
        deployments.append({"name": ROLES[role], "ray_actor_options": {**actor, "resources": settings.resources}})
    found = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": config.http.port},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "serving.app:build_app",
                "args": {"config": f"{CONFIG_DIRECTORY}/orbitserve.yaml", "pinned": "true"},
                "deployments": deployments,
            }
        ],
    }
    ServeDeploySchema.model_validate(found)
    return found


class _Dumper(yaml.SafeDumper):
    """YAML with text of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def as_yaml(manifests: list[dict[str, Any]]) -> str:
    """Manifests as one YAML stream, for `kubectl apply --filename -`."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


def read(path: Path) -> OrbitServeConfig:
    """A configuration as its file has it; the model need not be on this machine.

    Raises:
        ConfigError: the file is missing, is not YAML, or a field is unknown or wrong (the message names it).
    """
    try:
        values = yaml.safe_load(path.read_text())
        return OrbitServeConfig.model_validate(values)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        problems = ("{}: {}".format(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(problems)) from None  # the cause quotes API keys


def bounds(settings: RoleSettings) -> tuple[int, int]:
    """Least and most replicas of a role."""
    replicas: Any = settings.replicas
    return (replicas, replicas) if isinstance(replicas, int) else (replicas.min, replicas.max)


def warnings(config: OrbitServeConfig) -> list[str]:
    """Warnings of what works on several nodes, but not as well as it might."""
    found = []
    if config.library.url is None:
        found.append("library.url is not set: what is learnt on a node goes with it, but for what Ray's stores hold")
    if not (config.http.api_keys or config.http.api_keys_file):
        found.append("neither http.api_keys nor http.api_keys_file is set: everybody who reaches the port is served")
    return found


def _refuse_unclear(config: OrbitServeConfig) -> None:
    if "replicas" not in config.vision.model_fields_set:
        raise ConfigError(
            "vision.replicas: say how many; its default depends on the pods' vLLM (1 with GPUs, else 0) and on the "
            "model (a text-only one has none)"
        )


def _refuse_single(config: OrbitServeConfig) -> None:
    if "://" not in config.files_url:
        raise ConfigError(f"files_url: {config.files_url!r} is a directory; pods share none: name a URL, as s3://...")
    if config.http.tls_certificate is not None:
        raise ConfigError("http.tls_certificate: pods serve plain HTTP; end TLS at the cluster's ingress or gateway")
    keys = config.http.api_keys_file
    if keys is not None and not str(keys).startswith(f"{CONFIG_DIRECTORY}/"):
        raise ConfigError(
            f"http.api_keys_file: {keys} is not in the pods; put it into the Secret, as {CONFIG_DIRECTORY}/..."
        )


def _labels(options: ManifestOptions, role: str | None = None) -> dict[str, str]:
    common = {"app.kubernetes.io/name": "orbitserve", "app.kubernetes.io/instance": options.name}
    return common if role is None else {**common, LABEL: role}


def _gpus(config: OrbitServeConfig, options: ManifestOptions, role: str) -> float:
    settings: RoleSettings = getattr(config, role)
    if not options.gpus:
        return 0
    return settings.num_gpus if settings.num_gpus is not None else settings.ranks


def _group(config: OrbitServeConfig, options: ManifestOptions, role: str) -> dict[str, Any]:
    """A worker group with a pod for each replica of a role."""
    settings: RoleSettings = getattr(config, role)
    least, most = bounds(settings)
    parameters = {"resources": json.dumps(json.dumps(settings.resources))}  # KubeRay hands it to a shell
    if settings.label_selector:
        plain = {name: value for name, value in settings.label_selector.items() if not set(value) & set("!(,)")}
        if plain:
            parameters["labels"] = ",".join(f"{name}={value}" for name, value in plain.items())
    return {
        "groupName": role,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": parameters,
        "template": _pod(config, options, role),
    }


def _pod(config: OrbitServeConfig, options: ManifestOptions, role: str) -> dict[str, Any]:
    is_engine = role in _ENGINES
    vectors = math.ceil(config.retriever.max_vector_bytes / (1 << 30)) if role == "retriever" else 0
    memory = f"{options.engine_memory_gib if is_engine else 4 + vectors}Gi"
    limits: dict[str, Any] = {"cpu": str(options.engine_cpus if is_engine else 1), "memory": memory}
    grace = _END_SECONDS
    if role != "head":
        settings: RoleSettings = getattr(config, role)
        grace += math.ceil(settings.graceful_shutdown_timeout_s)
        if gpus := math.ceil(_gpus(config, options, role)):
            limits["nvidia.com/gpu"] = str(gpus)
    requests = dict(limits)
    mounts = {"config": CONFIG_DIRECTORY, "models": _models(config), "scratch": "/tmp", "shared-memory": "/dev/shm"}
    container: dict[str, Any] = {
        "name": "ray",
        "image": options.image,
        "env": [{"name": name, "value": value} for name, value in _environment().items()],
        "envFrom": [{"secretRef": {"name": f"{options.name}-environment", "optional": True}}],
        "ports": [{"name": "http", "containerPort": config.http.port}],
        "resources": {"limits": limits, "requests": requests},
        # A worker is ready with its proxy; KubeRay asks the head's itself.
        "readinessProbe": _probe(_RAYLET, _AGENT_PORT, failures=3)
        if role == "head"
        else _probe("/-/healthz", config.http.port, failures=1),
        "livenessProbe": _probe(_RAYLET, _AGENT_PORT, failures=12),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": name, "mountPath": path, **({"readOnly": True} if name == "config" else {})}
            for name, path in mounts.items()
        ],
    }
    if role == "head":
        container["ports"] += [{"name": "gcs", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
    return {
        "metadata": {"labels": _labels(options, role)},
        "spec": {
            "restartPolicy": "Never",  # as autoscaler v2 wants it: it replaces pods itself
            "terminationGracePeriodSeconds": grace,
            "securityContext": {"fsGroup": _USER},
            "containers": [container],
            "volumes": [
                {"name": "config", "secret": {"secretName": f"{options.name}-config"}},
                {"name": "models", "persistentVolumeClaim": {"claimName": f"{options.name}-models"}},
                {"name": "scratch", "emptyDir": {}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def _models(config: OrbitServeConfig) -> str:
    """Mount point of the models' claim: the checkpoint's parent, if the configuration names a directory."""
    path = PurePosixPath(config.model.path)
    return str(path.parent) if path.is_absolute() else MODELS


def _environment() -> Mapping[str, str]:
    """Environment of all pods: Serve's switches, and one place for what is downloaded from a hub."""
    return {**FAST_REQUEST_PATH, "HF_HOME": f"{MODELS}/huggingface", "RAY_worker_niceness": "0"}


def _probe(path: str, port: int, failures: int) -> dict[str, Any]:
    where = {"path": path, "port": port}
    return {"httpGet": where, "initialDelaySeconds": 10, "periodSeconds": 5, "failureThreshold": failures}


def _budget(config: OrbitServeConfig, options: ManifestOptions, role: str) -> dict[str, Any]:
    """Budget by which one replica of a role at a time may be evicted, and never the head."""
    least = 2 if role == "head" else bounds(getattr(config, role))[0]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{options.name}-{role}", "labels": _labels(options)},
        "spec": {
            "minAvailable": max(0, least - 1),  # `maxUnavailable` needs a controller that scales: RayCluster has none
            "selector": {"matchLabels": _labels(options, role)},
        },
    }


def _network_policy(config: OrbitServeConfig, options: ManifestOptions) -> dict[str, Any]:
    """Rules for who reaches the pods: NIXL has neither passwords nor encryption."""
    ours = {"podSelector": {"matchLabels": _labels(options)}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    ports = [{"port": port, "protocol": "TCP"} for port in (8265, _AGENT_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": options.name, "labels": _labels(options)},
        "spec": {
            "podSelector": {"matchLabels": _labels(options)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [ours]},
                {"from": [operator], "ports": ports},
                {"ports": [{"port": config.http.port, "protocol": "TCP"}]},
            ],
        },
    }
