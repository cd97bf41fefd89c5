"""Child process that reads one untrusted file within bounds on time and memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_LONGEST_LINE = 32 << 20  # bytes of one answer


@dataclass
class Child:
    """A reader that runs.

    Attributes:
        stdin, stdout: what it is asked, and what it answers.
        is_late: its time was over before it ended.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]
    is_late: bool = False

    def send(self, value: Any) -> None:
        """Ask for more by a line of JSON, once it has answered what stood before."""
        with suppress(OSError):  # it has ended
            self.stdin.write(json.dumps(value).encode() + b"\n")
            self.stdin.flush()

    def line(self) -> dict[str, Any] | None:
        """Next line of JSON; None without one.

        The child is no more trusted than its file.
        """
        raw = self.stdout.readline(_LONGEST_LINE)
        try:
            value = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@contextmanager
def bounded_child(
    script: Path, job: Mapping[str, Any], data: bytes, timeout_s: float, memory_bytes: int
) -> Iterator[Child]:
    """Run `python -I -S script` until the block ends, or `timeout_s`.

    Its input is a line of JSON, `job` with `bytes`, the length of `data`; then `data`; then what is sent. It writes no
    files, and its limits stand before it is sent a byte.
    """
    command = [sys.executable, "-I", "-S", str(script)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, close_fds=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    head = json.dumps({**job, "bytes": len(data)}).encode() + b"\n"
    feeder = threading.Thread(target=_feed, args=(process.stdin, head, data), daemon=True)
    child = Child(process.stdin, process.stdout)
    try:
        _bound(process.pid, memory_bytes, max(1, int(timeout_s)))
        feeder.start()
        yield child
    finally:
        child.is_late = not timer.is_alive()
        timer.cancel()
        process.kill()
        process.wait()
        if feeder.ident is not None:
            feeder.join()
        with suppress(OSError):  # of what it did not read
            process.stdin.close()
        process.stdout.close()


def _bound(pid: int, memory_bytes: int, cpu_seconds: int) -> None:
    for limit, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, limit, (most, most))


def _feed(pipe: IO[bytes], head: bytes, data: bytes) -> None:
    with suppress(OSError):  # the child has ended
        pipe.write(head)
        pipe.write(data)
        pipe.flush()
