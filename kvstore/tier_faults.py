"""Wrappers around a tier that make it fail, stall or be slow on purpose, for tests and benchmarks.

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
from kvstore.tiers import Entry, Tier


class WrappedTier(Tier):
    """Passes every call on to `inner`, through `before`; `calls` lists them as (action, key)."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.calls: list[tuple[str, str]] = []

    def before(self, action: str, key: str) -> None:
        """Runs ahead of every call."""
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
    """Raises TierUnavailable for the actions named in `failing`, a set that may change at any time."""

    def __init__(self, inner: Tier, *failing: str) -> None:
        super().__init__(inner)
        self.failing = set(failing)

    def before(self, action: str, key: str) -> None:
        super().before(action, key)
        if action in self.failing:
            raise TierUnavailable(f"{self.name}: {action} fails on purpose")


class HeldTier(WrappedTier):
    """Holds the actions named in `held` until `release` is set, at most ten seconds; `entered` tells that one waits."""

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
    """A tier behind a network: every call costs `latency_s`, every blob its size over `bytes_per_s`.

    Latencies of concurrent calls overlap; their bytes follow one another over one link. `bytes_per_s` None: unbounded.
    """

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

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        self._transfer(sum(buffer.size for buffer in buffers))
        super().put(key, buffers)

    def _transfer(self, nbytes: int) -> None:
        """Waits for the link's turn and for `nbytes` to pass."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            done = max(time.monotonic(), self._link_free_at) + nbytes / self.bytes_per_s
            self._link_free_at = done
        time.sleep(max(0.0, done - time.monotonic()))
