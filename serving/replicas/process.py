"""Process of a replica: threads, memory, niceness, and vLLM's environment."""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve

from infra.ports import LOOPBACK, free_port
from infra.vllm_env import GPU_ENVIRONMENT, KV_SPACE, vllm_environment
from serving.settings import RoleSettings

# How often OpenMP's threads (libgomp) look for the next parallel region of a forward before they sleep: for half a
# millisecond, which is longer than Python needs from one region to the next. libgomp's own is 13 ms, too long on
# processors that others use. Engines have them sleep at once while others do (`infra.cpu.openmp`).
SPIN = ("GOMP_SPINCOUNT", "10000")

# malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD (32 MiB is its most), M_ARENA_MAX.
_MALLOC = {-1: 512 << 20, -2: 64 << 20, -3: 32 << 20, -8: 1}

ONE_MACHINE = "ORBITSERVE_ONE_MACHINE"  # "1" in clusters that a command has started for itself

UCX_LOOPBACK = ("UCX_NET_DEVICES", "lo")  # else UCX listens on the address of every network device

MOST_FAILURES = 3  # of an engine, one after another: then it is hardly the requests


def enter(settings: RoleSettings) -> None:
    """Set this process up for a role. Must run before anything imports torch."""
    os.environ.setdefault(*SPIN)
    keep_freed_memory()
    usable = len(os.sched_getaffinity(0))  # Ray would give an actor with part of a CPU one thread
    os.environ["OMP_NUM_THREADS"] = str(settings.threads or int(settings.num_cpus) or usable)
    give_way(0 if settings.gpus else settings.niceness)  # a GPU must not wait for its thread


def enter_vllm(
    settings: RoleSettings, *, kv_cache_gib: float | None, handshakes_at: str | None = None, own_runner: bool = True
) -> None:
    """`enter`, with vLLM's environment. Must run before anything imports torch or vLLM.

    Args:
        handshakes_at: address on which the engine answers NIXL handshakes; None: it exchanges no KV.
        own_runner: see `vllm_environment`.
    """
    enter(settings)
    keep_log_open()
    os.environ.pop(KV_SPACE, None)  # of whoever started Ray
    if is_alone():
        os.environ.setdefault(*UCX_LOOPBACK)
    environment = vllm_environment(
        kv_cache_gib=kv_cache_gib,
        nixl_host=handshakes_at or LOOPBACK,
        nixl_port=None if handshakes_at is None else free_port(),
        own_runner=own_runner,
    )
    own = {name: os.environ[name] for name in GPU_ENVIRONMENT if name in os.environ}  # an operator's
    os.environ.update(environment | own)


def replica_name() -> str:
    """Name of the Serve replica that this process is."""
    return str(serve.get_replica_context().replica_id.unique_id)


def node_id() -> str:
    """Ray's id of this process' node."""
    return str(ray.get_runtime_context().get_node_id())


def replica_states(app_name: str, deployment: str) -> dict[str, int]:
    """Numbers of a deployment's replicas by their state in Serve; asks Serve's controller."""
    application = serve.status().applications.get(app_name)
    found = application.deployments.get(deployment) if application is not None else None
    return dict(found.replica_states) if found is not None else {}


def address_for_peers() -> str:
    """Address of this node for other replicas: loopback where all of them are on this machine."""
    return LOOPBACK if is_alone() else str(ray.util.get_node_ip_address())


def is_alone() -> bool:
    """True where all replicas are on this machine."""
    return os.environ.get(ONE_MACHINE) == "1"


def keep_log_open() -> None:
    """Keep this process's log handlers from being closed by `logging.config.dictConfig`.

    vLLM and NIXL call that as they are imported or make an engine. Ray Serve's handler has no target from then on, and
    whatever is said in a replica, by us too, is lost.
    """
    logging._handlerList.clear()  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Have glibc keep up to half a GiB that this process frees, shared by later threads.

    Else large tensors of any thread but the main one go back to the system as soon as they are freed, and come again
    page by page: the prefill loop, which is such a thread, would do that with the activations of every long forward.

    What the environment asks of the allocator stands. Other C libraries are left alone.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOC.items():
            mallopt(option, value)


def give_way(niceness: int) -> None:
    """Raise the niceness of all threads of this process, and of those that they start.

    A thread that gives way further already, as Ray's workers may, goes on so. Linux counts niceness by thread; other
    systems are left alone.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, thread := int(task.name)) < niceness:
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
