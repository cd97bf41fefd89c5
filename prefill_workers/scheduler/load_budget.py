"""Budget of stored KV that the links of a prefill worker hold in memory until they end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from infra.cpu.fair_semaphore import FairSemaphore
from prefill_workers.modes import uses_library
from prefill_workers.protocol import LinkRequest


class KVLoadBudget:
    """Semaphore over the bytes of stored KV that links hold; first come, first served.

    A link loads as soon as it is planned, long before it is computed: what a whole queue loads from an object store
    would not fit into memory. Of one event loop. A link that needs more than there is has all of it to itself.

    Args:
        most: bytes.
        bytes_per_token: of a chunk's KV.

    Attributes:
        waiting: links that wait for room.
        tokens: what they will have to compute, as far as their senders know.
    """

    def __init__(self, most: int, bytes_per_token: int) -> None:
        self._turns, self._bytes_per_token = FairSemaphore(most), bytes_per_token
        self.waiting = self.tokens = 0

    @property
    def held(self) -> int:
        """Bytes that are taken."""
        return self._turns.held

    @asynccontextmanager
    async def room_for(self, request: LinkRequest) -> AsyncGenerator[float, None]:
        """Wait for room for all of a request's chunks at once, and hold it while the block runs.

        Yields: for how many seconds it was waited.
        """
        began, tokens = time.perf_counter(), _to_compute(request)
        stored = sum(map(len, request.chunks)) if uses_library(request.mode) else 0
        amount = min(stored * self._bytes_per_token, self._turns.total)
        self.waiting += 1
        self.tokens += tokens
        try:
            if amount:
                await self._turns.take(amount)
        finally:
            self.waiting -= 1
            self.tokens -= tokens
        try:
            yield time.perf_counter() - began
        finally:
            self._turns.give(amount)


def _to_compute(request: LinkRequest) -> int:
    """Tokens of the text and of the chunks for which no patch is known."""
    patched = zip(request.chunks, request.patched or [True] * len(request.chunks), strict=True)
    return len(request.token_ids) - sum(len(span) for span, fits in patched if fits)
