"""Reachability of a role's replicas, for calls that would else wait for ever.

A call through a Ray Serve handle waits as long as its role has no replica, however long that is. Calls that need a role
say so (`required`); once one of them has waited for a moment, every replica of the role is pinged each second. Where
none answers for `PATIENCE_S` the calls end with `NoReplica`. A call that needs one replica, because that holds the KV
which is to be pulled, ends when this one does not answer for `LOST_S`, whatever the others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from serving.errors import NoReplica, RoleUnavailable

QUIET_S = 2.0  # of a call, before anybody is pinged: most have ended by then
PERIOD_S = 1.0  # between pings
PATIENCE_S = 8.0  # from the first ping that no replica of the role answered
LOST_S = 4.0  # from the first ping that one replica did not answer


@dataclass(eq=False)
class _Waiting:
    limit: asyncio.Timeout
    replica: str | None
    began: float
    error: RoleUnavailable = field(default_factory=RoleUnavailable)


class Reachability:
    """Pings of one role's replicas, while calls wait for them. Belongs to one event loop.

    Args:
        role: its name, for errors.
        ping: asks every replica; returns the names of those that answered in time. May raise.
    """

    def __init__(self, role: str, ping: Callable[[], Awaitable[Collection[str]]]) -> None:
        self._role, self._ping = role, ping
        self._waiting: set[_Waiting] = set()
        self._watching: asyncio.Task[None] | None = None
        self._silent_since: float | None = None  # no replica answered a ping from then on
        self._missed: dict[str, float] = {}  # by replica that calls need: since when it did not answer

    @asynccontextmanager
    async def required(self, replica: str | None = None) -> AsyncIterator[Callable[[], None]]:
        """Context of a wait for the role's answer, or one replica's; gives what ends the need early.

        Raises:
            NoReplica: no replica of the role answers.
            RoleUnavailable: the replica does not answer.
        """
        limit = asyncio.timeout(None)
        waiting = _Waiting(limit, replica, asyncio.get_running_loop().time())
        self._waiting.add(waiting)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            async with limit:
                yield partial(self._waiting.discard, waiting)
        except TimeoutError:
            if not limit.expired():
                raise
            raise waiting.error from None
        finally:
            self._waiting.discard(waiting)

    async def _watch(self) -> None:
        """Ping while calls wait that have done so for long enough."""
        now = asyncio.get_running_loop().time
        try:
            while self._waiting:
                due = min(one.began for one in self._waiting) + QUIET_S
                if (left := due - now()) > 0:
                    await asyncio.sleep(left)
                    continue
                asked = now()
                self._heard(asked, await self._answers())
                await asyncio.sleep(max(0.0, asked + PERIOD_S - now()))
        finally:
            self._watching, self._silent_since = None, None
            self._missed.clear()

    async def _answers(self) -> Collection[str]:
        try:
            return await self._ping()
        except Exception:  # that there is none, among others
            return ()

    def _heard(self, asked: float, answers: Collection[str]) -> None:
        """Judge the waiting calls by who answered the ping that was sent at `asked`."""
        self._silent_since = None if answers else self._silent_since or asked
        needed = {one.replica for one in self._waiting if one.replica is not None}
        self._missed = {name: self._missed.get(name, asked) for name in needed if name not in answers}
        now = asyncio.get_running_loop().time()
        for one in self._waiting:
            if self._silent_since is not None and now - self._silent_since >= PATIENCE_S:
                self._end(one, NoReplica(f"no replica of the {self._role} role answers"))
            elif one.replica in self._missed and now - self._missed[one.replica] >= LOST_S:
                self._end(one, RoleUnavailable(f"the {self._role} replica that holds the prompt's KV does not answer"))

    @staticmethod
    def _end(one: _Waiting, error: RoleUnavailable) -> None:
        if not one.limit.expired():  # else it has been told, and is about to hear
            one.error = error
            one.limit.reschedule(asyncio.get_running_loop().time())
