"""Deficits on their way from a prefill worker's loop to the patch compiler."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefill_workers.patches.patch_compiler import PatchJob

logger = logging.getLogger(__name__)


class PatchQueue:
    """Deficits sent to the patch compiler and not yet answered, bounded in number and bytes.

    A compiler that cannot keep up costs patches, never memory.

    Belongs to the event loop that it is made on; `submit` may be called from any thread.

    Args:
        compile: forms and stores a patch; returns when it is stored.
        most, most_bytes: so many wait at most; further ones are dropped. One may always wait, however large.

    Attributes:
        dropped: how many were dropped, or could not be formed.
    """

    def __init__(self, compile: Callable[[PatchJob], Awaitable[object]], most: int, most_bytes: int) -> None:
        self._compile, self._most, self._most_bytes = compile, most, most_bytes
        self._events = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting = self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        """Deficits that wait."""
        return self._waiting

    @property
    def is_crowded(self) -> bool:
        """True if the deficits that wait take more than half of the room."""
        return 2 * self._waiting > self._most or 2 * self._bytes > self._most_bytes

    def submit(self, job: PatchJob) -> bool:
        """Send a deficit off, if there is room for it. Returns whether there was."""
        size = job.delta.nbytes
        with self._lock:
            full = self._waiting >= self._most or self._bytes + size > self._most_bytes
            if full and self._waiting:
                self.dropped += 1
                return False
            self._waiting, self._bytes = self._waiting + 1, self._bytes + size
        asyncio.run_coroutine_threadsafe(self._form(job, size), self._events)
        return True

    async def _form(self, job: PatchJob, size: int) -> None:
        failed = False
        try:
            await self._compile(job)
        except Exception as error:
            failed = True
            logger.warning("patch %s was not formed: %s", job.key[:16], error)
        finally:
            with self._lock:
                self._waiting, self._bytes = self._waiting - 1, self._bytes - size
                self.dropped += failed
