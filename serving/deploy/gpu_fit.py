"""Fit of a deployment's roles to the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from serving.config import OrbitServeConfig
from serving.settings import RoleSettings

_SHARED = 0.95  # of one GPU that all roles share: what CUDA itself takes stays free
_POOL_GIB = 8


def reserved(config: OrbitServeConfig) -> dict[str, float]:
    """GPUs that each role's replicas reserve in all; roles that reserve none are left out."""
    roles = {name: role for name, role in config if isinstance(role, RoleSettings)}
    if not config.has_vision_encoder:
        roles.pop("vision")
    return {name: role.gpus * role.least_replicas for name, role in roles.items() if role.gpus}


def shortage(wanted: Mapping[str, float], available: float) -> str | None:
    """Error message where so many GPUs are too few for what roles reserve; None: they suffice.

    It proposes settings that fit.
    """
    needed = sum(wanted.values())
    if needed <= available + 1e-6:
        return None
    parts = ", ".join(f"{name} {count:g}" for name, count in wanted.items())
    said = f"the roles reserve {needed:g} GPUs ({parts}), and there are {available:g}"
    if needed - wanted.get("vision", 0) <= available:
        return f"{said}. This fits:\n\nvision: {{replicas: 0}}"
    if available < 1 or any(count > 1 for count in wanted.values()):
        return f"{said}. Add GPUs, or lower `replicas` and `tensor_parallel_size`"
    share = int(10 * _SHARED / len(wanted)) / 10
    pool = {name: f", kv_cache_gib: {_POOL_GIB}" for name in ("prefill", "decode")}
    lines = [f"{name}: {{num_gpus: {share}, gpu_memory_utilization: {share}{pool.get(name, '')}}}" for name in wanted]
    return f"{said}. On one GPU this fits, where the pools leave room for the weights:\n\n" + "\n".join(lines)
