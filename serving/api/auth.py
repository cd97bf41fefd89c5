"""Middleware: who asks, how much they may send, how many requests are in progress; and HEAD."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Collection
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import error_body, retry_after, too_many
from serving.api.metrics import Metrics
from serving.api_keys import KeyRing
from serving.frontend.errors import OverloadedError, RateLimited
from serving.frontend.rate_limits import RateLimits
from serving.proxy_protocol import MAX_HEADER_BYTES
from serving.settings import ApiKey, HttpSettings

_LOCAL = ApiKey(tenant="local", admin=True)
OPEN_PATHS = frozenset({"/health", "/metrics", "/docs", "/openapi.json", "/redoc", "/console"})
_GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_SEARCH = re.compile(r"/v1/vector_stores/[^/]+/search")  # whose queries may have images
# Of a chat /tokenize fetches, decodes and processes all images; both run where all prompts are rendered.
_TOKENISING_PATHS = frozenset({"/tokenize", "/detokenize"})
# Files that are read whole into memory, pages that are drawn.
DOWNLOAD = re.compile(r"/v1/(vector_stores/[^/]+/)?files/[^/]+/content|/v1/orbit/files/[^/]+/pages/[^/]+")
_UPLOAD_PATH = "/v1/files"
_UPLOAD_ENVELOPE = 64 * 1024  # bytes of an upload's body that are not the file: field names, boundaries, file name
_OTHER_BODY = 4 << 20  # bytes: a vector store of the most files there may be, with attributes of 2 KiB each


def _route(scope: Scope) -> str:
    """Path by the application's routes: without the prefix under which it is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class BoundHeaders:
    """Middleware that answers 431 to large headers before keys are looked at.

    The proxy does so too (`serving.proxy_protocol`), where it was told to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope["path"]) + len(scope["query_string"]) + sum(len(n) + len(v) for n, v in scope["headers"])
            if size > MAX_HEADER_BYTES:
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                body = error_body(f"URL and headers have {size} bytes, the limit is {MAX_HEADER_BYTES}", status)
                await JSONResponse(body, status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Authenticate:
    """Middleware that writes a bearer key's `tenant` and `admin` into `scope["state"]`.

    Without configured keys everyone is the local tenant.

    Args:
        admin_paths: open paths that are not: they take an administrator's key.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, admin_paths: Collection[str] = ()) -> None:
        self._app, self._keys = app, keys
        self._admin_paths = frozenset(admin_paths)
        self._open_paths = OPEN_PATHS - self._admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = self._owner(Headers(scope=scope).get("authorization", ""))
        path = _route(scope)
        if owner is None and path not in self._open_paths:
            body = error_body("missing or unknown API key", HTTPStatus.UNAUTHORIZED)
            await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        if path in self._admin_paths and not (owner is not None and owner.admin):
            body = error_body(f"{path} takes an administrator's key", HTTPStatus.FORBIDDEN)
            await JSONResponse(body, 403)(scope, receive, send)
            return
        if owner is not None:
            scope.setdefault("state", {}).update(tenant=owner.tenant, admin=owner.admin)
        await self._app(scope, receive, send)

    def _owner(self, authorization: str) -> ApiKey | None:
        if self._keys.is_open:
            return _LOCAL
        scheme, _, given = authorization.partition(" ")
        return self._keys.owner(given.strip()) if scheme.lower() == "bearer" else None


class AnswerHead:
    """Middleware that answers HEAD wherever GET is answered: the same, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class _BodyTooLarge(HTTPException):
    """Raised while a body is read; FastAPI lets its own kind of error through its body parser."""

    def __init__(self, limit: int) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body is larger than {limit} bytes")


class _BodyTooSlow(HTTPException):
    """Request body that takes longer than allowed; raised like `_BodyTooLarge`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(HTTPStatus.REQUEST_TIMEOUT, f"the request body did not come within {seconds:g} s")


class _TooManyBytes(HTTPException):
    """Body that is too much beside those of the other requests; raised like `_BodyTooLarge`."""

    def __init__(self, error: OverloadedError) -> None:
        super().__init__(error.http_status, error.message, retry_after(error))


class Limit:
    """Middleware that bounds request bodies: their size, their time, those in progress.

    One too many, and one with too many bytes beside the others, is answered 429 with Retry-After.

    Args:
        limits: requests a minute by tenant, which generating ones take from.
        most_of_one: requests in progress of one tenant; None: as many as of all.
        max_file: bytes of the largest upload of any kind; None: of images and texts.
    """

    def __init__(
        self,
        app: ASGIApp,
        http: HttpSettings,
        metrics: Metrics,
        limits: RateLimits | None = None,
        most_of_one: int | None = None,
        max_file: int | None = None,
    ) -> None:
        self._app = app
        self._max_body, self._max_concurrent = http.max_body_bytes, http.max_concurrent_requests
        self._max_upload = min(http.max_body_bytes, (max_file or http.max_file_bytes) + _UPLOAD_ENVELOPE)
        self._max_other = min(http.max_body_bytes, _OTHER_BODY)
        self._body_timeout = http.body_timeout_s
        self._max_bodies, self._bodies = http.max_bodies_bytes, 0  # bytes of all requests in progress
        self._metrics, self._limits = metrics, limits
        self._running = Counter[str]()  # by tenant
        self._most_of_one = most_of_one or self._max_concurrent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _route(scope)
        is_counted = scope["method"] == "POST" or DOWNLOAD.fullmatch(path)
        if not is_counted or path in OPEN_PATHS:  # open ones have no tenant
            await self._bounded(scope, receive, send, self._max_other)
        elif path in _GENERATING_PATHS:
            await self._counted(scope, receive, send)
        elif path in _TOKENISING_PATHS or _SEARCH.fullmatch(path):
            await self._limited(scope, receive, send, self._max_body)
        else:
            await self._limited(scope, receive, send, self._max_upload if path == _UPLOAD_PATH else self._max_other)

    async def _limited(self, scope: Scope, receive: Receive, send: Send, max_body: int) -> None:
        tenant: str = scope["state"]["tenant"]
        running, own = self._running.total(), self._running[tenant]
        if running >= self._max_concurrent or own >= self._most_of_one:
            count = f"{running} requests" if running >= self._max_concurrent else f"{own} of your requests"
            error = OverloadedError(f"{count} are in progress already; try again later")
            await too_many(error)(scope, receive, send)
            return
        self._running[tenant] += 1
        try:
            await self._bounded(scope, receive, send, max_body)
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count answers by status.

        What is raised up to here is answered 500, outside of all middleware.
        """
        answered, tenant = False, scope["state"]["tenant"]

        def count(status: int) -> None:
            nonlocal answered
            answered = True
            self._metrics.requests.labels(status=str(status)).inc()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
                if self._limits is not None:
                    MutableHeaders(scope=message).update(self._limits.headers(tenant))
            await send(message)

        try:
            if self._limits is not None:
                self._limits.take(tenant, "requests")
            await self._limited(scope, receive, counted, self._max_body)
        except RateLimited as error:
            await too_many(error)(scope, receive, counted)
        except Exception:
            if not answered:
                count(500)
            raise

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, max_body: int) -> None:
        taken, whole = 0, False
        due = asyncio.get_running_loop().time() + self._body_timeout

        async def bounded() -> Message:
            nonlocal taken, whole
            if whole:  # what comes now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError as error:
                raise _BodyTooSlow(self._body_timeout) from error
            size, whole = len(message.get("body", b"")), not message.get("more_body", False)
            taken, self._bodies = taken + size, self._bodies + size
            if taken > max_body:
                raise _BodyTooLarge(max_body)
            if (busy := self._too_many_bytes(taken, 0)) is not None:
                raise _TooManyBytes(busy)
            return message

        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > max_body:
            error = _BodyTooLarge(max_body)
            await JSONResponse(error_body(error.detail, HTTPStatus(error.status_code)), 413)(scope, receive, send)
            return
        if announced.isdigit() and (busy := self._too_many_bytes(0, int(announced))) is not None:
            await too_many(busy)(scope, receive, send)
            return
        try:
            await self._app(scope, bounded, send)
        finally:
            self._bodies -= taken

    def _too_many_bytes(self, own: int, more: int) -> OverloadedError | None:
        """The refusal of a body of `own` bytes and `more` to come, if it is too much beside those of other requests."""
        others = self._bodies - own
        if not others or not own + more or self._bodies + more <= self._max_bodies:
            return None
        return OverloadedError(f"requests in progress have {others} bytes already; try again later")
