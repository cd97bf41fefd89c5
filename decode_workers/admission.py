"""Admission to a decode engine: whole sequences only, and first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any


def blocks_needed(tokens: int, sequences: int, block_size: int) -> int:
    """KV blocks of `sequences` sequences of up to `tokens` tokens each; one of each is for a partial copy."""
    return sequences * (-(-tokens // block_size) + 1)


class Room:
    """What was admitted; `until`, if it is set, is waited for before others get its blocks."""

    until: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True, eq=False)
class _Waiting:
    """Whoever waits for `blocks`, for so many sequences, until it is its `turn`."""

    blocks: int
    sequences: int
    turn: asyncio.Future[None]


class Admission:
    """Reserves KV blocks for whole sequences, first come first served."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.total = blocks
        self.block_size = block_size
        self.reserved = 0
        self.running = 0  # sequences
        self._queue: deque[_Waiting] = deque()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is ever admitted (see `blocks_needed`)."""
        return (self.total - 1) * self.block_size

    @property
    def waiting(self) -> int:
        """Sequences that wait for room."""
        return sum(one.sequences for one in self._queue)

    @property
    def blocks_awaited(self) -> int:
        """Blocks that these need."""
        return sum(one.blocks for one in self._queue)

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
        if self._queue or self.reserved + blocks > self.total:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = _Waiting(blocks, sequences, turn)
            self._queue.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(blocks)
                else:
                    with suppress(ValueError):  # another that ended in the same turn has passed it over
                        self._queue.remove(entry)
                    self._grant()
                raise
        else:
            self.reserved += blocks
        self.running += sequences
        room = Room()
        try:
            yield room
        finally:
            self.running -= sequences
            if room.until is None:
                self._release(blocks)
            else:
                leaving = asyncio.create_task(self._release_after(room.until(), blocks))
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    async def _release_after(self, until: Coroutine[Any, Any, None], blocks: int) -> None:
        try:
            await until
        finally:
            self._release(blocks)

    def _release(self, blocks: int) -> None:
        self.reserved -= blocks
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.reserved + self._queue[0].blocks <= self.total:
            next_one = self._queue.popleft()
            if next_one.turn.cancelled():
                continue
            self.reserved += next_one.blocks
            next_one.turn.set_result(None)
