"""Bound on the decoded images in an ingress replica's memory, over all requests."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from infra.cpu.fair_semaphore import FairSemaphore


class PixelReservation:
    """Pixels reserved for a request's images.

    Until they are given back or nothing refers to this any more.
    """

    def __init__(self, give: Callable[[], None]) -> None:
        self.give = weakref.finalize(self, give)  # once, whoever comes first
        self.give.atexit = False

    def held_by(self, image: Any) -> None:
        """Keep the reservation for as long as the image or clip exists."""
        image.orbit_share = self


class PixelBudget:
    """At most `most` pixels decoded at once; a request that has more by itself goes alone."""

    def __init__(self, most: int) -> None:
        self._turns = FairSemaphore(most)

    @property
    def held(self) -> int:
        """Pixels that are taken."""
        return self._turns.held

    async def take(self, pixels: int) -> PixelReservation:
        """Wait for all pixels that a request is to decode.

        Once: two that hold some and wait for more would wait for ever.
        """
        amount, loop = min(pixels, self._turns.total), asyncio.get_running_loop()
        await self._turns.take(amount)

        def give() -> None:  # the garbage collector may call it in any thread, in the middle of anything
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.give, amount)

        return PixelReservation(give)


def give_back(image: Any) -> None:
    """Give back the pixels of this image's request."""
    if (share := getattr(image, "orbit_share", None)) is not None:
        share.give()
