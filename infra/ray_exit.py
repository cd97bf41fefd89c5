"""Clean exit of a process that joined several Ray clusters one after the other.

It ends before native libraries are torn down: Ray (2.60) ends the thread that exports a driver's metrics when the first
cluster is left, and never again. That of a further cluster goes on; every ten seconds its export fails, which it logs.
Where that happens while the process exits, what it logs with is gone: a segmentation fault, after all work is done, and
an exit status that says it failed. Ray ends its own workers as this does.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_status: int | None = None


def exit_with(status: int) -> None:
    """Say what the process is about to exit with, as it should also do if Ray is in it.

    Threads are waited for and whatever was registered with `atexit` later than this module was imported is done before.
    """
    global _status
    _status = status


@atexit.register
def _end() -> None:
    if _status is None or "ray" not in sys.modules:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
