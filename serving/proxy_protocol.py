"""Ray Serve's proxies: bounds on headers, and ends of answers whose ingress replica died.

uvicorn's parser takes headers of any size, and waits for them as long as a client likes: each such connection costs the
proxy memory and a file descriptor. Of an answer whose replica died, Serve's proxy says nothing more. A request for
which no ingress replica runs waits until one does. Ray Serve has no settings for any of this, but calls `set_up_proxy`
in each process that listens (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, see `serving.deploy.launch`).
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024  # of URL and headers
HEADER_SECONDS = 20.0  # for them to come
_LOST = "the replica that answered was lost; try again"
_STARTING = "the service is starting; try again"
_UNKNOWN_PATH = b"Path '"  # so begins Serve's answer
_LATER = {"Retry-After": "1"}
_NO_REPLICA_SECONDS = 1.0  # until a request without a replica is refused: one may be taking another's place
_LOOK_SECONDS = 0.05
_OWN_PATHS = "/-/"  # which Serve's proxy answers itself


def set_up_proxy() -> list[Middleware]:
    """Bound headers and set up gRPC in this process; returns the middleware for Serve to add."""
    from infra import replica_grpc  # the proxy's module, which imports this one's callers, is loading

    replica_grpc.install()
    auto.AutoHTTPProtocol = BoundedHttpProtocol
    return [Middleware(EndAnswers)]


class EndAnswers:
    """Middleware that ends answers that Serve's proxy leaves open when a replica dies.

    An event stream gets an error event, what has not begun is answered 503, and of other answers the connection is cut.
    So is a path that Serve does not know, the application, which takes all paths, being not there yet, or not any more,
    and a request while no replica of the ingress runs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._routes = app, _routes_of(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not await self._finds_replica(scope["path"]):
            await _refusal(_STARTING)(scope, receive, send)
            return
        begun = streams = ended = unknown = False
        held: Message | None = None  # the start of a 404, until its words tell whose it is

        async def watched(message: Message) -> None:
            nonlocal begun, streams, ended, unknown, held
            if message["type"] == "http.response.start":
                streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                if message["status"] == HTTPStatus.NOT_FOUND:
                    held = message
                    return
            elif held is not None:
                unknown, start, held = message.get("body", b"").startswith(_UNKNOWN_PATH), held, None
                if not unknown:
                    await send(start)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            begun = begun or not unknown
            if not unknown:
                await send(message)

        await self._app(scope, receive, watched)
        if not begun:
            await _refusal(_STARTING if unknown else _LOST)(scope, receive, send)
        elif streams and not ended:
            await send({"type": "http.response.body", "body": f"data: {_error(_LOST)}\n\n".encode()})

    async def _finds_replica(self, path: str) -> bool:
        """True once a replica runs that may answer a path; False if none does for a while."""
        until = asyncio.get_running_loop().time() + _NO_REPLICA_SECONDS
        while not path.startswith(_OWN_PATHS) and _lacks_replicas(self._routes, path):
            if asyncio.get_running_loop().time() >= until:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True


def _routes_of(app: Any) -> Any:
    """Ray Serve's table of routes, kept by the proxy within this chain of ASGI applications; None: there is none."""
    while app is not None and not hasattr(app, "proxy_router"):
        app = getattr(app, "_app", None)
    return None if app is None else app.proxy_router


def _lacks_replicas(routes: Any, path: str) -> bool:
    """True if Serve has a route for a path, and no running replica.

    Told by private fields of its router; False where Ray has others.
    """
    try:
        matched = routes.match_route(path)
        if matched is None:
            return False
        router = matched[1]._router._asyncio_router
        running = router._running_replicas if router._request_router is None else router._request_router.curr_replicas
    except AttributeError:
        return False
    return not running


def _refusal(message: str) -> Response:
    return Response(_error(message), 503, _LATER, media_type="application/json")


def _error(message: str) -> str:
    return json.dumps({"error": {"message": message, "type": "Service Unavailable", "param": None, "code": 503}})


class _TooLarge(Exception):
    """Raised to the parser, which stops; uvicorn then calls `send_400_response`."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP connection that is closed with 431 on large headers, and with 408 on slow ones.

    Trailers count as headers.
    """

    _came = 0  # bytes of the request's URL and headers
    _unparsed = 0  # bytes since the parser last told of anything
    _in_headers = False  # a request has begun
    _timer: asyncio.TimerHandle | None = None  # while headers are awaited

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn names the narrower type
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse a part that never ends, of which the parser tells nothing."""
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEADER_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._timer is None and not self._is_answering and self.transport.get_protocol() is self:
            self._await_headers()  # uvicorn waits no longer since something came, be it no request

    def on_message_begin(self) -> None:
        """Begin to count."""
        self._came = self._unparsed = 0
        self._in_headers = True
        self._await_headers()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Wait no longer, and let the request begin."""
        self._stop_waiting()
        self._in_headers = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unparsed = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what uvicorn calls invalid: malformed, or too large."""
        if self._came > MAX_HEADER_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._came += size
        if self._came > MAX_HEADER_BYTES:
            raise _TooLarge

    def _await_headers(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._waited)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _waited(self) -> None:
        if self._is_answering:  # the next request's headers may wait in a socket that is not read meanwhile
            self._await_headers()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus) -> None:
        """Close the connection; say why where that can be the answer to a request."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self._in_headers and not self._is_answering:
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
