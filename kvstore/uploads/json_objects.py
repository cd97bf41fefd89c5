"""Small JSON objects in a tier: metadata of files and vector stores."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import pyarrow as pa

from kvstore.tiers.base import Tier

Object = TypeVar("Object")
_READERS = 16  # reads in flight while a listing is resolved: an object store answers each in tens of milliseconds
_MAX_KNOWN = 100_000


class JsonObjects(Generic[Object]):
    """Objects of one dataclass under keys that end in `.json`.

    Thread-safe; processes may share the tier.

    Args:
        immutable: an object never changes once written, so one that was read is not read again while it is listed.
    """

    def __init__(self, tier: Tier, kind: type[Object], *, immutable: bool = False) -> None:
        self._tier, self._kind, self._immutable = tier, kind, immutable
        self._known: dict[str, Object] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kvstore-objects")

    def read(self, key: str) -> Object | None:
        """The object stored under a key; None if absent or unreadable. Raises TierUnavailable."""
        buffer = self._tier.get(key)
        if buffer is None:
            return None
        try:
            return self._kind(**json.loads(memoryview(buffer).tobytes()))
        except (TypeError, ValueError):
            return None

    def later(self, key: str) -> Future[Object | None]:
        """Future of `read`, for several reads at once."""
        return self._pool.submit(self.read, key)

    def write(self, key: str, value: Object) -> None:
        """Store an object, whole or not at all. Raises TierUnavailable."""
        document: Any = value
        self._tier.put(key, [pa.py_buffer(json.dumps(asdict(document)).encode())])

    def find(self, prefix: str, suffix: str = ".json") -> list[Object]:
        """All objects whose key starts and ends like this, in no order. Raises TierUnavailable."""
        keys = [key for key in self._tier.keys(prefix) if key.endswith(suffix)]
        with self._lock:
            known = {key: self._known[key] for key in keys if key in self._known}
        fresh = [key for key in keys if key not in known]
        found = {key: value for key, value in zip(fresh, self._pool.map(self.read, fresh), strict=True) if value}
        if self._immutable:
            with self._lock:
                gone = [key for key in self._known if key.startswith(prefix) and key not in known]
                for key in gone:
                    del self._known[key]
                if len(self._known) + len(found) > _MAX_KNOWN:
                    self._known.clear()
                self._known.update(found)
        return [*known.values(), *found.values()]
