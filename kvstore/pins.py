"""Reference counts of keys in use: their holders must not be evicted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence


class Pins:
    """Keys in use, each as often as it is held. Thread-safe.

    `release` takes no lock: the garbage collector may run a finalizer that releases keys at any allocation, in a thread
    that holds any lock, this one too. Releases are counted at the next hold or query. Callers may hold
    locks of their own: none is taken under the one here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._released: deque[Sequence[str]] = deque()

    def hold(self, keys: Sequence[str]) -> None:
        """Counts keys as in use once more."""
        with self._lock:
            self._settle()
            for key in keys:
                self._held[key] = self._held.get(key, 0) + 1

    def release(self, keys: Sequence[str]) -> None:
        """Undo one `hold` of the same keys, which must not change afterwards."""
        self._released.append(keys)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            self._settle()
            return key in self._held

    def __len__(self) -> int:
        with self._lock:
            self._settle()
            return len(self._held)

    def _settle(self) -> None:
        """Counts what was released; under the lock."""
        while self._released:
            for key in self._released.popleft():
                if self._held[key] == 1:
                    del self._held[key]
                else:
                    self._held[key] -= 1
