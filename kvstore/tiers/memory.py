"""A tier in this process' memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

from kvstore.tiers.base import Entry, Lifetime, Tier, check_key


class MemoryTier(Tier):
    """Blobs in this process, for tests and for hosts without a disk."""

    lifetime = Lifetime.PROCESS

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[pa.Buffer, float]] = {}

    def get(self, key: str) -> pa.Buffer | None:
        with self._lock:
            found = self._blobs.get(check_key(key))
        return None if found is None else found[0]

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        check_key(key)
        blob = buffers[0] if len(buffers) == 1 else pa.py_buffer(b"".join(memoryview(part) for part in buffers))
        with self._lock:
            self._blobs[key] = (blob, time.time())

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._blobs.pop(check_key(key), None) is not None

    def contains(self, key: str) -> bool:
        return check_key(key) in self._blobs

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            found = [Entry(key, blob.size, used) for key, (blob, used) in self._blobs.items() if key.startswith(prefix)]
        return iter(found)

    def touch(self, key: str) -> None:
        with self._lock:
            if key in self._blobs:
                self._blobs[key] = (self._blobs[key][0], time.time())
