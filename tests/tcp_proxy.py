"""A TCP proxy that stalls or cuts connections on demand, for tests of clients."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections to `127.0.0.1:target`. Its faults may be changed at any time.

    `flowing`: while it is clear, no byte of an answer passes. `cut(direction, times, after)`: as many connections are
    reset once `after` bytes went in that direction, "answer" or "request".
    """

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        """`host`: address to listen on."""
        self._target, self._host = target, host
        self._lock = threading.Lock()
        self._cuts: dict[str, tuple[int, int]] = {}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.flowing = threading.Event()
        self.flowing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    def cut(self, direction: str, times: int, after: int = 0) -> None:
        with self._lock:
            self._cuts[direction] = times, after

    def close(self) -> None:
        self.flowing.set()
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except ConnectionRefusedError:
                _reset(client)
                continue
            except OSError:
                return
            self._sockets += client, server
            for source, sink, direction in ((client, server, "request"), (server, client, "answer")):
                threading.Thread(target=self._forward, args=(source, sink, direction), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                if direction == "answer":
                    self.flowing.wait()
                passed += len(data)
                if self._takes_cut(direction, passed):
                    _reset(source)
                    _reset(sink)
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _takes_cut(self, direction: str, passed: int) -> bool:
        with self._lock:
            times, after = self._cuts.get(direction, (0, 0))
            if times and passed > after:
                self._cuts[direction] = times - 1, after
                return True
            return False


def _reset(connection: socket.socket) -> None:
    """Closes with a RST, so that the peer sees an error and no orderly end."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
    connection.close()
