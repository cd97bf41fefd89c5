"""Micro-batches: while one batch is at work the next one gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """Calls for single items as calls for several.

    Args:
        work: results of items, in their order; its error is each item's.
        most: items of a batch.
    """

    def __init__(self, work: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]], most: int = 64) -> None:
        self._work, self._most = work, most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Result for an item. One that is cancelled leaves its batch alone."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                batch = [(item, future) for item, future in batch if not future.done()]
                if not batch:
                    continue
                try:
                    results = await self._work([item for item, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)
        finally:
            self._running = None
