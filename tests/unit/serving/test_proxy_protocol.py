"""A real uvicorn server, as Ray Serve's proxies run it, against headers that are large or slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from ray.serve._private.http_util import RequestIdMiddleware
from uvicorn.protocols.http import auto

from serving import proxy_protocol
from serving.proxy_protocol import MAX_HEADER_BYTES, BoundedHttpProtocol, EndAnswers, set_up_proxy

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BEGIN = b"GET / HTTP/1.1\r\nhost: here\r\n"
POST = b"POST / HTTP/1.1\r\nhost: here\r\n"
OK = b"HTTP/1.1 200 OK"
SECONDS = 0.3  # for headers, in these tests


@asynccontextmanager
async def connected(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stream]:
    """A connection to an application that reads the body and answers its length, `slow` ones after a while."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    monkeypatch.setattr(proxy_protocol, "HEADER_SECONDS", SECONDS)
    set_up_proxy()

    async def app(scope, receive, send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/slow":
            await asyncio.sleep(3 * SECONDS)
        body = str(size).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_keep_alive=90))
    server.install_signal_handlers = lambda: None
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def answer(stream: Stream, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send the parts, and read what comes meanwhile until the connection ends, or nothing came for a while."""
    reader, writer = stream

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)

    sending, found = asyncio.create_task(send()), b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 16), 5 * SECONDS):
            found += piece
        return found + b"|closed"
    except TimeoutError:
        return found
    except ConnectionError:  # what it has not read when it closes resets the connection
        return found + b"|closed"
    finally:
        sending.cancel()


@pytest.mark.parametrize(
    "parts",
    [
        [BEGIN, *[b"a: " + b"x" * 1000 + b"\r\n"] * 70, b"\r\n"],
        [BEGIN, b"a: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n"],
        [BEGIN + b"a: ", *[b"x" * 10_000] * 50],
        [b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n"],
        [BEGIN, *[b"x" * 10_000] * 50],
    ],
    ids=["many", "one", "one that never ends", "URL", "a name that never ends"],
)
async def test_large_headers_are_refused_while_they_come(monkeypatch: pytest.MonkeyPatch, parts: list[bytes]):
    async with connected(monkeypatch) as stream:
        said = await answer(stream, *parts)
    assert said.startswith(b"HTTP/1.1 431")
    assert said.endswith(b"|closed")
    assert OK not in said


async def test_trailers_are_bounded_as_headers(monkeypatch: pytest.MonkeyPatch):
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    for trailers in ([b"a: " + b"x" * 1000 + b"\r\n"] * 70, [b"a: ", *[b"x" * 10_000] * 50]):
        async with connected(monkeypatch) as stream:
            said = await answer(stream, chunked, *trailers)
        assert said.endswith(b"|closed")
        assert OK not in said


@pytest.mark.parametrize("begun", [b"", b"\r\n", BEGIN], ids=["nothing", "no request", "half of the headers"])
async def test_headers_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, begun: bytes):
    async with connected(monkeypatch) as stream:
        said = await answer(stream, begun)
    assert said == (
        (b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" if begun == BEGIN else b"")
        + b"|closed"
    )


async def test_headers_that_trickle_get_no_more_time(monkeypatch: pytest.MonkeyPatch):
    async with connected(monkeypatch) as stream:
        said = await answer(stream, BEGIN, *[b"a: b\r\n"] * 12, pause=SECONDS / 6)
    assert said.startswith(b"HTTP/1.1 408")


async def test_what_follows_an_answer_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch):
    async with connected(monkeypatch) as stream:
        said = await answer(stream, BEGIN + b"\r\n", b"\r\n", pause=0.05)
    assert said.startswith(OK)
    assert said.endswith(b"0|closed")


async def test_ordinary_requests_are_as_before(monkeypatch: pytest.MonkeyPatch):
    large = b"a: " + b"x" * (MAX_HEADER_BYTES - 1000) + b"\r\n"
    body = b"y" * 500_000
    async with connected(monkeypatch) as stream:
        posted = POST + b"content-length: 500000\r\n\r\n" + body
        said = await answer(stream, BEGIN + large + b"\r\n", posted, posted + posted + BEGIN, b"\r\n", pause=0.1)
    assert said.count(OK) == 5
    assert said.count(b"500000") == 3
    assert not said.endswith(b"|closed"), "an idle connection is uvicorn's to end"


async def test_a_slow_answer_and_a_slow_body_are_not_slow_headers(monkeypatch: pytest.MonkeyPatch):
    slow = BEGIN.replace(b"/ ", b"/slow ", 1)
    async with connected(monkeypatch) as stream:
        said = await answer(stream, slow + b"\r\n" + BEGIN + b"a: ", b"b\r\n\r\n", pause=2 * SECONDS)
        assert said.count(OK) == 2
    async with connected(monkeypatch) as stream:
        said = await answer(stream, POST + b"content-length: 12\r\n\r\n", *[b"yy"] * 6, pause=SECONDS / 3)
        assert said.count(OK) == 1


def test_it_is_what_uvicorn_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    set_up_proxy()
    config = uvicorn.Config("somewhere:app")
    config.load = lambda: None
    assert uvicorn.config.import_from_string(uvicorn.config.HTTP_PROTOCOLS["auto"]) is BoundedHttpProtocol


def told(*sent: dict, path: str = "/") -> list[dict]:
    """Messages to the client of an application that sends so much and ends."""
    messages: list[dict] = []

    async def app(scope, receive, send) -> None:
        for message in sent:
            await send(message)

    async def send(message) -> None:
        messages.append(message)

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    asyncio.run(EndAnswers(app)({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send))
    return messages


STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset")],
}
EVENT = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"", "more_body": False}


def test_a_stream_whose_replica_died_ends_with_an_error_event():
    *before, last = told(STREAM, EVENT)
    assert before == [STREAM, EVENT]
    assert not last.get("more_body")
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == 503


def test_what_has_not_begun_is_told_to_come_back():
    start, body = told()
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == 503


def test_whole_answers_and_others_that_are_cut_are_left_alone():
    assert told(STREAM, EVENT, LAST) == [STREAM, EVENT, LAST]
    page = {**STREAM, "headers": [(b"content-type", b"application/json")]}
    assert told(page, EVENT) == [page, EVENT]


class Proxy:
    """Ray Serve's proxy as far as its routes go: one application, whose running replicas are given."""

    def __init__(self, replicas: list[str], has_router: bool = True) -> None:
        self.replicas = replicas
        routing = SimpleNamespace(curr_replicas=replicas) if has_router else None
        asyncio_router = SimpleNamespace(_request_router=routing, _running_replicas=replicas)
        handle = SimpleNamespace(_router=SimpleNamespace(_asyncio_router=asyncio_router))
        self.proxy_router = SimpleNamespace(match_route=lambda path: ("/", handle, False))

    async def __call__(self, scope, receive, send) -> None:
        for message in (STREAM, EVENT, LAST):
            await send(message)


def asked(proxy: Proxy, path: str = "/v1/models", later: tuple[str, ...] = ()) -> list[dict]:
    """Messages to a client of the proxy; some replicas begin to run a while after it has asked."""
    messages: list[dict] = []

    async def send(message) -> None:
        messages.append(message)

    async def ask() -> None:
        asyncio.get_running_loop().call_later(0.1, proxy.replicas.extend, later)
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await EndAnswers(RequestIdMiddleware(proxy))(scope, None, send)

    asyncio.run(ask())
    return [
        {**message, "headers": STREAM["headers"]} if message.get("status") == 200 else message for message in messages
    ]


@pytest.mark.parametrize("has_router", [True, False])
def test_while_no_ingress_replica_runs_requests_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch, has_router: bool
):
    monkeypatch.setattr(proxy_protocol, "_NO_REPLICA_SECONDS", 0.3)
    start, body = asked(Proxy([], has_router))
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == "the service is starting; try again"
    assert asked(Proxy([], has_router), later=("replica",)) == [STREAM, EVENT, LAST], "one takes another's place"
    assert asked(Proxy(["replica"], has_router)) == [STREAM, EVENT, LAST]
    assert asked(Proxy([], has_router), "/-/healthz") == [STREAM, EVENT, LAST], "the proxy's own"


def test_where_ray_has_other_fields_requests_wait_as_ever():
    assert proxy_protocol._routes_of(told) is None
    other = SimpleNamespace(match_route=lambda path: ("/", SimpleNamespace(), False))
    assert not proxy_protocol._lacks_replicas(other, "/")
    assert not proxy_protocol._lacks_replicas(None, "/")


def test_a_path_that_serve_does_not_know_is_told_to_come_back():
    unknown = {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]}
    start, body = told(unknown, {"type": "http.response.body", "body": b"Path '/' not found. Please ping"})
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["message"] == "the service is starting; try again"
    others = {"type": "http.response.body", "body": b"no such page"}
    assert told(unknown, others) == [unknown, others]
