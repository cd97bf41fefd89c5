"""Child process that reads one untrusted file within a bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
def bounded_child(script: Path, job: Mapping[str, Any], data: bytes, timeout_s: float) -> Iterator[Child]:
    """Run `python -I -S script JOB` with `data` as its input, until the end or `timeout_s`."""
    command = [sys.executable, "-I", "-S", str(script), json.dumps(job)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, close_fds=True
    )
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    feeder = threading.Thread(target=_feed, args=(process.stdin, data), daemon=True)
    feeder.start()
    child = Child(process.stdout)
    try:
        yield child
    finally:
        child.is_late = not timer.is_alive()
        timer.cancel()
        process.kill()
        process.wait()
        feeder.join()
        process.stdout.close()


def _feed(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    try:
        with pipe:
            pipe.write(data)
    except OSError:  # the child has ended
        pass
