"""Free TCP ports for servers that bind them seconds later, and hosts in URLs."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST = 20_000  # above those that Ray gives its workers
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 1_000
_random = random.SystemRandom()  # processes that ask at the same moment should not get the same port


def free_port() -> int:
    """A TCP port without a listener, which no outgoing connection gets meanwhile.

    Raises:
        OSError: none was found.
    """
    for _ in range(_ATTEMPTS):
        port = _random.randrange(_FIRST, _first_ephemeral())
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"no TCP port between {_FIRST} and {_first_ephemeral()} is free")


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return first if first > _FIRST else 32_768


def url_host(host: str) -> str:
    """A host as URLs have it."""
    return f"[{host}]" if ":" in host else host
