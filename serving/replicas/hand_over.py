"""Hand-over of a prefill replica's records to others; see `kvstore.hand_over`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.handle import DeploymentHandle

from kvstore.tiers.base import Lifetime
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import answered, answered_by_all
from serving.replicas.process import is_alone, node_id

if TYPE_CHECKING:
    from kvstore.hand_over import HandedOver, Parcel
    from kvstore.library import Library

logger = logging.getLogger(__name__)

HAND_OVER_S = 30.0  # at most, of a replica's end
_PATIENCE_S = 5.0  # for all that stay to say what they lack: where all of them go, too, nobody answers
_MARGIN_S = 1.0  # a deletion is on its way to the replicas for less
_BYTES_PER_S = 1e8  # of a hand-over through a network that is not fast


class RaySiblings:
    """The other replicas of this process's role, over their Ray Serve handle."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._handle = DeploymentHandle(context.deployment, context.app_name)  # a replica that goes is not among them

    async def lacking(self, paths: Sequence[str]) -> list[Collection[str]]:
        """See `kvstore.hand_over.Siblings`."""
        async with asyncio.timeout(_PATIENCE_S):
            return await answered_by_all(self._handle, "lacking", list(paths))

    async def nodes(self) -> set[str]:
        """Ids of their nodes."""
        async with asyncio.timeout(_PATIENCE_S):
            return set(await answered_by_all(self._handle, "node"))

    async def adopt(self, parcels: Sequence[Parcel]) -> int:
        """See `kvstore.hand_over.Siblings`."""
        return int(await answered(self._handle.adopt.remote(list(parcels))))


class HandOver:
    """Hand-over of one replica, from its first signals to its end.

    Deletions reach running replicas alone, and keep what derives from the content out of them for a while
    (`library.deletion_grace_s`): after that a hand-over could bring it back. So it must be over that long after this
    replica was last called among all others.
    """

    def __init__(self, library: Library, clock: Callable[[], float] = time.monotonic) -> None:
        self._library, self._clock = library, clock
        self._outlives = Lifetime.NODE if is_alone() else Lifetime.STORE
        self._called = clock()

    def called(self) -> None:
        """Note a call that went to all running replicas."""
        self._called = self._clock()

    def cost_s(self) -> float:
        """Seconds that the end of this replica costs; see `kvstore.hand_over.at_stake`."""
        from kvstore.hand_over import at_stake

        return at_stake(self._library, self._outlives, _BYTES_PER_S)

    async def give(self) -> HandedOver:
        """Give the replicas that stay what they lack, as far as there is time."""
        from kvstore.hand_over import hand_over

        forgotten = self._called + self._library.settings.deletion_grace_s - _MARGIN_S
        until = min(self._clock() + HAND_OVER_S, forgotten)
        handed = await hand_over(self._library, self._outlives, RaySiblings(), until, self._clock)
        logger.info("handed over %d records, %d bytes; %d were left", handed.records, handed.nbytes, handed.left)
        return handed

    async def leave_node(self) -> None:
        """Move what lies in this node's object store to the nodes of replicas that stay.

        Where one stays on this node, nothing is moved.
        """
        if self._outlives is not Lifetime.STORE:
            return
        try:
            nodes = await RaySiblings().nodes()
        except (RoleUnavailable, TimeoutError) as error:
            logger.warning("no replica tells its node: %s", error)
            return
        if nodes and node_id() not in nodes:
            await asyncio.to_thread(self._library.leave_node, sorted(nodes), time.monotonic() + HAND_OVER_S)
