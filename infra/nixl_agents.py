"""NIXL agents whose threads leave processors to others.

NIXL gives each agent a thread that polls UCX without pause: beside other work on two cores, the thread that asks for a
transfer has waited for minutes.
"""

from __future__ import annotations

import functools
import importlib
import time
from typing import Any

from infra.vllm_env import is_cpu_build

_POLL_MICROSECONDS = 2000  # between two polls of UCX
_ASK_SECONDS = 5e-5  # between two questions for a transfer's state


def let_pause(bindings: Any) -> None:
    """Have a process' agents wait between polls.

    Their constructor in Python sets that to nothing.

    Args:
        bindings: the extension module that `nixl` imports.
    """
    construct = bindings.nixlAgent
    if isinstance(construct, functools.partial):  # vLLM loads its plugins more than once
        return

    def paused(make: Any, name: str, config: Any) -> Any:
        config.pthrDelay = _POLL_MICROSECONDS
        return make(name, config)

    bindings.nixlAgent = functools.partial(paused, construct)


def make_agent(name: str) -> Any:
    """Make an agent over UCX, which pauses between polls where engines' agents do."""
    api = importlib.import_module("nixl._api")  # nixl puts the module of its CUDA flavour there when it is imported
    if is_cpu_build():
        let_pause(api.nixlBind)
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def finish(agent: Any, transfer: Any, deadline_s: float) -> tuple[float, str]:
    """Start a transfer and wait for its end.

    Returns:
        The seconds that it took, and its last state; "PROC": it has not ended before the deadline.
    """
    start = time.perf_counter()
    state = agent.transfer(transfer)
    while state == "PROC" and time.perf_counter() - start < deadline_s:
        time.sleep(_ASK_SECONDS)
        state = agent.check_xfer_state(transfer)
    return time.perf_counter() - start, state
