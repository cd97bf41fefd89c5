"""Fair queue of the answers in progress: free places go to the tenants that hold the fewest.

What is scarce are the sequences of the decode workers' batches. Among waiting tenants the next place goes to the one
that holds the fewest for its weight: a tenant with a hundred long answers delays another's until one of them ends, and
not even that long while places are left that one tenant may not take. Of one tenant: first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from serving.frontend.errors import OverloadedError

_Turn = tuple[asyncio.Future[None], int]  # and the places that it is for


class FairQueue:
    """Places for `places` answers, shared by tenants in proportion to their weights (asyncio).

    Args:
        most_of_one: places that one tenant may hold while the others leave them free.
        most_waiting: prompts of one tenant whose answers may wait.
        weight: a tenant's share, relative to others'.
    """

    def __init__(
        self, places: int, most_of_one: int, most_waiting: int, weight: Callable[[str], float] = lambda tenant: 1.0
    ) -> None:
        self._places, self._most_of_one, self._most_waiting, self._weight = places, most_of_one, most_waiting, weight
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Turn]] = {}  # in the order in which tenants began to wait

    @property
    def held(self) -> int:
        """Answers in progress."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""
        return sum(count for queue in self._waiting.values() for _, count in queue)

    @asynccontextmanager
    async def place(self, tenant: str, count: int = 1) -> AsyncGenerator[None, None]:
        """Hold places while the block runs: `count`, or as many as one tenant may hold.

        They are taken all at once: two that hold some and wait for more would wait for ever.

        Raises:
            OverloadedError: too many of the tenant's answers wait already.
        """
        count = min(count, self._most_of_one, self._places)
        await self._take(tenant, count)
        try:
            yield
        finally:
            self._give(tenant, count)

    async def _take(self, tenant: str, count: int) -> None:
        queue = self._waiting.get(tenant, deque[_Turn]())
        if len(queue) >= self._most_waiting:
            raise OverloadedError(f"{len(queue)} of your requests wait already; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((turn, count))
        self._waiting[tenant] = queue
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(tenant, count)
            else:
                self._drop(tenant, turn)
                self._grant()
            raise

    def _drop(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque[_Turn]())
        kept = deque(one for one in queue if one[0] is not turn)  # it may have been passed over when its turn came
        if kept:
            self._waiting[tenant] = kept
        else:
            self._waiting.pop(tenant, None)

    def _give(self, tenant: str, count: int) -> None:
        self._held[tenant] -= count
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        while self.held < self._places:
            first = {tenant: turns[0][1] for tenant, turns in self._waiting.items()}
            able = [tenant for tenant, count in first.items() if self._held[tenant] + count <= self._most_of_one]
            if not able:
                return
            tenant = min(able, key=lambda one: self._held[one] / self._weight(one))
            turn, count = self._waiting[tenant][0]
            if not turn.cancelled():
                if self.held + count > self._places:
                    return  # what comes free is left for it: smaller ones would pass it again and again
                self._held[tenant] += count
                turn.set_result(None)
            self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
