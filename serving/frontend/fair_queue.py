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


class FairQueue:
    """Places for `places` answers, shared by tenants in proportion to their weights (asyncio).

    Args:
        most_of_one: places that one tenant may hold while the others leave them free.
        most_waiting: answers of one tenant that may wait.
        weight: a tenant's share, relative to others'.
    """

    def __init__(
        self, places: int, most_of_one: int, most_waiting: int, weight: Callable[[str], float] = lambda tenant: 1.0
    ) -> None:
        self._places, self._most_of_one, self._most_waiting, self._weight = places, most_of_one, most_waiting, weight
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which tenants began to wait

    @property
    def held(self) -> int:
        """Answers in progress."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Answers that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: too many of the tenant's answers wait already.
        """
        await self._take(tenant)
        try:
            yield
        finally:
            self._give(tenant)

    async def _take(self, tenant: str) -> None:
        queue = self._waiting.get(tenant, deque())
        if len(queue) >= self._most_waiting:
            raise OverloadedError(f"{len(queue)} of your requests wait already; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._waiting[tenant] = queue
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(tenant)
            else:
                self._drop(tenant, turn)
            raise

    def _drop(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if turn in queue:  # else it was passed over when its turn came
            queue.remove(turn)
        if not queue:
            self._waiting.pop(tenant, None)

    def _give(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        while self.held < self._places:
            able = [tenant for tenant in self._waiting if self._held[tenant] < self._most_of_one]
            if not able:
                return
            tenant = min(able, key=lambda one: self._held[one] / self._weight(one))
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.cancelled():
                self._held[tenant] += 1
                turn.set_result(None)
