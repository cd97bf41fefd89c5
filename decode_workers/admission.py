"""Admission to a decode engine: whole sequences only, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from infra.cpu.fair_semaphore import FairSemaphore


def blocks_needed(tokens: int, sequences: int, block_size: int) -> int:
    """KV blocks of `sequences` sequences of up to `tokens` tokens each.

    One block of each sequence is for a partial copy.
    """
    return sequences * (-(-tokens // block_size) + 1)


class Room:
    """Blocks of admitted sequences; `until`, if set, is awaited before they are released."""

    until: Callable[[], Coroutine[Any, Any, None]] | None = None


class Admission:
    """Reservation of KV blocks for whole sequences, first come, first served."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.running = self.waiting = 0  # sequences
        self._turns = FairSemaphore(blocks)
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self._turns.total

    @property
    def reserved(self) -> int:
        """Blocks that are reserved."""
        return self._turns.held

    @property
    def blocks_awaited(self) -> int:
        """Blocks that waiting sequences need."""
        return self._turns.awaited

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is ever admitted (see `blocks_needed`)."""
        return (self.total - 1) * self.block_size

    def has_room(self, tokens: int) -> bool:
        """True if a sequence of up to `tokens` tokens would be admitted at once."""
        return not self.waiting and self.reserved + blocks_needed(tokens, 1, self.block_size) <= self.total

    @asynccontextmanager
    async def admit(self, tokens: int, sequences: int) -> AsyncGenerator[Room, None]:
        """Hold room for `sequences` sequences of up to `tokens` tokens each.

        Raises:
            ValueError: the pool could never hold them.
        """
        blocks = blocks_needed(tokens, sequences, self.block_size)
        if blocks > self.total:
            raise ValueError(
                f"the request may grow to {tokens} tokens in {sequences} sequence(s) and needs {blocks} KV blocks; the "
                f"decode worker has {self.total}: lower max_tokens or n"
            )
        self.waiting += sequences
        try:
            await self._turns.take(blocks)
        finally:
            self.waiting -= sequences
        self.running += sequences
        room = Room()
        try:
            yield room
        finally:
            self.running -= sequences
            if room.until is None:
                self._turns.give(blocks)
            else:
                leaving = asyncio.create_task(self._release_after(room.until(), blocks))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    async def _release_after(self, until: Coroutine[Any, Any, None], blocks: int) -> None:
        try:
            await until
        finally:
            self._turns.give(blocks)
