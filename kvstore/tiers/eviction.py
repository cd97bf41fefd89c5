"""Eviction: bounds on the bytes of a cache or tier, and the order in which records leave.

A record's worth is the recompute seconds it saves per byte, over how long it lay idle. Records in use never leave
memory; what one process evicts from a tier stays in the memory of those that use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvstore.tiers.base import QUARANTINE, Entry, Tier

logger = logging.getLogger(__name__)

# A prefill of 1,088 tokens of 16 KiB KV each took 0.83 s (ENGINE_NOTES): what a record of unknown cost is taken for.
DEFAULT_SECONDS_PER_BYTE = 5e-8
LOW_WATER = 0.9  # evicting down to this share amortises the scan
_ROOM = 0.8  # a tier this full, as scanned, still has the price of what it evicted last
AT_ONCE = 64  # records deleted together
_FREE = 0.05  # share of a limit that is kept for what other processes have written since this one looked


def worth(recompute_seconds: float, nbytes: int, idle_seconds: float) -> float:
    """Seconds saved per byte, divided by idle time: the lowest leaves first."""
    seconds = recompute_seconds if recompute_seconds > 0 else DEFAULT_SECONDS_PER_BYTE * nbytes
    return seconds / max(nbytes, 1) / (1.0 + max(idle_seconds, 0.0))


@dataclass(frozen=True)
class Candidate:
    """A record in a tier, as eviction sees it. `markers` are keys that are deleted with it."""

    path: str
    tenant: str
    size: int
    used: float
    recompute_seconds: float
    pinned: bool
    markers: tuple[str, ...] = ()


class TierBudget:
    """Byte limits of one tier, in all and per tenant. Used by one writer thread.

    `survey` turns the tier's entries into candidates. `writers` processes may each keep a budget over one tier. None
    sees what the others write between two scans, so each scans again before its own writes since its last one reach
    `_FREE` / (writers - 1) of the limit: those of all others then stay within the `_FREE` that every budget leaves.
    Only records that are larger than such a share, written by several at the same instant, may pass it.
    """

    def __init__(
        self,
        tier: Tier,
        limit_bytes: int | None,
        tenant_limit_bytes: int | None,
        survey: Callable[[Tier, Iterable[Entry]], list[Candidate]],
        writers: int = 1,
    ) -> None:
        self.tier = tier
        self.evictions = 0
        self.nbytes = 0  # as last counted
        share = _FREE if writers > 1 else 0.0
        self._limit = None if limit_bytes is None else int((1 - share) * limit_bytes)
        self._tenant_limit = None if tenant_limit_bytes is None else int((1 - share) * tenant_limit_bytes)
        limits = [limit for limit in (limit_bytes, tenant_limit_bytes) if limit is not None]
        self._unseen = _FREE * min(limits, default=0) / max(1, writers - 1)  # bytes that may be written between scans
        self._survey = survey
        self._tenants: dict[str, int] = {}
        self._prices: dict[str | None, float] = {}  # by whose limit was passed; None: the tier's
        self._since_scan: int | None = None  # bytes written since the last scan; None: not scanned yet

    @property
    def is_bounded(self) -> bool:
        """True if the tier has a limit, and so is scanned."""
        return self._limit is not None or self._tenant_limit is not None

    def make_room(self, tenant: str, size: int) -> bool:
        """Evict until `size` more bytes of `tenant` fit.

        False if they cannot; then nothing should be written.

        Raises TierUnavailable if the tier cannot be listed or does not delete.
        """
        if self._limit is None and self._tenant_limit is None:
            return True
        fresh = self._since_scan is not None and self._since_scan + size <= self._unseen
        limits = [(self._tenant_limit, tenant), (self._limit, None)]  # what the tenant gives up is room for all
        if fresh and not any(self._excess(whose, size) for _, whose in limits):
            return True
        candidates = self._scan()
        for limit, whose in limits:
            excess = self._excess(whose, size)
            if limit is None or not excess:
                continue
            pool = [c for c in candidates if not c.pinned and (whose is None or c.tenant == whose)]
            if sum(c.size for c in pool) < excess:
                return False
            self._prices[whose] = self._evict(pool, excess + int(limit * (1 - LOW_WATER)))
            candidates = self._scan()
        return not any(self._excess(whose, size) for _, whose in limits)

    def price(self, tenant: str) -> float:
        """Admission threshold of a tenant's next record: `worth` of the best one evicted; 0 if room."""
        return max(self._prices.get(None, 0.0), self._prices.get(tenant, 0.0))

    def wrote(self, tenant: str, size: int) -> None:
        """Counts a write that happened."""
        self.nbytes += size
        self._tenants[tenant] = self._tenants.get(tenant, 0) + size
        self._since_scan = (self._since_scan or 0) + size

    def _held(self, whose: str | None) -> tuple[int, int | None]:
        """Bytes that are held, and the limit on them: a tenant's, or, for None, the whole tier's."""
        return (self.nbytes, self._limit) if whose is None else (self._tenants.get(whose, 0), self._tenant_limit)

    def _excess(self, whose: str | None, size: int) -> int:
        """Bytes by which a limit (see `_held`) would be passed with `size` more."""
        held, limit = self._held(whose)
        return 0 if limit is None else max(0, held + size - limit)

    def _scan(self) -> list[Candidate]:
        entries = list(self.tier.entries())
        candidates = self._survey(self.tier, entries)
        self.nbytes = sum(entry.size for entry in entries)
        self._tenants = {}
        for candidate in candidates:
            self._tenants[candidate.tenant] = self._tenants.get(candidate.tenant, 0) + candidate.size
        self._since_scan = 0
        for whose in list(self._prices):
            held, limit = self._held(whose)
            if limit is None or held < _ROOM * limit:
                del self._prices[whose]
        return candidates

    def _evict(self, pool: list[Candidate], target: int) -> float:
        """Evict the least worthy until `target` bytes are freed; returns the worth of the last one."""
        now, freed = time.time(), 0

        def order(c: Candidate) -> tuple[bool, float]:
            return not c.path.startswith(QUARANTINE), worth(c.recompute_seconds, c.size, now - c.used)

        chosen: list[Candidate] = []
        for candidate in sorted(pool, key=order):
            if freed >= target:
                break
            chosen.append(candidate)
            freed += candidate.size
        left = iter(chosen)
        while batch := list(islice(left, AT_ONCE)):  # of which another process may have been faster with some
            self.evictions += delete_records(self.tier, {one.path: one.markers for one in batch})
        logger.info("%s: evicted %d bytes", self.tier.name, freed)
        return worth(chosen[-1].recompute_seconds, chosen[-1].size, now - chosen[-1].used) if chosen else 0.0


def delete_records(tier: Tier, records: Mapping[str, Collection[str]]) -> int:
    """Delete records, and the markers of each after it: deleting by content must overlook none.

    A marker stays if its record is back: another process has put it meanwhile. Returns what `Tier.delete_all` does of
    the records. Raises TierUnavailable; then some may be left.

    Args:
        records: their markers by path.
    """
    went = tier.delete_all(records.keys())
    back = tier.stored(records.keys())
    tier.delete_all([key for path, markers in records.items() if path not in back for key in markers])
    return went
