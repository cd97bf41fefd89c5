"""The library: canonicals, patches and embeddings of one model, over memory and tiers.

| call | blocks on | effect |
|---|---|---|
| get_canonical, get_patch, ... | a tier, at most load_timeout_s | memory, then the tiers |
| get_session | a tier, at most load_timeout_s | the tiers, then memory |
| load | nothing | the same as a Loading, for loading beside compute |
| wait | a tier, at most load_timeout_s, or until a time | what a Loading gives |
| put | nothing | memory now, tiers behind the request |
| has | a tier, at most load_timeout_s | looks without loading |
| stored, look_up | a tier | the same for many |
| is_resident | nothing | looks in memory alone |
| persisted | a tier | looks in the farthest tier alone |
| pin | nothing | the keys stay in memory and on disk while the block runs |
| delete, delete_content | every tier | removes everywhere, also what is queued |
| quarantine | every tier | moves aside everywhere |
| flush, close | the queues | persists what is queued |
| outlived, in_reach | memory; tiers | for `kvstore.hand_over` |
| leave_node | the object stores | what lies on this node goes to others |

A tier that fails, is slow, or returns damaged bytes costs a miss, never an error: damaged records are moved aside and
counted. Records are shared by all readers: never write to a tensor that came from here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from kvstore.catalog.inventory import checked
from kvstore.deletions import Deletions, derives
from kvstore.errors import StoreError, TierUnavailable
from kvstore.memory_cache import MemoryCache
from kvstore.pins import Pins
from kvstore.records.format import is_finite
from kvstore.records.record import (
    BasisRecord,
    CanonicalRecord,
    EmbeddingRecord,
    PatchRecord,
    Record,
    RecordKind,
    SegmentRecord,
    SessionRecord,
)
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Entry, Lifetime, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.loading import Loading
from kvstore.tiers.paths import kind_prefix, marker_paths, path_of, record_path
from kvstore.tiers.stack import Found, TierStack
from kvstore.tiers.write_queues import WriteQueues

logger = logging.getLogger(__name__)

_BASIS_WAIT_S = 60.0

Place = tuple[str, str]  # a record: its key, its owner


@dataclass(frozen=True)
class LibraryStats:
    """Counts since the library was opened, and bytes now."""

    hits: int  # memory_hits + tier_hits
    memory_hits: int
    tier_hits: int
    misses: int
    timeouts: int  # answered with a miss; counted as hit or miss above once the load ends
    corrupt: int
    quarantined: int
    tier_errors: int
    writes: int  # per tier
    dropped_writes: int  # per tier; not persisted: queue full, tier full or failing
    evictions: int
    bytes: int  # of decoded records in memory
    tier_bytes: dict[str, int]  # per tier, as last counted
    loads: int  # from tiers
    load_ms: float  # spent in reads that found a record, in all
    loaded_bytes: int  # by these


class Library:
    """Records of one model, in memory and in tiers. Thread-safe.

    `fingerprint` names the model and its processor settings; records of another are never returned.
    """

    def __init__(
        self,
        settings: LibrarySettings,
        fingerprint: str,
        tiers: Sequence[Tier] | None = None,
        deletions: Deletions | None = None,
    ) -> None:
        """Open the library.

        `tiers`, nearest first, replaces the ones that the settings describe; `deletions`: known already, and shared
        with other caches of derived data.
        """
        self.settings = settings
        self.fingerprint = fingerprint
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._load_ms = 0.0
        self._pins = Pins()
        self._deletions = Deletions(settings.deletion_grace_s) if deletions is None else deletions
        self._loading: dict[str, list[Loading]] = {}  # under way, the latest last
        self._hot = MemoryCache(settings.memory_bytes, settings.tenant_memory_bytes, self._is_pinned, self._announce)
        tiers = TierStack.tiers_of(settings) if tiers is None else tiers
        self._stack = TierStack(tiers, settings, self._is_pinned, self._hot.last_used)
        self._writes = WriteQueues(self._stack, settings, self._deletions, self._hot.persisted)
        self._loads = [  # one per tier: loads that wait for a silent one do not block the others
            ThreadPoolExecutor(settings.load_threads, thread_name_prefix=f"kvstore-load-{tier.name}")
            for tier in self._stack.tiers
        ]
        self._look_ups = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="kvstore-look-up")

    # Reading

    def get_canonical(self, key: str, tenant: str) -> CanonicalRecord | None:
        """KV(B|∅), or None: absent, another tenant's, damaged or too slow to load."""
        return cast(CanonicalRecord | None, self._get("canonical", key, tenant))

    def get_patch(self, key: str, tenant: str) -> PatchRecord | None:
        """A patch, or None, as `get_canonical`."""
        return cast(PatchRecord | None, self._get("patch", key, tenant))

    def get_embedding(self, key: str, tenant: str) -> EmbeddingRecord | None:
        """A chunk's vision embeddings, or None, as `get_canonical`."""
        return cast(EmbeddingRecord | None, self._get("embedding", key, tenant))

    def get_basis(self, version: str) -> BasisRecord | None:
        """A shared basis of this model, or None, as `get_canonical`.

        It may take _BASIS_WAIT_S: no request waits.
        """
        loading = self.load("basis", version, "")
        return cast(BasisRecord | None, self.wait(loading, time.monotonic() + _BASIS_WAIT_S))

    def get_segment(self, key: str, tenant: str) -> SegmentRecord | None:
        """Conditioned KV of a session's segment, or None, as `get_canonical`."""
        return cast(SegmentRecord | None, self._get("segment", key, tenant))

    def get_session(self, key: str, tenant: str) -> SessionRecord | None:
        """A session's manifest, or None, as `get_canonical`; the tiers' before memory's.

        Manifests alone are replaced: another process may have gone on with the session.
        """
        found = self.wait(self.load("session", key, tenant, past_memory=True))
        if found is None:
            found = self._resident(record_path("session", key, self.fingerprint, tenant))
        return cast(SessionRecord | None, found)

    def load(self, kind: RecordKind, key: str, tenant: str, *, past_memory: bool = False) -> Loading:
        """Start loading and return at once; loads of one record share one read.

        `past_memory`: take what the tiers have, or are about to be given.
        """
        path = record_path(kind, key, self.fingerprint, tenant)
        with self._lock:
            resident = self._writes.pending(path) if past_memory else self._resident(path)
            if resident is not None:  # first: it may have been put while a tier hangs
                self._counts["memory_hits"] += 1
                loading = Loading(path)
                loading.set_result(resident)
                return loading
            under_way = self._joinable(path)
            loading = Loading(path) if under_way is None else under_way
            if under_way is None:
                self._loading.setdefault(path, []).append(loading)
        loading.add_done_callback(self._count_loaded)
        if under_way is None:
            self._load_from(0, loading, key, tenant)
        return loading

    def wait(self, loading: Loading, until: float | None = None) -> Record | None:
        """The record that a load brings; None if nothing is stored, or it did not come in time.

        `until` (`time.monotonic`): how long to wait; None: load_timeout_s from now. A load that is known to hang is not
        waited for.
        """
        left = self.settings.load_timeout_s if until is None else max(0.0, until - time.monotonic())
        hangs = self._stack.hangs(loading)
        try:
            return loading.result(0.0 if hangs else left)
        except TimeoutError:
            if not hangs:  # else the tier was blamed for it before
                self._stack.blame(loading)
            with self._lock:
                self._counts["timeouts"] += 1
            return None

    def is_resident(self, kind: RecordKind, key: str, tenant: str) -> bool:
        """True if a record is in memory; asks no tier."""
        return self._resident(record_path(kind, key, self.fingerprint, tenant)) is not None

    def has(self, kind: RecordKind, key: str, tenant: str) -> bool:
        """True if a record exists; does not load it.

        Of a tier that fails, or takes too long, none does.
        """
        if self.is_resident(kind, key, tenant):
            return True
        looking = self._look_ups.submit(self.stored, kind, [(key, tenant)])
        try:
            return bool(looking.result(self.settings.load_timeout_s))
        except TimeoutError:
            looking.cancel()
            with self._lock:
                self._counts["timeouts"] += 1
            return False

    def stored(self, kind: RecordKind, places: Iterable[Place]) -> set[Place]:
        """The (key, tenant) pairs under which a record exists; every tier is asked at most once."""
        return self.look_up(kind, places)[0]

    def look_up(
        self,
        kind: RecordKind,
        places: Iterable[Place],
        wanted: Callable[[set[Place]], Iterable[Place]] | None = None,
    ) -> tuple[set[Place], bool]:
        """`stored`, and whether every tier concerned has answered: if not, more may be stored.

        `wanted`: of what was found so far, what is of interest still; None: all. Memory is asked first.
        """
        paths = {(key, tenant): record_path(kind, key, self.fingerprint, tenant) for key, tenant in places}
        resident = {place for place, path in paths.items() if self._resident(path) is not None}

        def found(elsewhere: set[str]) -> set[Place]:
            return resident | {place for place, path in paths.items() if path in elsewhere}

        def left(elsewhere: set[str]) -> list[str]:
            known = found(elsewhere)
            return [paths[place] for place in (paths if wanted is None else wanted(known)) if place not in known]

        elsewhere, certain = self._stack.stored(left)
        return found(elsewhere), certain

    def persisted(self, kind: RecordKind, key: str, tenant: str) -> bool:
        """True if the farthest tier, the one that all nodes share, holds a record.

        False if it does not answer.
        """
        return self._stack.persisted(record_path(kind, key, self.fingerprint, tenant))

    def price(self, tenant: str) -> float:
        """Admission threshold [s saved / (s·byte)] of a tenant's next record.

        The score (`eviction.worth`) of the best record that this process evicted from the farthest tier for lack of
        room; 0 while there is room.
        """
        return self._stack.price(tenant)

    def hot(self, limit: int) -> list[CanonicalRecord]:
        """At most `limit` chunks' canonical KV in memory, latest use first; reading it is no use."""
        records = self._hot.latest(lambda record: isinstance(record, CanonicalRecord), limit)
        return [record for record in records if isinstance(record, CanonicalRecord)]

    @property
    def disk(self) -> DiskTier | None:
        """The directory tier, if there is one."""
        return next((tier for tier in self._stack.tiers if isinstance(tier, DiskTier)), None)

    @property
    def hot_version(self) -> int:
        """Counter of changes: grows whenever memory gains or loses a record."""
        return self._hot.version

    # Writing

    def put(self, record: Record, idle_s: float | None = None) -> None:
        """Keep a record in memory now and in the tiers soon.

        It replaces what is there under its key. Its tensors must not change afterwards.

        Args:
            idle_s: seconds since another process used it last; None: it is used now.

        Raises:
            StoreError: the record is of another model than this library's, or holds numbers that are not finite.
            InvalidKey: for a malformed key.
        """
        if record.fingerprint != self.fingerprint:
            raise StoreError("the record's model fingerprint is not this library's")
        if not is_finite(record):
            raise StoreError(f"{path_of(record)} holds numbers that are not finite")
        path = path_of(record)
        with self._lock:  # a deletion begins before or after
            if self._deletions.covers(record):
                return
            self._hot.put(path, record, idle_s)
            for loading in self._loading.get(path, ()):
                loading.dropped = True  # what it finds is older; its waiters get it all the same
            refused = self._writes.submit(path, record, record.nbytes, len(self._stack.tiers))
            self._counts["dropped_writes"] += len(refused)
        if refused:
            logger.warning("write queue full: %s is not written to %s", path, ", ".join(refused))

    def outlived(self, lifetime: Lifetime) -> list[tuple[Record, float]]:
        """Records in memory that no tier of at least that lifetime has, as far as is known here.

        Each with the seconds since its last use. What a tier has evicted since counts as there.
        """
        return self._hot.outlived(lifetime)

    def in_reach(self, paths: Collection[str]) -> set[str]:
        """Paths whose records stay within this process' reach, whichever other node goes."""
        resident = {path for path in paths if self._resident(path) is not None}
        return resident | self._stack.in_reach([path for path in paths if path not in resident])

    def leave_node(self, nodes: Sequence[str], until: float) -> None:
        """Have other nodes keep what the tiers hold on this one (`Tier.leave`); best effort."""
        for tier in self._stack.tiers:
            try:
                moved, left = tier.leave(nodes, until)
            except TierUnavailable as error:
                logger.warning("%s", error)
                continue
            if moved or left:
                logger.info("%s: %d blobs were moved to other nodes, %d let go of", tier.name, moved, left)

    @contextmanager
    def pin(self, keys: Iterable[str]) -> Iterator[None]:
        """Protect records, by key, from eviction by this process while the block runs. Pins nest.

        Leaving the block takes no lock: a finalizer may do it.
        """
        pinned = list(keys)
        self._pins.hold(pinned)
        try:
            yield
        finally:
            self._pins.release(pinned)

    def delete(self, kind: RecordKind, key: str, tenant: str) -> bool:
        """Remove a record everywhere. True if it was anywhere.

        Raises TierUnavailable if a tier cannot be reached.
        """
        return self._delete(record_path(kind, key, self.fingerprint, tenant))

    def delete_content(self, content: str, tenant: str) -> int:
        """Remove all records derived from a content id or conditioned on it, of every model.

        A reference's content (see `kvstore.records.keys.is_shared`) takes every tenant's records with it. For
        `deletion_grace_s` this process keeps nothing that still derives from the content.
        Returns of how many records it knew. Memory of other processes is not reached: call it in each of them. Raises
        TierUnavailable if a tier cannot be reached, after all that can be are rid of them; call it again then.
        """

        def derived(record: Record) -> bool:
            return derives(record, content, tenant)

        with self._lock:  # what was let in before is found below
            self._deletions.note(content, tenant)
        paths = set(self._hot.matching(derived))
        paths.update(self._writes.matching(derived))
        for path in paths:
            self._forget(path)
        stored = self._stack.derived_from(content, tenant)
        for path in stored.records - paths:
            self._forget(path)
        paths |= stored.records
        for path in paths:
            self._writes.settle(path)
        self._stack.remove_derived(stored, paths)
        return len(paths)

    def listed(self, kind: RecordKind) -> list[Entry]:
        """Persisted records of a kind, of all tenants; each once, with its latest use.

        For housekeeping: all tiers are listed. Raises TierUnavailable if one cannot be.
        """
        latest: dict[str, Entry] = {}
        for tier in self._stack.tiers:
            for entry in tier.entries(kind_prefix(self.fingerprint, kind)):
                known = latest.get(entry.key)
                latest[entry.key] = entry if known is None or known.used < entry.used else known
        return list(latest.values())

    def read_listed(self, path: str) -> Record | None:
        """A record by its path, from the first tier that has it; None if it is gone.

        Raises CorruptRecord, or TierUnavailable.
        """
        for tier in self._stack.tiers:
            buffer = tier.get(path)
            if buffer is not None:
                return checked(buffer, path)
        return None

    def delete_listed(self, path: str) -> bool:
        """As `delete`, by the record's path."""
        return self._delete(path)

    def sweep_markers(self) -> int:
        """Delete old markers without a record from tiers without a limit.

        Nothing else scans these. Lists them. Returns how many went. Raises TierUnavailable.
        """
        return self._stack.sweep_markers()

    def quarantine(self, kind: RecordKind, key: str, tenant: str) -> None:
        """Move a record aside in every tier: what was computed from it is wrong."""
        path = record_path(kind, key, self.fingerprint, tenant)
        self._forget(path)
        self._writes.settle(path)
        self._stack.quarantine(path)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is persisted.

        False if `timeout` seconds were not enough.
        """
        return self._writes.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> None:
        """Persist the queued writes, as far as `timeout` seconds allow, and stop the threads."""
        self._writes.close(timeout)
        for pool in (*self._loads, self._look_ups):
            pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> LibraryStats:
        """Counts and bytes, consistent enough for metrics."""
        with self._lock:
            own, load_ms = Counter(self._counts), self._load_ms
        tiers = self._stack.count()
        return LibraryStats(
            hits=own["memory_hits"] + own["tier_hits"],
            memory_hits=own["memory_hits"],
            tier_hits=own["tier_hits"],
            misses=own["misses"],
            timeouts=own["timeouts"],
            corrupt=tiers["corrupt"],
            quarantined=tiers["quarantined"],
            tier_errors=tiers["tier_errors"],
            writes=tiers["writes"],
            dropped_writes=own["dropped_writes"] + tiers["dropped_writes"] + self._writes.failures,
            evictions=self._hot.evictions + sum(budget.evictions for budget in self._stack.budgets),
            bytes=self._hot.nbytes,
            tier_bytes={budget.tier.name: budget.nbytes for budget in self._stack.budgets},
            loads=own["loads"],
            load_ms=load_ms,
            loaded_bytes=own["loaded_bytes"],
        )

    # Inside

    def _is_pinned(self, key: str) -> bool:
        return key in self._pins

    def _announce(self, path: str) -> None:
        with suppress(RuntimeError):  # the library is closed
            for index, pool in enumerate(self._loads):
                pool.submit(self._stack.touch, index, path)

    def _resident(self, path: str) -> Record | None:
        """The record if memory has it: in the cache, or still waiting to be written."""
        record = self._hot.get(path)
        return self._writes.pending(path) if record is None else record

    def _get(self, kind: RecordKind, key: str, tenant: str) -> Record | None:
        return self.wait(self.load(kind, key, tenant))

    def _joinable(self, path: str) -> Loading | None:
        """The load under way to share; None if it is stuck, or ever was: read past that tier."""
        latest = self._loading[path][-1] if path in self._loading else None
        if latest is not None and not latest.passed:
            latest.passed = self._stack.is_stuck(latest)
        return None if latest is None or latest.passed else latest

    def _count_loaded(self, future: Future[Record | None]) -> None:
        with self._lock:
            self._counts["misses" if future.result() is None else "tier_hits"] += 1

    def _load_from(self, index: int, loading: Loading, key: str, tenant: str) -> None:
        """Queue the read with the first working tier from `index` on; a miss without any."""
        working = self._stack.working(index)
        if working is not None:
            with suppress(RuntimeError):  # the library is closed
                loading.queue(working)
                self._loads[working].submit(self._load, working, loading, key, tenant)
                return
        self._loaded(loading, None, 0)

    def _load(self, index: int, loading: Loading, key: str, tenant: str) -> None:
        """Read from one tier, and on a miss from the next; runs in the tier's pool."""
        if self._stack.is_stuck(loading):  # suspended since the load was queued
            self._load_from(index, loading, key, tenant)
            return
        started = time.perf_counter()
        found = None
        try:
            found = self._stack.read(loading, key, self.fingerprint, tenant, self.settings.verify)
        except Exception:  # whatever went wrong, the request computes instead
            logger.exception("could not load %s", loading.path)
        if found is None:
            self._load_from(index + 1, loading, key, tenant)
            return
        with self._lock:
            self._load_ms += (time.perf_counter() - started) * 1e3
        self._loaded(loading, found, index)

    def _loaded(self, loading: Loading, found: Found | None, index: int) -> None:
        """Resolve the load; what a tier had goes to memory and to the tiers that are nearer."""
        path = loading.path
        with self._lock:
            self._counts["loads"] += 1
            self._counts["loaded_bytes"] += 0 if found is None else found.encoded.size
            # A deletion or a put drops the load: what it found must not come into memory or nearer tiers. A load that
            # begins later may find it all the same, in a tier that the deletion has not come to yet.
            deleted = found is not None and self._deletions.covers(found.record)
            self._ended(loading)
            if found is not None and not (deleted or loading.dropped):
                self._hot.put(path, found.record)
                self._hot.persisted(path, found.record, self._stack.tiers[index].lifetime)
                if index:
                    refused = self._writes.submit(path, found.record, found.encoded.size, index, found.encoded)
                    if refused:
                        logger.info("write queue full: %s is not copied to %s", path, ", ".join(refused))
        loading.set_result(None if found is None or deleted else found.record)

    def _ended(self, loading: Loading) -> None:
        under_way = self._loading.get(loading.path, [])
        if loading in under_way:  # else it was dropped by a deletion
            under_way.remove(loading)
            if not under_way:
                del self._loading[loading.path]

    def _forget(self, path: str) -> bool:
        """Remove a record from memory and from the queues."""
        with self._lock:
            for loading in self._loading.pop(path, ()):
                loading.dropped = True
            in_memory = self._hot.remove(path)
        return self._writes.cancel(path) or in_memory

    def _delete(self, path: str) -> bool:
        record = self._resident(path)
        forgotten = self._forget(path)
        self._writes.settle(path)
        return self._stack.remove(path, () if record is None else marker_paths(record)) or forgotten
