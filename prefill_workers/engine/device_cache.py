"""Copies in device memory of what the library's memory holds (`library.device_bytes`)."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.tiers.eviction import worth

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    original: weakref.ref[object]
    copy: T
    nbytes: int
    uses: int = 1
    used: float = field(default_factory=time.monotonic)


class DeviceCache(Generic[T]):
    """Copies of host objects, bounded in bytes; the least used per idle second leave first.

    A copy lives no longer than its original: what the library's memory drops, because it was deleted, quarantined or
    evicted, leaves the device once the last request that uses it has ended and the cache is asked for anything, or by
    `drop_ended`. All bytes take the same time to bring, so that only uses and idle time weigh. Of one thread, but for
    `holds`, and for originals that end on others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = self.hits = self.misses = 0
        self.version = 0  # grows whenever a copy comes or goes
        self._entries: dict[int, _Entry[T]] = {}
        self._ended: list[int] = []  # an original may end on any thread, at any time

    def get(self, original: object) -> T | None:
        """The copy of an object; counts a use."""
        self.drop_ended()
        entry = self._entries.get(id(original))
        if entry is None or entry.original() is not original:
            self.misses += 1
            return None
        self.hits += 1
        entry.uses += 1
        entry.used = time.monotonic()
        return entry.copy

    def holds(self, original: object) -> bool:
        """True if there is a copy of an object. No use; from any thread."""
        entry = self._entries.get(id(original))
        return entry is not None and entry.original() is original

    def put(self, original: object, copy: T, nbytes: int) -> bool:
        """Keep a copy if there is room, or room can be made. True if it is kept."""
        self.drop_ended()
        self._remove(id(original))
        if nbytes > self.limit_bytes:
            return False
        now = time.monotonic()
        by_worth = sorted(self._entries, key=lambda key: self._worth(self._entries[key], now))
        for key in by_worth:
            if self.nbytes + nbytes <= self.limit_bytes:
                break
            self._remove(key)
        number = id(original)
        reference = weakref.ref(original, lambda _: self._ended.append(number))
        self._entries[number] = _Entry(reference, copy, nbytes)
        self.nbytes += nbytes
        self.version += 1
        return True

    def drop_ended(self) -> None:
        """Drop copies whose originals have ended, as `get` and `put` do; for want of those."""
        while self._ended:
            number = self._ended.pop()
            entry = self._entries.get(number)
            if entry is not None and entry.original() is None:
                self._remove(number)

    def clear(self) -> None:
        """Drop all copies."""
        self._entries.clear()
        self.nbytes = 0
        self.version += 1

    @staticmethod
    def _worth(entry: _Entry[T], now: float) -> float:
        return worth(float(entry.uses * entry.nbytes), entry.nbytes, now - entry.used)

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            self.version += 1
