"""Leases on linked KV, renewed until a decode engine has read it."""

from __future__ import annotations

import asyncio
import math
import time

from prefill_workers.protocol import LeaseState
from serving.frontend.roles import Roles

_PULL_SECONDS = 2.0  # linked KV was pulled by then, unless there is no room for it


class LinkLease:
    """Lease on a link's blocks.

    Held for `seconds` from when the link ended or a worker was last told that they are wanted.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._until = time.monotonic() + seconds

    @property
    def is_certain(self) -> bool:
        """True if the blocks are held, and were until now."""
        return time.monotonic() < self._until

    async def renew(self, roles: Roles) -> None:
        """Go on telling the worker, until it says that they were read.

        First after a moment: most have been by then, and the end of the worker's node is nothing to their answers.
        """
        state, pause = LeaseState.HELD, min(_PULL_SECONDS, self._seconds / 3)
        while state is not LeaseState.READ:
            await asyncio.sleep(pause)
            pause = self._seconds / 3
            began, state = time.monotonic(), await roles.renew(self._name)
            if state is LeaseState.HELD:
                self._until = began + self._seconds
        self._until = math.inf
