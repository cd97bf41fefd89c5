"""Leases on linked KV, renewed until a decode engine has read it."""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType

from vllm.outputs import RequestOutput

from prefill_workers.protocol import LeaseState, LinkResult
from serving.errors import RoleUnavailable
from serving.frontend.roles import Roles

_PULL_SECONDS = 2.0  # linked KV was pulled by then, unless there is no room for it


class LinkLease:
    """Lease on a link's blocks, given back at the end unless a decode engine took it.

    Until every reader has pulled the KV, the prefill worker is told that it is wanted: a decode worker may be long in
    letting the sequence in, and blocks that were freed meanwhile would hold somebody else's KV. What was pulled when
    nobody had said for too long that they were not is not believed.

    Args:
        readers: choices of the answer, each of which pulls the KV.
        seconds: the blocks are held for so long from when the link ended or a worker was last told.
    """

    def __init__(self, roles: Roles, linked: LinkResult, readers: int, seconds: float) -> None:
        self._roles, self._linked, self._readers, self._seconds = roles, linked, readers, seconds
        self._until = time.monotonic() + seconds
        self._taken, self._pulled = False, set[int]()

    async def __aenter__(self) -> LinkLease:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renewing.cancel()
        if not self._taken:  # perhaps no decode engine ever heard of the lease
            await self._roles.abandon(self._linked.transfer, self._readers)

    def pulled(self, output: RequestOutput) -> None:
        """Note that a decode engine has pulled the KV of the choices in its output.

        Raises:
            RoleUnavailable: it could not, or the blocks may have been freed before.
        """
        if not self._taken and any(choice.finish_reason == "error" for choice in output.outputs):
            raise RoleUnavailable("the linked KV could not be pulled")
        self._taken = True
        choices = {choice.index for choice in output.outputs}
        if not choices <= self._pulled and not self._is_certain:
            raise RoleUnavailable("the linked KV was not held until it was pulled")
        self._pulled |= choices
        if len(self._pulled) >= self._readers:
            self._renewing.cancel()

    @property
    def _is_certain(self) -> bool:
        """True if the blocks are held, and were until now."""
        return time.monotonic() < self._until

    async def _renew(self) -> None:
        """Go on telling the worker, until it says that they were read.

        First after a moment: most have been by then, and the end of the worker's node is nothing to their answers.
        """
        state, pause = LeaseState.HELD, min(_PULL_SECONDS, self._seconds / 3)
        while state is not LeaseState.READ:
            await asyncio.sleep(pause)
            pause = self._seconds / 3
            began, state = time.monotonic(), await self._roles.renew(self._linked.lease)
            if state is LeaseState.HELD:
                self._until = began + self._seconds
        self._until = math.inf
