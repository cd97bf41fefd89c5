"""A vLLM plugin (entry point `vllm.general_plugins`): vLLM loads it in every process of an engine.

NIXL gives each agent a thread that polls UCX without pause. On a GPU host with cores to spare that hides latency; on a
small CPU machine every engine burns a core doing nothing (0.9 of a core per idle engine, so that two engines took a
two-core machine). There the agents progress when they are asked for completions and notifications, which both sides
do anyway: vLLM at every step, the prefill loop every few milliseconds while a lease is out.
"""

from __future__ import annotations

import functools
import os

NO_PROGRESS_THREAD = "ORBITSERVE_NIXL_NO_PROGRESS_THREAD"


def register() -> None:
    """Turn the progress thread off where `infra.vllm_env` asked for it; do nothing elsewhere."""
    if os.environ.get(NO_PROGRESS_THREAD) != "1":
        return
    from vllm.distributed import nixl_utils

    if nixl_utils.nixl_agent_config is not None:
        nixl_utils.nixl_agent_config = functools.partial(nixl_utils.nixl_agent_config, enable_prog_thread=False)
