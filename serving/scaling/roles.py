"""Roles that the planner scales: their deployments, bounds and configuration for Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from autoscale.nodes import Bundle
from autoscale.planner import NAMESPACE, Scaled, actor_name
from autoscale.policies import Bounds
from autoscale.settings import Mode
from autoscale.signals import Role
from serving.settings import ReplicaRange

if TYPE_CHECKING:
    from serving.config import OrbitServeConfig
    from serving.settings import RoleSettings

APPLICATION = "orbitserve"
ROLES = {  # section of the configuration: deployment
    "ingress": "Ingress",
    "vision": "VisionEncoder",
    "prefill": "PrefillWorker",
    "decode": "DecodeWorker",
    "patch": "PatchCompiler",
    "keeper": "LibraryKeeper",
    "retriever": "Retriever",
}
_DEPLOYMENTS = {Role.PREFILL: "PrefillWorker", Role.DECODE: "DecodeWorker", Role.VISION: "VisionEncoder"}
_LONGEST_ANSWER_S = 3600.0  # where requests have no deadline: how long a replica that goes may take for what it has


def pinned(config: OrbitServeConfig) -> OrbitServeConfig:
    """The same configuration, each role asking for a resource of its own.

    That is `orbitserve-ROLE`, unless it asks for `resources` already.
    """
    roles: dict[str, RoleSettings] = {role: getattr(config, role) for role in ROLES}
    return config.model_copy(
        update={
            role: settings.model_copy(update={"resources": {f"orbitserve-{role}": 1.0}})
            for role, settings in roles.items()
            if not settings.resources
        }
    )


def scales(config: OrbitServeConfig, settings: RoleSettings) -> bool:
    """True if a role's replicas follow its plan."""
    return config.autoscale.mode is Mode.ACT and isinstance(settings.replicas, ReplicaRange)


def planned(config: OrbitServeConfig) -> dict[Role, Scaled]:
    """Roles that are planned for."""
    settings: dict[Role, RoleSettings] = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
    if config.has_vision_encoder:
        settings[Role.VISION] = config.vision
    return {
        role: Scaled(_DEPLOYMENTS[role], Bounds(one.least_replicas, one.most_replicas), one.gpus, bundle(one))
        for role, one in settings.items()
    }


def bundle(settings: RoleSettings) -> Bundle:
    """Reservation of one replica of a role on its node."""
    resources = {
        "CPU": settings.num_cpus,
        "GPU": settings.gpus,
        "memory": float(settings.reserved_memory_bytes or 0),
        **settings.resources,
    }
    return Bundle({name: amount for name, amount in resources.items() if amount}, settings.label_selector)


def fixed_bundles(config: OrbitServeConfig) -> list[Bundle]:
    """Reservations of the replicas of all roles that are not planned for."""
    others: list[RoleSettings] = [config.ingress, config.keeper, config.patch, config.retriever]
    return [bundle(one) for one in others for _ in range(one.least_replicas)]


def replicas(
    config: OrbitServeConfig, name: str, settings: RoleSettings, app_name: str = APPLICATION
) -> dict[str, Any]:
    """Options of a role's deployment: fixed replicas, or Serve's autoscaling by the plan.

    A replica that goes may take as long as its longest answer.
    """
    role = next((role for role, deployment in _DEPLOYMENTS.items() if deployment == name), None)
    if role is None or not scales(config, settings):
        return {
            "num_replicas": settings.least_replicas,
            "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout_s,
        }
    policy = AutoscalingPolicy(
        policy_function="autoscale.serve:RolePolicy",
        policy_kwargs={"role": str(role), "planner": actor_name(app_name), "namespace": NAMESPACE},
    )
    longest = config.http.request_timeout_s or _LONGEST_ANSWER_S
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.least_replicas,
            max_replicas=settings.most_replicas,
            initial_replicas=settings.least_replicas,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=policy,
        ),
        "graceful_shutdown_timeout_s": max(settings.graceful_shutdown_timeout_s, longest),
    }
