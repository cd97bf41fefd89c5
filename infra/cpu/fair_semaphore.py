"""FIFO semaphore with weighted acquire (asyncio)."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class FairSemaphore:
    """FIFO semaphore of `total` units, for one event loop.

    A large amount is waited for in its turn, and smaller ones behind it do not pass it.

    Attributes:
        total: how much there is. held: how much of it is taken.
    """

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def awaited(self) -> int:
        """Units that waiting tasks ask for, in all."""
        return sum(amount for amount, _ in self._queue)

    async def take(self, amount: int) -> None:
        """Acquire so many units, in turn; more than `total` never come."""
        if not self._queue and self.held + amount <= self.total:
            self.held += amount
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, turn)
        self._queue.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(amount)
            else:
                with suppress(ValueError):  # another that ended in the same turn of the loop has passed it over
                    self._queue.remove(entry)
                self._grant()
            raise

    def give(self, amount: int) -> None:
        """Release so many units."""
        self.held -= amount
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.held + self._queue[0][0] <= self.total:
            amount, turn = self._queue.popleft()
            if not turn.cancelled():
                self.held += amount
                turn.set_result(None)
