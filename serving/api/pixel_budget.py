"""What decoded images may take of an ingress replica's memory, those of all requests together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress

from PIL import Image

from infra.cpu.fair_semaphore import FairSemaphore


class PixelReservation:
    """Pixels that a request's images take, until they are given back or nothing refers to this any more."""

    def __init__(self, give: Callable[[], None]) -> None:
        self.give = weakref.finalize(self, give)  # once, whoever comes first
        self.give.atexit = False

    def held_by(self, image: Image.Image) -> None:
        """As long as the image is there, so is this."""
        image.orbit_share = self  # type: ignore[attr-defined]


class PixelBudget:
    """At most `most` pixels decoded at once, but for a request that has more by itself: that goes alone."""

    def __init__(self, most: int) -> None:
        self._turns = FairSemaphore(most)

    @property
    def held(self) -> int:
        """Pixels that are taken."""
        return self._turns.held

    async def take(self, pixels: int) -> PixelReservation:
        """Wait for all that a request is to decode, once: who holds some and waits for more would wait for ever."""
        amount, loop = min(pixels, self._turns.total), asyncio.get_running_loop()
        await self._turns.take(amount)

        def give() -> None:  # the garbage collector may call it in any thread, in the middle of anything
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._turns.give, amount)

        return PixelReservation(give)


def give_back(image: Image.Image | None) -> None:
    """Nobody needs the pixels of this image's request any more."""
    if (share := getattr(image, "orbit_share", None)) is not None:
        share.give()
