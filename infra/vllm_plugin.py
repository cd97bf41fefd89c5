"""vLLM plugin (entry point `vllm.general_plugins`), loaded in every engine process.

On a CPU with AMX it asks the kernel for leave to use its tiles. vLLM's attention over bf16 uses them without, and an
engine in whose process nothing else has asked (a decode engine's small steps do not) dies of an illegal instruction.

It calls MKL's vector functions once, on one thread. MKL picks a function's kernel in its first call, and where several
threads make that call at once, one of them may take a kernel of half the digits (issue 188792 of pytorch/pytorch).
Engines fill their rotary tables by such a call: now and then one kept tables that were off by 1.5e-4, and all that it
computed was, in its fourth digit, another model's.

In an engine that hands KV over it guards the port of NIXL's handshake (see `nixl_handshake`).

On a CPU it has engines use kernels that vLLM leaves unused there (see `cpu_kernels`).

On a CPU host that several engines share it undoes four things that suit a large host with one engine. The first two
are polls, and what wakes up on a processor that a thread of a forward has makes all threads of that forward wait.

- NIXL gives each agent a thread that polls UCX without pause: 0.9 of a core per idle engine, so that two engines took a
  two-core machine. Here it pauses between polls. Without the thread agents progress only when they are asked for
  completions and notifications: where UCX emulates reads, as over TCP, a decode engine's read of linked KV then waited
  for the end of the forward that the prefill worker was busy with.
- Gloo gives each process group a thread that looks for packets a hundred times a second, and vLLM makes thirteen groups
  for an engine, even for one rank. Here those of a process share one thread.
- vLLM's NIXL connector pins the thread that builds it to the last core. Threads inherit that: every forward of every
  engine then ran on this one core (1,058 tokens took 2.9 s instead of 1.5 s on two cores).
- vLLM looks at a model's class in a process of its own, so that CUDA stays untouched. On a machine that has not seen
  the class before, that process imported vLLM again, 10 s of CPU for every engine that started: here it looks in place.
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import Any

SHARED_CORES = "ORBITSERVE_ENGINES_SHARE_CORES"
NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"  # of the handshake
# What torch has MKL compute for contiguous floats.
_VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "sin", "tan", "cosh", "sinh", "tanh", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt", "ceil", "floor", "round", "trunc"),
)


def register() -> None:
    """Enable AMX, settle kernels, guard NIXL's handshake; share cores where `vllm_env` says so."""
    import torch

    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype)
        for name in _VECTOR_FUNCTIONS:
            getattr(torch, name)(half)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    from vllm.platforms import current_platform

    from infra.cpu import kernels as cpu_kernels

    if current_platform.is_cpu():
        cpu_kernels.install()
    if NIXL_PORT in os.environ:
        from infra import nixl_handshake

        nixl_handshake.install()
    if os.environ.get(SHARED_CORES) != "1":
        return
    from vllm.distributed import nixl_utils
    from vllm.model_executor.models import registry

    from infra import nixl_agents

    if nixl_utils.NixlWrapper is not None:
        nixl_agents.let_pause(sys.modules[nixl_utils.NixlWrapper.__module__].nixlBind)
    _let_groups_share_a_thread()
    type(current_platform).discover_numa_topology = classmethod(lambda cls: [])  # read for that pinning only
    registry._run_in_subprocess = lambda look: look()


def _let_groups_share_a_thread() -> None:
    """Make new gloo process groups share one device, and so its thread."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    gloo = c10d.ProcessGroupGloo
    if issubclass(gloo, _Shares):  # vLLM loads its plugins more than once
        return

    class SharingGloo(_Shares, gloo):  # type: ignore[misc, valid-type]
        """Gloo on the process' one device, or its one of each interface that is named."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
            options = gloo._Options()
            options._devices, options._timeout = _gloo_devices(), timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = SharingGloo


class _Shares:
    """Marks what `_let_groups_share_a_thread` has made."""


@functools.cache
def _gloo_devices() -> list[Any]:
    from torch.distributed import ProcessGroupGloo

    if named := os.environ.get("GLOO_SOCKET_IFNAME"):  # as PyTorch reads it
        return [ProcessGroupGloo.create_device(interface=name) for name in named.split(",")]
    return [ProcessGroupGloo.create_default_device()]
