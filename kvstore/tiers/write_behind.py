"""Write-behind queue of one tier, so that no request waits for storage."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
Payload = TypeVar("Payload")
Prepared = TypeVar("Prepared")


class WriteBehind(Generic[Payload, Prepared]):
    """Bounded queue of (path, payload), written in order by one thread.

    A newer payload replaces a waiting one.

    One may always wait, however large: a payload of more than `max_bytes` is let in where nothing else waits.

    `prepare(payload)` runs on a thread of its own, one payload ahead, beside the write of the one before;
    `write(path, payload, prepared)` does the work; `undo(path)` removes what it wrote if the path was cancelled
    meanwhile.
    """

    def __init__(
        self,
        prepare: Callable[[Payload], Prepared],
        write: Callable[[str, Payload, Prepared], None],
        undo: Callable[[str], None],
        max_items: int,
        max_bytes: int,
    ) -> None:
        self._prepare = prepare
        self._write = write
        self._undo = undo
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, tuple[Payload, int]] = OrderedDict()
        self._waiting_bytes = 0
        self._current: tuple[str, Payload] | None = None
        self._cancelled = False  # whether the current path was cancelled while it is written
        self._closing = False
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="kvstore-write-behind", daemon=True)
        self._thread.start()

    def submit(self, path: str, payload: Payload, nbytes: int) -> bool:
        """Queue a write. False, and nothing queued, if the queue is full or closed."""
        with self._changed:
            _, replaced = self._waiting.get(path, (None, 0))
            others = len(self._waiting) - (path in self._waiting)
            full = others >= self._max_items or self._waiting_bytes - replaced + nbytes > self._max_bytes
            if self._closing or (others and full):
                return False
            self._waiting.pop(path, None)
            self._waiting[path] = (payload, nbytes)
            self._waiting_bytes += nbytes - replaced
            self._changed.notify_all()
            return True

    def pending(self, path: str) -> Payload | None:
        """The payload queued or being written for a path."""
        with self._changed:
            if path in self._waiting:
                return self._waiting[path][0]
            if self._current is not None and self._current[0] == path and not self._cancelled:
                return self._current[1]
            return None

    def cancel(self, path: str) -> bool:
        """Drop a path's write, or undo it if it is under way. True if there was one."""
        with self._changed:
            dropped = self._waiting.pop(path, None)
            if dropped is not None:
                self._waiting_bytes -= dropped[1]
            current = self._current is not None and self._current[0] == path
            self._cancelled = self._cancelled or current
            self._changed.notify_all()
            return dropped is not None or current

    def settle(self, path: str) -> None:
        """Wait while a path is being written, or its write is undone."""
        with self._changed:
            self._changed.wait_for(lambda: self._current is None or self._current[0] != path)

    def matching(self, condition: Callable[[Payload], bool]) -> list[str]:
        """Paths whose payload, queued or being written, meets a condition."""
        with self._changed:
            found = [path for path, (payload, _) in self._waiting.items() if condition(payload)]
            if self._current is not None and condition(self._current[1]):
                found.append(self._current[0])
            return found

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or being written.

        False if `timeout` seconds were not enough.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._waiting or self._current is not None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def end(self) -> None:
        """Refuse later submissions; the thread writes what is queued, and ends."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, timeout: float | None = None) -> int:
        """End, and wait for that. Returns the number of writes left after `timeout` seconds."""
        self.end()
        self._thread.join(timeout)
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    def _run(self) -> None:
        ahead: tuple[Payload, Future[Prepared]] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="kvstore-prepare") as preparing:
            while True:
                with self._changed:
                    while not self._waiting:
                        if self._closing:
                            return
                        self._changed.wait()
                    path, (payload, nbytes) = self._waiting.popitem(last=False)
                    self._waiting_bytes -= nbytes
                    self._current, self._cancelled = (path, payload), False
                    following = next(iter(self._waiting.values()), None)
                ready = ahead is not None and ahead[0] is payload
                prepared = ahead[1] if ahead is not None and ready else preparing.submit(self._prepare, payload)
                ahead = None
                if following is not None:
                    ahead = following[0], preparing.submit(self._prepare, following[0])
                try:
                    self._write(path, payload, prepared.result())
                except Exception:  # the thread must outlive any one record
                    logger.exception("could not persist %s", path)
                    self.failures += 1
                with self._changed:
                    cancelled = self._cancelled
                if cancelled:
                    self._undo(path)
                with self._changed:
                    self._current = None
                    self._changed.notify_all()
