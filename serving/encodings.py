"""Encodings under way: an image that several requests wait for at the same time is encoded once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Encode = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


@dataclass(eq=False)
class _Batch:
    """One call of the vision encoder, and how many requests wait for it."""

    task: asyncio.Task[Sequence[Any]]
    waiting: int = 0


class Encodings:
    """Shares the calls of `encode` between requests of one tenant: another tenant must not learn of them by their time.

    A call goes on for as long as any request waits for it. Belongs to one event loop.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._running: dict[tuple[str, str], tuple[_Batch, int]] = {}  # (tenant, content): call, place in its result

    async def get(self, tenant: str, items: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings by content id, of processed items by content id. What is not under way goes into one call."""
        fresh = [content for content in items if (tenant, content) not in self._running]
        if fresh:
            batch = _Batch(asyncio.ensure_future(self._encode([items[content] for content in fresh])))
            self._running.update({(tenant, content): (batch, place) for place, content in enumerate(fresh)})
            batch.task.add_done_callback(lambda _: self._forget(batch))
        places = {content: self._running[tenant, content] for content in items}
        batches = {batch for batch, _ in places.values()}
        for batch in batches:
            batch.waiting += 1
        try:
            await asyncio.gather(*(asyncio.shield(batch.task) for batch in batches))
        finally:
            for batch in batches:
                batch.waiting -= 1
                if not batch.waiting and not batch.task.done():
                    self._forget(batch)
                    batch.task.cancel()
        return {content: batch.task.result()[place] for content, (batch, place) in places.items()}

    def _forget(self, batch: _Batch) -> None:
        self._running = {key: place for key, place in self._running.items() if place[0] is not batch}
