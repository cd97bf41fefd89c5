"""Whether a deployment's roles fit the GPUs of a cluster."""

from __future__ import annotations

from serving.config import OrbitServeConfig
from serving.settings import RoleSettings

_SHARED = 0.95  # of one GPU that all roles share: what CUDA itself takes stays free
_POOL_GIB = 8


def reserved(config: OrbitServeConfig) -> dict[str, float]:
    """GPUs that each role's replicas reserve in all; roles that reserve none are left out."""
    roles = {name: role for name, role in config if isinstance(role, RoleSettings)}
    if not config.has_vision_encoder:
        roles.pop("vision")
    return {name: role.gpus * role.replicas for name, role in roles.items() if role.gpus}


def shortage(config: OrbitServeConfig, available: float) -> str | None:
    """What to say where so many GPUs are too few, with settings that fit them; None: they suffice."""
    wanted = reserved(config)
    needed = sum(wanted.values())
    if needed <= available + 1e-6:
        return None
    parts = ", ".join(f"{name} {count:g}" for name, count in wanted.items())
    said = f"the roles reserve {needed:g} GPUs ({parts}), and there are {available:g}"
    if needed - wanted.get("vision", 0) <= available:
        return f"{said}. This fits:\n\nvision: {{replicas: 0}}"
    if available < 1 or any(config.model_dump()[name].get("tensor_parallel_size", 1) > 1 for name in wanted):
        return f"{said}. Add nodes with GPUs, or lower `replicas` and `tensor_parallel_size`"
    share = int(10 * _SHARED / len(wanted)) / 10
    pools = {"prefill", "decode"}
    lines = [
        f"{name}: {{replicas: 1, num_gpus: {share}, gpu_memory_utilization: {share}"
        + (f", kv_cache_gib: {_POOL_GIB}}}" if name in pools else "}")
        for name in wanted
    ]
    return f"{said}. On one GPU this fits, with pools that leave room for the weights:\n\n" + "\n".join(lines)
