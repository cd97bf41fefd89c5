"""Wrappers that make a tier fail, stall or be slow on purpose, for tests and benchmarks.

| wrapper | what it adds |
|---|---|
| FaultyTier | the named actions raise TierUnavailable |
| HeldTier | the named actions wait until they are released |
| SlowTier | a latency per call, and a link of bounded bandwidth that all calls share |

Each is a tier itself and passes the conformance suite. Actions are named after the methods: get, put, delete, contains,
entries, touch, quarantine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Blob, Entry, Tier


class WrappedTier(Tier):
    """Passes every call on to `inner`, through `before`; `calls` lists them as (action, key)."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name, self.lifetime = inner.name, inner.lifetime
        self.calls: list[tuple[str, str]] = []

    def before(self, action: str, key: str) -> None:
        """Run ahead of every call."""
        self.calls.append((action, key))

    def get(self, key: str) -> pa.Buffer | None:
        self.before("get", key)
        return self.inner.get(key)

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        self.before("put", key)
        self.inner.put(key, buffers)

    def delete(self, key: str) -> bool:
        self.before("delete", key)
        return self.inner.delete(key)

    def contains(self, key: str) -> bool:
        self.before("contains", key)
        return self.inner.contains(key)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        self.before("entries", prefix)
        return self.inner.entries(prefix)

    def touch(self, key: str) -> None:
        self.before("touch", key)
        self.inner.touch(key)

    def quarantine(self, key: str) -> bool:
        self.before("quarantine", key)
        return self.inner.quarantine(key)


class FaultyTier(WrappedTier):
    """Tier that raises TierUnavailable for the actions in `failing`, a set that may change."""

    def __init__(self, inner: Tier, *failing: str) -> None:
        super().__init__(inner)
        self.failing = set(failing)

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        if action in self.failing:
            raise TierUnavailable(f"{self.name}: {action} fails on purpose")


class HeldTier(WrappedTier):
    """Tier that blocks the actions in `held` until `release` is set, at most ten seconds.

    `entered` tells that one waits.
    """

    def __init__(self, inner: Tier, *held: str) -> None:
        super().__init__(inner)
        self.held = set(held)
        self.entered = threading.Event()
        self.release = threading.Event()

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        if action in self.held:
            self.entered.set()
            self.release.wait(10)


class SlowTier(WrappedTier):
    """Tier with a network's delay: `latency_s` per call, size over `bytes_per_s` per blob.

    Latencies of concurrent calls overlap; they share one link fairly, a packet each. `bytes_per_s` None: unbounded.
    """

    _PACKET_BYTES = 1 << 17

    def __init__(self, inner: Tier, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        super().__init__(inner)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._link_free_at = 0.0  # on the monotonic clock

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        time.sleep(self.latency_s)

    def get(self, key: str) -> pa.Buffer | None:
        found = super().get(key)
        if found is not None:
            self._transfer(found.size)
        return found

    def open(self, key: str) -> Blob | None:
        """The blob before its bytes have passed; they pass as they are read."""
        self.before("get", key)
        blob = self.inner.open(key)
        if blob is None or self.bytes_per_s is None:
            return blob

        def read(start: int, end: int) -> Iterator[memoryview]:
            for first in range(start, end, self._PACKET_BYTES):
                last = min(first + self._PACKET_BYTES, end)
                self._pass(last - first)
                yield from blob.read(first, last) if blob.read else [memoryview(blob.buffer)[first:last]]

        return Blob(blob.buffer, read)

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        self._transfer(sum(buffer.size for buffer in buffers))
        super().put(key, buffers)

    def _transfer(self, nbytes: int) -> None:
        """Wait until `nbytes` have passed over the link."""
        for first in range(0, nbytes, self._PACKET_BYTES):
            self._pass(min(self._PACKET_BYTES, nbytes - first))

    def _pass(self, nbytes: int) -> None:
        """Wait for the link's turn and for one packet to pass."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            done = max(time.monotonic(), self._link_free_at) + nbytes / self.bytes_per_s
            self._link_free_at = done
        time.sleep(max(0.0, done - time.monotonic()))
