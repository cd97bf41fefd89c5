"""Registry of a process's caches of tenants' data, walked when a content is deleted.

Each cache registers where it is built, in the group of the thread that it belongs to. The library is not among them: it
deletes records in its tiers as well (`Library.delete_content`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)


class Forgets(Protocol):
    """A cache that drops deleted content."""

    def forget(self, content: str, tenant: str) -> None:
        """Drop all that derives from a tenant's deleted content; for a reference, every tenant's."""


Cache = TypeVar("Cache", bound=Forgets)
Submit = Callable[[Callable[[], None]], "Future[None]"]


def run_here(call: Callable[[], None]) -> Future[None]:
    """Run a call on this thread: `Submit` of caches that are thread-safe, or belong to it."""
    done: Future[None] = Future()
    try:
        call()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)
    return done


class CacheGroup:
    """Caches of one thread, which forget in one call.

    So none takes up again what another of them still holds.
    """

    def __init__(self, submit: Submit = run_here) -> None:
        self._submit = submit
        self._caches: list[Forgets] = []

    def register(self, cache: Cache) -> Cache:
        """Add a cache; returns it."""
        self._caches.append(cache)
        return cache

    def start(self, content: str, tenant: str) -> Future[None]:
        """Have the caches forget on their thread."""
        try:
            return self._submit(partial(self.forget, content, tenant))
        except Exception as error:  # the thread has ended
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed

    def forget(self, content: str, tenant: str) -> None:
        """Have every cache forget. Raises the first failure, once all were asked."""
        failures = list[Exception]()
        for cache in self._caches:
            try:
                cache.forget(content, tenant)
            except Exception as error:
                logger.exception("%s did not forget %s", type(cache).__name__, content[:16])
                failures.append(error)
        if failures:
            raise failures[0]


class ForgetRegistry:
    """All caches of a process that hold tenants' data, by thread."""

    def __init__(self) -> None:
        self._groups: list[CacheGroup] = []

    def group(self, submit: Submit = run_here) -> CacheGroup:
        """Make a group of caches. `submit` runs a call on their thread, as `Executor.submit` does."""
        group = CacheGroup(submit)
        self._groups.append(group)
        return group

    def start(self, content: str, tenant: str) -> list[Future[None]]:
        """Have all caches forget; returns a future by group."""
        return [group.start(content, tenant) for group in self._groups]

    async def forget(self, content: str, tenant: str) -> None:
        """Have all caches forget, and wait. Raises the first failure, once all have answered."""
        started = (asyncio.shield(asyncio.wrap_future(done)) for done in self.start(content, tenant))
        for outcome in await asyncio.gather(*started, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
