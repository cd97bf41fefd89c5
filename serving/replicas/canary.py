"""Canary of an engine: a one-token request that must end in time.

An engine that shows that it computes is not asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_FRESH_SECONDS = 2.0  # progress that is no older proves the engine
_LOOK_SECONDS = 0.1  # between looks for progress while a canary is out
_FIRST_SECONDS = 120.0  # for whatever an engine computes first: it may compile kernels for that
_COMPUTING = 0.1  # share of a core: below it are threads that poll


class EngineStalled(RuntimeError):
    """An engine that has computed nothing for too long."""


class Canary:
    """Health check of an engine by its progress, or by a one-token request.

    An engine that is busy is not asked: what it computes for others proves it. Long steps of an engine on a CPU show
    in the CPU time that it spends. Checks that overlap share one request.

    Args:
        progressed: time (`time.monotonic`) at which the engine last computed something.
        ask: has the engine compute one token.
        timeout_s: time in which it must, or something else must be computed.
        cpu_seconds: CPU time that the engine has spent; None: it computes on another device.
    """

    def __init__(
        self,
        progressed: Callable[[], float],
        ask: Callable[[], Awaitable[None]],
        timeout_s: float,
        cpu_seconds: Callable[[], float] | None = None,
    ) -> None:
        self._progressed, self._ask, self._timeout = progressed, ask, timeout_s
        self._cpu_seconds = cpu_seconds or (lambda: 0.0)
        self._request: asyncio.Task[None] | None = None
        self._began = self._spent = 0.0
        self._at_first = progressed()

    async def check(self) -> None:
        """Return as soon as the engine is known to compute.

        Raises:
            EngineStalled: it computes nothing. What the request itself raises comes as it is.
        """
        if time.monotonic() - self._progressed() < _FRESH_SECONDS:
            return
        if self._request is None or self._request.done():
            self._request = asyncio.ensure_future(self._asked())
            self._request.add_done_callback(lambda request: request.cancelled() or request.exception())
            self._watch()
        request, asked = self._request, time.monotonic()
        while True:
            is_first = self._progressed() == self._at_first
            patience = max(self._timeout, _FIRST_SECONDS) if is_first else self._timeout
            left = self._began + patience - time.monotonic()
            await asyncio.wait([request], timeout=min(max(left, 0.0), _LOOK_SECONDS))
            if request.done():
                request.result()
                return
            if self._progressed() > asked:
                return
            if left <= 0:
                if not self._has_computed():
                    raise EngineStalled(f"the engine has computed nothing for {patience:g} s")
                self._watch()
                return

    async def _asked(self) -> None:
        await self._ask()

    def _watch(self) -> None:
        """Begin to look at the CPU time, and to wait."""
        self._began, self._spent = time.monotonic(), self._cpu_seconds()

    def _has_computed(self) -> bool:
        passed = time.monotonic() - self._began
        return self._cpu_seconds() - self._spent > _COMPUTING * passed
