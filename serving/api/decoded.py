"""What decoded images may take of an ingress replica's memory, those of all requests together."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Share:
    """Pixels that a request's image takes, until they are given back or nothing refers to this any more."""

    def __init__(self, give: Callable[[], None]) -> None:
        self._give = weakref.finalize(self, give)
        self._give.atexit = False

    def give(self) -> None:
        """Give them back, once; without it they come back when the garbage collector finds this."""
        self._give()


class PixelBudget:
    """At most `most` pixels decoded at once. Who waits for some goes in the order of coming. Of one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Pixels that are taken."""
        return self._held

    async def take(self, shares: list[int]) -> list[Share]:
        """Wait for all that a request is to decode, once: who holds some and waits for more would wait for ever.

        A request that takes more than there is goes when nothing else is held.
        """
        pixels = sum(shares)
        if not shares:
            return []
        if self._waiting or not self._fits(pixels):
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (pixels, granted)
            self._waiting.append(entry)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._give(pixels)
                else:
                    self._waiting.remove(entry)
                    self._grant()
                raise
        else:
            self._held += pixels
        return [self._share(part) for part in shares]

    def _share(self, pixels: int) -> Share:
        """The garbage collector may end it in any thread, in the middle of anything."""
        loop = asyncio.get_running_loop()

        def give() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._give, pixels)

        return Share(give)

    def _fits(self, pixels: int) -> bool:
        return self._held + pixels <= self._most or self._held == 0

    def _give(self, pixels: int) -> None:
        self._held -= pixels
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            pixels, granted = self._waiting.popleft()
            if not granted.done():
                self._held += pixels
                granted.set_result(None)
