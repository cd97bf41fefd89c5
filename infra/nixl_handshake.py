"""Guard of NIXL's handshake port: drops malformed messages, restarts a failed listener.

Before its first pull from a prefill engine a decode engine asks that engine's port for its NIXL metadata. vLLM answers
on a thread that ends at the first message it cannot read, and nobody notices: decode engines that start later cannot
pull. The port knows no keys, so that whoever reaches it could do that.

vLLM's own loop stays. What it receives is read before: messages that are not a request for the metadata of a rank of
this engine are dropped and counted. There is no compatibility hash in a request; the one that asks compares hashes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

Rank = tuple[int, int]  # pipeline, tensor

_MOST_BYTES = 256  # of a message's part: a request has 17
_PAUSE_SECONDS = 1.0  # before a listener that failed starts again
_requests = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_ranks: ContextVar[Collection[Rank]] = ContextVar("ranks")  # of the engine that this thread listens for
_dropped = 0


def install() -> None:
    """Guard the handshake listeners that vLLM starts in this process from now on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler

    scheduler: Any = base_scheduler.NixlBaseConnectorScheduler
    listen = scheduler._nixl_handshake_listener
    if isinstance(listen, functools.partial):  # vLLM loads its plugins more than once
        return
    scheduler._nixl_handshake_listener = staticmethod(functools.partial(_keep_listening, listen))
    base_scheduler.zmq_ctx = _router  # nothing else there uses it


def dropped() -> int:
    """Messages that listeners of this process have dropped."""
    return _dropped


async def shake_hands(host: str, port: int, seconds: float) -> None:
    """Ask a listener for the metadata of its first rank, as a decode engine would.

    Raises:
        TimeoutError: no answer came in time.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        _allow_ipv6(socket, host)
        socket.connect(_path(host, port))
        await socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        if not await socket.poll(int(seconds * 1e3)):
            raise TimeoutError(f"NIXL's handshake listener does not answer within {seconds:g} s")


def _path(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _allow_ipv6(socket: Any, address: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in address or address.count(":") > 1))


def _keep_listening(
    listen: Callable[..., None],
    payloads: Mapping[Rank, Any],
    ready: threading.Event,
    stop: threading.Event,
    host: str,
    port: int,
) -> None:
    """Run vLLM's listener until it is told to stop, whatever it raises."""
    _ranks.set(payloads.keys())
    while not stop.is_set():
        try:
            listen(payloads, ready, stop, host, port)
        except Exception:
            logger.exception("NIXL's handshake listener on %s:%s failed, and starts again", host, port)
            stop.wait(_PAUSE_SECONDS)


@contextmanager
def _router(kind: int, path: str) -> Iterator[_Requests]:
    """The listener's socket, in place of vLLM's `zmq_ctx`: bound, for short messages, behind `_Requests`."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        _allow_ipv6(socket, path.removeprefix("tcp://"))
        socket.bind(path)
        yield _Requests(socket, _ranks.get())


class _Requests:
    """A ROUTER socket that gives the listener requests for known ranks only."""

    def __init__(self, socket: Any, ranks: Collection[Rank]) -> None:
        self._socket, self._ranks = socket, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_multipart(self) -> list[bytes]:
        """The next message. Raises zmq.Again for one that is dropped, after which vLLM's loop looks whether to stop."""
        global _dropped
        parts: list[bytes] = self._socket.recv_multipart()
        if not is_request(parts, self._ranks):
            _dropped += 1
            if _dropped & (_dropped - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not fill the log
                logger.warning("NIXL's handshake port got what is no request of a decode engine: %d dropped", _dropped)
            raise zmq.Again
        return parts


def is_request(parts: list[bytes], ranks: Collection[Rank]) -> bool:
    """True if a message asks for the metadata of one of `ranks`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    if len(parts) != 3 or parts[1]:
        return False
    try:
        word, *rank = _requests.decode(parts[2])
    except msgspec.MsgspecError:
        return False
    return word == GET_META_MSG and tuple(rank) in ranks
