"""A library's records in memory, bounded in bytes."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.records.record import Record
from kvstore.tiers.base import Lifetime
from kvstore.tiers.eviction import LOW_WATER, worth

_ANNOUNCE_SECONDS = 60.0  # a tier learns within this time that memory still answers for a record


@dataclass
class _Resident:
    record: Record
    used: float
    announced: float  # when the tiers were last told of a use
    lasts: Lifetime = Lifetime.PROCESS  # the longest of the tiers that are known to have it


class MemoryCache:
    """Decoded records of one process, bounded in bytes, in all and per tenant. Thread-safe.

    `announce(path)` is called now and then for a record that goes on being used, and must not block: a tier that other
    processes share cannot see these hits, and would let the most wanted records go first.
    """

    def __init__(
        self,
        limit_bytes: int,
        tenant_limit_bytes: int | None,
        pinned: Callable[[str], bool],
        announce: Callable[[str], None] = lambda path: None,
    ) -> None:
        self._limit = limit_bytes
        self._tenant_limit = tenant_limit_bytes
        self._pinned = pinned
        self._announce = announce
        self._lock = threading.RLock()
        self._residents: dict[str, _Resident] = {}
        self._tenants: dict[str, int] = {}
        self.nbytes = 0
        self.evictions = 0
        self.version = 0  # grows whenever a record comes or goes

    def get(self, path: str) -> Record | None:
        with self._lock:
            resident = self._residents.get(path)
            if resident is None:
                return None
            resident.used = now = time.time()
            if now - resident.announced >= _ANNOUNCE_SECONDS:
                resident.announced = now
                self._announce(path)
            return resident.record

    def put(self, path: str, record: Record, idle_s: float | None = None) -> bool:
        """Keep the record if room can be made without touching pinned ones. True if it is kept.

        Args:
            idle_s: seconds since another process used it last; what is worth more than it then stays. None: it is used
                now, and whatever there is makes room.
        """
        with self._lock:
            self.remove(path)
            size, tenant, fits = record.nbytes, record.tenant, True
            most = math.inf if idle_s is None else worth(record.recompute_seconds, size, idle_s)
            if self._tenant_limit is not None:
                own = self._tenants.get(tenant, 0)
                fits = self._make_room(own + size - self._tenant_limit, self._tenant_limit, tenant, most)
            # Counted only now: what the tenant gave up is room for all.
            fits = fits and self._make_room(self.nbytes + size - self._limit, self._limit, None, most)
            if fits:
                now = time.time()
                self._residents[path] = _Resident(record, now - (idle_s or 0.0), now)
                self._account(tenant, size)
                self.version += 1
            return fits

    def remove(self, path: str) -> bool:
        with self._lock:
            resident = self._residents.pop(path, None)
            if resident is not None:
                self._account(resident.record.tenant, -resident.record.nbytes)
                self.version += 1
            return resident is not None

    def persisted(self, path: str, record: Record, lifetime: Lifetime) -> None:
        """Note that a tier of that lifetime has the record."""
        with self._lock:
            resident = self._residents.get(path)
            if resident is not None and resident.record is record:
                resident.lasts = max(resident.lasts, lifetime)

    def outlived(self, lifetime: Lifetime) -> list[tuple[Record, float]]:
        """Records that no tier of at least that lifetime is known to have.

        Each with the seconds since its last use.
        """
        now = time.time()
        with self._lock:
            return [(one.record, now - one.used) for one in self._residents.values() if one.lasts < lifetime]

    def matching(self, condition: Callable[[Record], bool]) -> list[str]:
        """Paths of the records that meet a condition."""
        with self._lock:
            return [path for path, resident in self._residents.items() if condition(resident.record)]

    def latest(self, condition: Callable[[Record], bool], limit: int) -> list[Record]:
        """At most `limit` records that meet a condition, most recently used first."""
        with self._lock:
            found = [resident for resident in self._residents.values() if condition(resident.record)]
        return [resident.record for resident in heapq.nlargest(limit, found, key=lambda resident: resident.used)]

    def last_used(self) -> dict[str, float]:
        """Last use of each record, Unix seconds.

        A tier does not see hits that memory answered.
        """
        with self._lock:
            return {path: resident.used for path, resident in self._residents.items()}

    def _make_room(self, excess: int, limit: int, tenant: str | None, most: float) -> bool:
        """Evict the least worthy until `excess` bytes are freed.

        Nothing if that takes what is worth `most` or more.
        """
        if excess <= 0:
            return True
        now = time.time()
        candidates = [
            (worth(r.record.recompute_seconds, r.record.nbytes, now - r.used), path, r.record.nbytes)
            for path, r in self._residents.items()
            if (tenant is None or r.record.tenant == tenant) and not self._pinned(r.record.key)
        ]
        candidates = [candidate for candidate in candidates if candidate[0] < most]
        if sum(size for _, _, size in candidates) < excess:
            return False
        target, freed = excess + int(limit * (1 - LOW_WATER)), 0
        for _, path, size in sorted(candidates):
            if freed >= target:
                break
            self.remove(path)
            self.evictions += 1
            freed += size
        return True

    def _account(self, tenant: str, size: int) -> None:
        self.nbytes += size
        left = self._tenants.get(tenant, 0) + size
        if left:
            self._tenants[tenant] = left
        else:
            self._tenants.pop(tenant, None)
