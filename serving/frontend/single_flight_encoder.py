"""Single-flight vision encoding: an image that several requests wait for is encoded once.

What is known to be lacking is encoded before a link asks for it (`RequestEncoder`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from serving.errors import RoleUnavailable

Encode = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


@dataclass(eq=False)
class _Batch:
    """One call of the vision encoder, and how many requests wait for it."""

    task: asyncio.Task[Sequence[Any]]
    waiting: int = 0


class SingleFlightEncoder:
    """Vision encoder whose calls are shared between requests of one tenant.

    Another tenant must not learn of them by their time.

    A call goes on for as long as any request waits for it. Belongs to one event loop.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._running: dict[tuple[str, str], tuple[_Batch, int]] = {}  # (tenant, content): call, place in its result

    async def get(self, tenant: str, items: Mapping[str, Any]) -> dict[str, Any]:
        """Embeddings of processed items, both by content id.

        What is not under way goes into one call.

        Raises what the call does, or RoleUnavailable if it was cancelled, and not by who asks.
        """
        fresh = [content for content in items if (tenant, content) not in self._running]
        if fresh:
            batch = _Batch(self._begin([items[content] for content in fresh]))
            self._running.update({(tenant, content): (batch, place) for place, content in enumerate(fresh)})
            batch.task.add_done_callback(lambda _: self._forget(batch))
        places = {content: self._running[tenant, content] for content in items}
        batches = {batch for batch, _ in places.values()}
        for batch in batches:
            batch.waiting += 1
        try:
            await asyncio.gather(*(asyncio.shield(batch.task) for batch in batches))
        except asyncio.CancelledError:
            if (asker := asyncio.current_task()) is not None and asker.cancelling():
                raise
            raise RoleUnavailable("an encoding was cancelled") from None
        finally:
            for batch in batches:
                batch.waiting -= 1
                if not batch.waiting and not batch.task.done():
                    self._forget(batch)
                    batch.task.cancel()
        return {content: batch.task.result()[place] for content, (batch, place) in places.items()}

    def of_request(
        self, tenant: str, items: Mapping[str, Any], lacking: Awaitable[Collection[str]] | None = None
    ) -> RequestEncoder:
        """Encodings of one request's `items`, its processed images by content id.

        `lacking` ones begin at once.
        """
        return RequestEncoder(self, tenant, items, lacking)

    def _begin(self, items: Sequence[Any]) -> asyncio.Task[Sequence[Any]]:
        """Begin one call that belongs to no request.

        With a cancelled request Serve cancels the calls in its name that have no replica yet.
        """

        async def call() -> Sequence[Any]:
            return await self._encode(items)

        return asyncio.get_running_loop().create_task(call(), context=Context())

    def _forget(self, batch: _Batch) -> None:
        self._running = {key: place for key, place in self._running.items() if place[0] is not batch}


class RequestEncoder:
    """Encodings for one request, some of which begin before it is known to need them."""

    def __init__(
        self,
        encodings: SingleFlightEncoder,
        tenant: str,
        items: Mapping[str, Any],
        lacking: Awaitable[Collection[str]] | None,
    ) -> None:
        self._encodings, self._tenant, self._items = encodings, tenant, items
        self._begun: set[str] = set()  # ahead
        self._asked: set[str] = set()
        self._ahead = None if lacking is None else asyncio.ensure_future(self._begin(lacking))

    async def _begin(self, lacking: Awaitable[Collection[str]]) -> dict[str, Any]:
        self._begun = set(await lacking) & self._items.keys() - self._asked
        return await self._encode(self._begun)

    async def _encode(self, contents: Collection[str]) -> dict[str, Any]:
        wanted = {content: item for content, item in self._items.items() if content in contents}
        return await self._encodings.get(self._tenant, wanted)

    async def get(self, contents: Collection[str]) -> dict[str, Any]:
        """Embeddings by content id; waits for what began before, and begins with the rest."""
        self._asked |= set(contents)
        ahead = self._begun & set(contents)
        found = await self._encode(set(contents) - ahead)
        if ahead and self._ahead is not None:
            found |= {content: embeddings for content, embeddings in (await self._ahead).items() if content in ahead}
        return found

    def close(self) -> None:
        """The request needs no more of them."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead.add_done_callback(lambda task: task.cancelled() or task.exception())
