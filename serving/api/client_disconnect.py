"""Clients that leave before their answer.

Serve cancels the request of a client that has left. vLLM's routes answer in a task of their own, and wait for it in a
way that does not cancel it with them: unless somebody does, the whole answer is generated for nobody.
"""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

_STATE = "answering"


class CancelOnDisconnect:
    """Middleware: with a request the task is cancelled that `answering` noted of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            task = scope.get("state", {}).get(_STATE)
            if task is not None:
                task.cancel()
            raise


def answering(request: Request | None) -> None:
    """Note the request that the current task answers; None: no client could leave."""
    if request is not None:
        setattr(request.state, _STATE, asyncio.current_task())
