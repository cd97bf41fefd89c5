"""Requests of the service's own access logs, for the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoscale.traces import Chunk, Request
from serving.access_log import LoggedRequest, read

_OUTPUT = 128  # tokens of an answer, which the log does not tell


def looks_logged(path: Path) -> bool:
    """True if a path is an access log of a service, or a folder of such."""
    return any(path.glob("access-*.jsonl*")) if path.is_dir() else path.name.startswith("access-")


def in_order(path: Path) -> list[LoggedRequest]:
    """Lines of all files by the time at which their requests came.

    Raises:
        BadLog: there is none, or one cannot be read.
    """
    return sorted(read(path), key=arrived)


def arrived(line: LoggedRequest) -> float:
    """Time at which a request came."""
    return line.time - (line.ttft_ms or 0.0) / 1e3


def logged(path: Path) -> Iterator[Request]:
    """Requests with their chunks; answers are taken for 128 tokens each.

    Raises:
        BadLog: there is none, or one cannot be read.
    """
    lines = in_order(path)
    for line in lines:
        chunks = tuple(Chunk(one.content, one.tokens) for one in line.chunks)
        text = max(1, (line.tokens or line.computed) - sum(chunk.tokens for chunk in chunks))
        yield Request(arrived(line) - arrived(lines[0]), text, chunks, _OUTPUT)
