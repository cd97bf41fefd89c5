"""First transfer between a new replica's engine and those of the other role.

A pair's first transfer shakes hands, which takes seconds: so it is made before the replica serves.

| new     | what it does                                                                                          |
|---------|-------------------------------------------------------------------------------------------------------|
| decode  | has every prefill replica link a tiny prompt, and pulls these; where roles are scaled a little later  |
|         | again: prefill replicas that started beside it have not seen it, nor it them                          |
| prefill | links a tiny prompt, and has every decode replica pull it                                              |

Best effort: a pair that is left out shakes hands with its first request. The pairs of a start are the ingress's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.frontend.ray_calls import answered_by_all
from serving.replicas.process import replica_states

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # for all pairs of a replica
_AGAIN_S = 20.0  # until a decode replica looks for prefill replicas once more
Transfer = dict[str, Any]


async def pulled_by_decode(link: Callable[[int], Awaitable[Transfer]]) -> None:
    """Have every decode replica pull from this prefill replica.

    Args:
        link: links the tiny prompt for so many readers.
    """

    async def shake(decode: Any, count: int) -> None:
        await answered_by_all(decode, "pull_tiny", await link(count))

    await _with("DecodeWorker", shake)


async def pull_from_prefill(pull: Callable[[Transfer], Awaitable[None]], once_more: bool) -> asyncio.Task[None] | None:
    """Pull from every prefill replica into this decode replica, now and by the task once more.

    Args:
        pull: pulls the tiny prompt.
    """

    async def shake(prefill: Any, _: int) -> None:
        await asyncio.gather(*map(pull, await answered_by_all(prefill, "link_tiny")))

    async def again() -> None:
        await asyncio.sleep(_AGAIN_S)
        await _with("PrefillWorker", shake)

    await _with("PrefillWorker", shake)
    return asyncio.create_task(again()) if once_more else None


async def _with(role: str, shake: Callable[[Any, int], Awaitable[None]]) -> None:
    """Shake hands with the replicas of a role, if any serve: a call to a role without one would wait for it."""
    app_name = serve.get_replica_context().app_name
    try:
        async with asyncio.timeout(_PATIENCE_S):
            running = (await asyncio.to_thread(replica_states, app_name, role)).get("RUNNING", 0)
            if running:
                await shake(DeploymentHandle(role, app_name), running)
    except Exception as error:
        logger.warning("not every %s has shaken hands with this replica: %r", role, error)
