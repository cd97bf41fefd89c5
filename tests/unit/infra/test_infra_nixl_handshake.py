"""NIXL's handshake port against messages of anybody: vLLM's own listener, without an engine."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from infra import nixl_handshake
from infra.ports import free_port

base_scheduler: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler")
GET = base_scheduler.GET_META_MSG
GARBAGE = [
    b"",
    b"\xc1",
    b"not msgpack",
    b"\x92" * 200,
    msgspec.msgpack.encode(7),
    msgspec.msgpack.encode((GET, 0)),
    msgspec.msgpack.encode((GET, 0, 0, 0)),
    msgspec.msgpack.encode((GET, [0], 0)),
    msgspec.msgpack.encode((GET, "0", 0)),
    msgspec.msgpack.encode((b"another word", 0, 0)),
    msgspec.msgpack.encode((GET, 0, 9)),  # a rank that this engine does not have
    msgspec.msgpack.encode((GET, 2**63, -1)),
]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a listener of two ranks, guarded."""
    scheduler = base_scheduler.NixlBaseConnectorScheduler
    listen = scheduler.__dict__["_nixl_handshake_listener"]
    monkeypatch.setattr(base_scheduler, "zmq_ctx", base_scheduler.zmq_ctx)
    monkeypatch.setattr(scheduler, "_nixl_handshake_listener", listen)
    monkeypatch.setattr(nixl_handshake, "_PAUSE_SECONDS", 0.05)
    for _ in range(2):  # vLLM loads its plugins more than once
        nixl_handshake.install()
    port, ready, stop = free_port(), threading.Event(), threading.Event()
    payloads = {(0, 0): b"of rank 0", (0, 1): b"of rank 1"}
    arguments = (payloads, ready, stop, "127.0.0.1", port)
    thread = threading.Thread(target=scheduler._nixl_handshake_listener, args=arguments, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield port
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def ask(port: int, *parts: bytes, seconds: float = 10) -> bytes | None:
    """The listener's answer to a message, or None."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 5000  # what was sent arrives, also where nobody waits for an answer
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(parts)
        return socket.recv_multipart()[1] if socket.poll(seconds * 1e3) else None


def request(rank: int) -> tuple[bytes, bytes]:
    return b"", msgspec.msgpack.encode((GET, 0, rank))


def test_a_decode_engine_is_answered_whatever_others_have_sent_before(port: int, caplog: pytest.LogCaptureFixture):
    before = nixl_handshake.dropped()
    with caplog.at_level(logging.WARNING):
        for garbage in GARBAGE:
            assert ask(port, b"", garbage, seconds=0.05) is None
        for parts in ([b"one part"], [b"", b"", b"three"], [b"no delimiter", request(0)[1]]):
            assert ask(port, *parts, seconds=0.05) is None
        assert ask(port, b"", bytes(1 << 20), seconds=0.05) is None  # not even read
        assert [ask(port, *request(rank)) for rank in (0, 1)] == [b"of rank 0", b"of rank 1"]
    assert nixl_handshake.dropped() - before == len(GARBAGE) + 3
    assert "no request of a decode engine" in caplog.text
    assert not any(record.levelno >= logging.ERROR for record in caplog.records), "the listener itself goes on"


def test_a_listener_that_fails_all_the_same_starts_again(port: int, monkeypatch: pytest.MonkeyPatch):
    def broken(parts: Any, ranks: Any) -> bool:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(nixl_handshake, "is_request", broken)
        assert ask(port, *request(0), seconds=0.2) is None
    assert ask(port, *request(0)) == b"of rank 0"


async def test_health_is_asked_as_a_decode_engine_asks(port: int):
    await nixl_handshake.shake_hands("127.0.0.1", port, 10)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        await nixl_handshake.shake_hands("127.0.0.1", free_port(), 0.05)
