"""Fit of a deployment's roles to the GPUs of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from serving.config import OrbitServeConfig
from serving.settings import RoleSettings

_SHARED = 0.95  # of one GPU that all roles share: what CUDA itself takes stays free
_POOL_GIB = 8
_ROUNDING = 1e-6


def reserved(config: OrbitServeConfig) -> dict[str, list[float]]:
    """GPUs that each replica of a role reserves, by role; roles that reserve none are left out."""
    roles = {name: role for name, role in config if isinstance(role, RoleSettings)}
    if not config.has_vision_encoder:
        roles.pop("vision")
    return {name: [role.gpus] * role.least_replicas for name, role in roles.items() if role.gpus}


def shortage(wanted: Mapping[str, Sequence[float]], nodes: Sequence[float]) -> str | None:
    """Error message where nodes have too few GPUs for what roles reserve; None: enough.

    It proposes settings that fit.

    Args:
        wanted: see `reserved`.
        nodes: GPUs of each node.
    """
    if _fit(wanted, nodes):
        return None
    needed, available = sum(chain.from_iterable(wanted.values())), sum(nodes)
    parts = ", ".join(f"{name} {sum(counts):g}" for name, counts in wanted.items())
    said = f"the roles reserve {needed:g} GPUs ({parts}), and there are {available:g}"
    if needed <= available + _ROUNDING:
        said += ", but a replica has a share of one GPU, or GPUs of one node"
    if _fit({name: counts for name, counts in wanted.items() if name != "vision"}, nodes):
        return f"{said}. This fits:\n\nvision: {{replicas: 0}}"
    if available < 1 or any(len(counts) > 1 or counts[0] > 1 for counts in wanted.values()):
        return f"{said}. Add GPUs, or lower `replicas` and `tensor_parallel_size`"
    share = int(10 * _SHARED / len(wanted)) / 10
    pool = {name: f", kv_cache_gib: {_POOL_GIB}" for name in ("prefill", "decode")}
    lines = [f"{name}: {{num_gpus: {share}, gpu_memory_utilization: {share}{pool.get(name, '')}}}" for name in wanted]
    return f"{said}. On one GPU this fits, where the pools leave room for the weights:\n\n" + "\n".join(lines)


def _fit(wanted: Mapping[str, Sequence[float]], nodes: Sequence[float]) -> bool:
    """True if replicas find room, the largest first: whole GPUs on one node, a share within one GPU."""
    free = [[1.0] * int(count) for count in sorted(nodes)]  # of each GPU, by node
    for asked in sorted(chain.from_iterable(wanted.values()), reverse=True):
        share, count = min(1.0, asked), max(1, int(asked))
        for gpus in free:
            enough = [i for i, left in enumerate(gpus) if left > share - _ROUNDING]
            if len(enough) >= count:
                for i in enough[:count]:
                    gpus[i] -= share
                break
        else:
            return False
    return True
