"""Errors as HTTP responses in OpenAI's shape; vLLM's exception handlers make most of them."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi import HTTPException as FastAPIHTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from kvstore.errors import StoreError
from serving.errors import RoleUnavailable
from serving.frontend.errors import OverloadedError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = "5"  # a replica takes longer to start; another one may be free, or a cable be back
_STREAMING = tuple(f"vllm.entrypoints.openai.{api}.serving" for api in ("chat_completion", "completion"))  # loggers


class Forbidden(GracefulHTTPError):
    """403: the key is known, but not an administrator's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.FORBIDDEN)


class NotAvailable(GracefulHTTPError):
    """501: part of OpenAI's API that this version does not answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.NOT_IMPLEMENTED)


class NotFound(GracefulHTTPError):
    """404: no such file or model, for this tenant."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.NOT_FOUND)


class TooLarge(GracefulHTTPError):
    """413: a body, file or image beyond the configured limits."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class _ToldAlready(logging.Filter):
    """Log filter that drops vLLM's traceback of a stream that failed.

    The client is told what it was.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, GracefulHTTPError | VLLMValidationError)


_TOLD_ALREADY = _ToldAlready()


def error_body(message: str, status: HTTPStatus) -> dict[str, Any]:
    """OpenAI's error object, for places that vLLM's handlers do not reach (middleware)."""
    return {"error": {"message": message, "type": status.phrase, "param": None, "code": status.value}}


def retry_after(error: OverloadedError) -> dict[str, str]:
    """Header that tells after how many seconds another try is worth it."""
    return {"Retry-After": str(math.ceil(error.retry_after_s))}


def too_many(error: OverloadedError) -> JSONResponse:
    """Response 429 with the seconds after which another try is worth it."""
    return JSONResponse(error_body(error.message, error.http_status), error.http_status, headers=retry_after(error))


def _methods(request: Request) -> set[str]:
    """Methods that any route takes at a request's path."""
    known = ((route, getattr(route, "methods", None) or ()) for route in request.app.routes)
    found = {method for route, methods in known if route.matches(request.scope)[0] != Match.NONE for method in methods}
    return found | ({"HEAD"} if "GET" in found else set())


class RetryLater:
    """Middleware that tells in every 503 after how many seconds another try is worth it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(raw=message["headers"]).setdefault("Retry-After", _RETRY_SECONDS)
            await send(message)

        await self._app(scope, receive, told)


def answer_errors(app: FastAPI) -> None:
    """Turn errors of routes into responses: vLLM's, ours, the library's and its files'."""
    app.state.args = Namespace(log_error_stack=False)  # what vLLM's exception handlers look at
    init_exception_handler(app)

    @app.exception_handler(HTTPException)  # Starlette's own: no such route or method, body too large
    @app.exception_handler(FastAPIHTTPException)
    async def refused_by_framework(request: Request, error: HTTPException) -> JSONResponse:
        response = await http_exception_handler(request, error)
        response.headers.update(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return response

    for name in _STREAMING:
        logging.getLogger(name).addFilter(_TOLD_ALREADY)

    @app.exception_handler(OverloadedError)
    async def try_later(_: Request, error: OverloadedError) -> JSONResponse:
        return too_many(error)

    @app.exception_handler(RoleUnavailable)
    async def without_role(_: Request, error: RoleUnavailable) -> JSONResponse:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(error_body(str(error), status), status)

    @app.exception_handler(RecursionError)
    async def too_deep(_: Request, __: RecursionError) -> JSONResponse:
        status = HTTPStatus.BAD_REQUEST
        return JSONResponse(error_body("the request's JSON is nested too deeply", status), status)

    @app.exception_handler(StoreError)
    async def refused(request: Request, error: StoreError) -> JSONResponse:
        message, status = str(error), HTTPStatus(error.status)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # it names paths, and of another process pids and addresses
            logger.error("%s %s: %s", request.method, request.url.path, message)
            message = f"storage failed ({error.code}); the server's log has more"
        return JSONResponse(error_body(message, status), status)
