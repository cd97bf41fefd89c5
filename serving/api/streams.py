"""Streams of server-sent events: what fails before the first of them is an ordinary error."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from serving.frontend.errors import OverloadedError

_ERROR = 'data: {"error":'


async def opened(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None] | ErrorResponse:
    """A stream once its first event is there, or the error that stands in that event's place.

    Nothing was sent to the client until then, so that it can be told with a status. Whatever happens, `events` is
    closed: here, or when the stream is.

    Raises:
        OverloadedError: the request is to be tried later.
    """
    stream = _begun(events)
    first = await anext(stream, "")
    if not first.startswith(_ERROR):
        return stream
    await stream.aclose()
    refusal = ErrorResponse.model_validate_json(first.removeprefix("data: "))
    if refusal.error.code == HTTPStatus.TOO_MANY_REQUESTS:
        raise OverloadedError(refusal.error.message)
    return refusal


async def _begun(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Events of a stream, the first of them twice.

    Once to look at, when this begins; Python closes no generator before.
    """
    async with aclosing(events):
        first = await anext(events, None)
        if first is not None:
            yield first
            yield first
        async for event in events:
            yield event
