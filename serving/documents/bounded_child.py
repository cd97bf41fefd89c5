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
        stdout: what it answers.
        is_late: its time was over before it ended.
    """

    stdout: IO[bytes]
    is_late: bool = False

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
    """Run `python -I -S script` until its end or `timeout_s`; its input is `job` as a line of JSON, then `data`.

    It writes no files, and its limits stand before it is sent a byte.
    """
    command = [sys.executable, "-I", "-S", str(script)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, close_fds=True
    )
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    feeder = threading.Thread(target=_feed, args=(process.stdin, json.dumps(job).encode(), data), daemon=True)
    child = Child(process.stdout)
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


def _feed(pipe: IO[bytes] | None, job: bytes, data: bytes) -> None:
    assert pipe is not None
    try:
        with pipe:
            pipe.write(job + b"\n")
            pipe.write(data)
    except OSError:  # the child has ended
        pass
