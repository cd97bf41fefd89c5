"""The library's tiers as one: reads nearest first, writes to all, survives failing ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from kvstore.errors import BlobReplaced, CorruptRecord, TierUnavailable
from kvstore.records.format import decode
from kvstore.records.record import Record
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import QUARANTINE, Blob, Entry, Lifetime, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.eviction import Candidate, TierBudget
from kvstore.tiers.fsspec import FsspecTier
from kvstore.tiers.health import Breaker, Health
from kvstore.tiers.loading import Loading
from kvstore.tiers.paths import ORPHAN_SECONDS, Marker, content_prefix, marker_paths, path_of, sorted_out, tenant_digest
from kvstore.tiers.ray import RayTier, directory_name, ray_is_running

logger = logging.getLogger(__name__)

_MOST_QUESTIONS = 64  # to one tier at once: half of the threads that ask (see `prefill_workers.link.lookups`)


@dataclass(frozen=True)
class Found:
    """A record read from a tier, and its bytes."""

    record: Record
    encoded: pa.Buffer


@dataclass(frozen=True)
class Derived:
    """Records derived from a content id, their markers per tier, and the failure to list one."""

    records: set[str]
    markers: list[list[str]]
    failure: TierUnavailable | None


class TierStack:
    """All tiers of a library. Thread-safe for reading; a tier is written to by one thread.

    `pinned(key)`: whether a record is in use; `last_used()`: when memory answered for a path (a tier cannot see that).
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: LibrarySettings,
        pinned: Callable[[str], bool],
        last_used: Callable[[], dict[str, float]],
    ) -> None:
        self.tiers = tuple(tiers)
        self.counts: Counter[str] = Counter()
        named = {"object-store": settings.object_store_bytes, "remote": settings.remote_bytes}
        limits = [named.get(tier.name, settings.disk_bytes) for tier in self.tiers]
        self.budgets = [
            TierBudget(tier, limit, settings.tenant_bytes, self._survey, settings.writers)
            for tier, limit in zip(self.tiers, limits, strict=True)
        ]
        self._health = [
            Health(
                settings.tier_failures,
                settings.tier_cooldown_s,
                reads=settings.load_threads,
                questions=_MOST_QUESTIONS,
                patience_s=settings.load_timeout_s,
            )
            for _ in self.tiers
        ]
        self._pinned = pinned
        self._last_used = last_used
        self._lock = threading.Lock()
        self._readers, self._patience = settings.load_threads, settings.load_timeout_s
        self._hung: set[Loading] = set()  # a caller gave up on them; their reads go on

    @staticmethod
    def tiers_of(settings: LibrarySettings) -> list[Tier]:
        """The tiers that the settings describe, nearest first."""
        tiers: list[Tier] = []
        if settings.object_store_bytes and ray_is_running():
            tiers.append(shared := RayTier(directory_name(settings), settings.object_store_bytes))
            shared.start()
        if settings.directory is not None:
            tiers.append(DiskTier(settings.directory, durable=settings.durable))
        if settings.url is not None:
            remote = tier_for_url(settings.url, settings.storage_options, settings.durable)
            remote.name, remote.lifetime = "remote", Lifetime.STORE  # also of a directory that all nodes share
            tiers.append(remote)
        return tiers

    def working(self, index: int) -> int | None:
        """Index of this tier, or of the next one that is not suspended; None: there is none."""
        return next((i for i in range(index, len(self.tiers)) if not self._health[i].is_suspended), None)

    def is_stuck(self, loading: Loading) -> bool:
        """True if a load waits for a suspended tier."""
        return loading.tier is not None and self._health[loading.tier].is_suspended

    def hangs(self, loading: Loading) -> bool:
        """True if a load's read is overdue, or all threads it waits for are in such reads."""
        with self._lock:
            return loading in self._hung or sum(other.tier == loading.tier for other in self._hung) >= self._readers

    def read(self, loading: Loading, key: str, fingerprint: str, tenant: str, verify: bool) -> Found | None:
        """The record from the tier whose turn it is; None on a failure or without a sound copy.

        Unsound copies are quarantined.

        The load hears of layers as they come in (see `format.decode`), of an unsound copy's first ones too.
        """
        index, path = loading.begin(), loading.path

        def decoded(blob: Blob) -> Record:
            record = decode(
                blob.buffer,
                expect_key=key,
                expect_fingerprint=fingerprint,
                expect_tenant=tenant,
                verify=verify,
                read=blob.read,
                arrived=loading.arrived,
            )
            if path_of(record) != path:
                raise CorruptRecord("the record belongs in another place")
            return record

        tier = self.tiers[index]
        try:
            found = _read(tier, path, decoded)
            if not loading.is_late:  # a read that was late for a caller is no success
                self._health[index].reads.succeeded()
            if found is not None:
                self.touch(index, path)
            return found
        except TierUnavailable as error:
            self._failed(error, self._health[index].reads)
        except CorruptRecord as error:
            self._quarantine(tier, path, error)
        finally:
            with self._lock:
                hung = loading.end()
                self._hung.discard(loading)
            if hung:
                self._health[index].hung_read_ended()
        return None

    def touch(self, index: int, path: str) -> None:
        """Tell a tier that a record was used."""
        if self._health[index].is_suspended:
            return
        try:
            self.tiers[index].touch(path)
        except TierUnavailable as error:
            logger.debug("%s", error)

    def blame(self, loading: Loading) -> None:
        """Count a load's time-out against the tier that reads it, once for all callers.

        While it waited for its turn most of that time, against none.
        """
        with self._lock:
            given_up = loading.give_up(self._patience / 2)
            if given_up is None:
                return
            self._hung.add(loading)
        index, first = given_up
        if first:
            self._health[index].read_hangs()
            error = TierUnavailable(f"{self.tiers[index].name}: no answer in time for {loading.path}")
            self._failed(error, self._health[index].reads)

    def write(self, index: int, record: Record, pieces: Sequence[pa.Buffer]) -> bool:
        """Store the encoded record and its markers in a tier, if that works and has room.

        True if they are stored.
        """
        if not self._health[index].accepts_writes:
            self._count("dropped_writes")
            return False
        path, tenant = path_of(record), tenant_digest(record.tenant)
        note, markers = pa.py_buffer(path.encode()), marker_paths(record)
        size = sum(piece.size for piece in pieces) + len(markers) * note.size
        tier, budget = self.tiers[index], self.budgets[index]
        try:
            if not budget.make_room(tenant, size):
                logger.warning("%s: no room for %d bytes of %s", tier.name, size, path)
                self._count("dropped_writes")
                return False
            for marker in markers:
                tier.put(marker, [note])
            tier.put(path, pieces)
            budget.wrote(tenant, size)
            self._health[index].writes.succeeded()
            self._count("writes")
            return True
        except TierUnavailable as error:
            self._count("dropped_writes")
            self._failed(error, self._health[index].writes)
            return False

    def stored(self, left: Callable[[set[str]], Collection[str]]) -> tuple[set[str], bool]:
        """Paths that the tiers have, nearest first, each asked once; a failing one has none.

        `left`: of the paths that were found so far, which others are still wanted. Farther tiers are slower: they are
        asked for nothing that what was found makes needless. Also whether all that were to be asked have answered.
        """
        found: set[str] = set()
        certain = True
        for index, tier in enumerate(self.tiers):
            paths = left(found)
            if not paths:
                break
            self._blame_silence(index)
            health = self._health[index]
            question = None if health.is_suspended else health.questions.begin()
            if question is None:
                self._blame_silence(index)
                certain = False
                continue
            failure: TierUnavailable | None = None
            try:
                found |= tier.stored(paths)
            except TierUnavailable as error:
                found |= error.found
                certain, failure = False, error
            finally:
                in_time = health.questions.end(question)
            if not in_time:
                continue  # it was counted when it was late
            if failure is None:
                health.look_ups.succeeded()
            else:
                self._failed(failure, health.look_ups)
        return found, certain

    def in_reach(self, paths: Collection[str]) -> set[str]:
        """Paths that this node's disk or a store has.

        Object stores may have them on a node that is about to go.
        """
        found: set[str] = set()
        for tier in self.tiers:
            if isinstance(tier, RayTier):
                continue
            try:
                found |= tier.stored([path for path in paths if path not in found])
            except TierUnavailable as error:
                found |= error.found
        return found

    def _blame_silence(self, index: int) -> None:
        """Count each overdue look-up of a tier against it, once for all callers."""
        health = self._health[index]
        for _ in range(health.questions.late()):
            error = TierUnavailable(f"{self.tiers[index].name}: no answer in time to what it holds")
            self._failed(error, health.look_ups)

    def persisted(self, path: str) -> bool:
        """True if the farthest tier has the path; False if there is none, or it does not answer."""
        if not self.tiers or self._health[-1].is_suspended:
            return False
        try:
            return self.tiers[-1].contains(path)
        except TierUnavailable as error:
            self._failed(error, self._health[-1].look_ups)
            return False

    def price(self, tenant: str) -> float:
        """Admission threshold of the farthest tier for a tenant (see `TierBudget.price`)."""
        return self.budgets[-1].price(tenant_digest(tenant)) if self.budgets else 0.0

    def remove(self, path: str, markers: Collection[str] = ()) -> bool:
        """Delete a record from every tier, quarantined copies too, then its markers.

        Raises TierUnavailable after trying all.
        """
        removed, failure = False, None
        for tier in self.tiers:
            try:
                removed = _remove(tier, path) or removed
                if markers and not tier.stored([path]):
                    tier.delete_all(markers)
            except TierUnavailable as error:
                failure = error
        if failure is not None:
            raise failure
        return removed

    def sweep_markers(self) -> int:
        """See `Library.sweep_markers`."""
        deadline, swept = time.time() - ORPHAN_SECONDS, 0
        for budget in self.budgets:
            if not budget.is_bounded:
                _, orphans = sorted_out(budget.tier.entries())
                old = [orphan.key for orphan in orphans if orphan.used < deadline]
                budget.tier.delete_all(old)
                swept += len(old)
        return swept

    def quarantine(self, path: str) -> None:
        """Move a record aside in every tier that holds it, as far as that works."""
        for tier in self.tiers:
            self._quarantine(tier, path, CorruptRecord("what was computed from it is not finite"))

    def undo(self, index: int, path: str) -> None:
        """Delete a record from a tier as far as that works."""
        try:
            _remove(self.tiers[index], path)
        except TierUnavailable as error:
            logger.warning("could not undo the write of %s: %s", path, error)

    def derived_from(self, content: str, tenant: str) -> Derived:
        """Records derived from a content id, of those tiers that can be listed."""
        markers: list[list[str]] = []
        failure: TierUnavailable | None = None
        for tier in self.tiers:
            markers.append([])
            try:
                markers[-1] += tier.keys(content_prefix(content, tenant))
            except TierUnavailable as error:
                failure = error
        parsed = (Marker.parse(key) for keys in markers for key in keys)
        return Derived({marker.record for marker in parsed if marker is not None}, markers, failure)

    def remove_derived(self, derived: Derived, paths: Collection[str]) -> None:
        """Delete records from every tier, quarantined copies too, then their markers.

        Raises TierUnavailable after trying all tiers, also if one could not be listed: it may hold more.
        """
        failure = derived.failure
        records = [*paths, *(QUARANTINE + path for path in paths)]
        for tier, markers in zip(self.tiers, derived.markers, strict=True):
            try:
                tier.delete_all(records)
                tier.delete_all(markers)
            except TierUnavailable as error:
                failure = error
        if failure is not None:
            raise failure

    def count(self) -> Counter[str]:
        with self._lock:
            return Counter(self.counts)

    def _quarantine(self, tier: Tier, path: str, error: CorruptRecord) -> None:
        logger.warning("%s: quarantined %s: %s", tier.name, path, error)
        self._count("corrupt")
        try:
            if tier.quarantine(path):
                self._count("quarantined")
        except TierUnavailable as failure:
            logger.warning("could not quarantine: %s", failure)

    def _failed(self, error: TierUnavailable, breaker: Breaker) -> None:
        logger.warning("%s", error)
        self._count("tier_errors")
        breaker.failed()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _survey(self, tier: Tier, entries: Iterable[Entry]) -> list[Candidate]:
        """Records for eviction, with their cost from the markers; sweeps orphaned markers."""
        used = self._last_used()
        records, orphans = sorted_out(entries)
        deadline = time.time() - ORPHAN_SECONDS
        tier.delete_all([orphan.key for orphan in orphans if orphan.used < deadline])
        return [
            Candidate(
                path=entry.key,
                tenant=path.tenant,
                size=entry.size + len(markers) * len(entry.key.encode()),
                used=max(entry.used, used.get(entry.key, 0.0)),
                recompute_seconds=recompute_seconds,
                pinned=self._pinned(path.key),
                markers=markers,
            )
            for entry, path, markers, recompute_seconds in records
        ]


def _remove(tier: Tier, path: str) -> bool:
    """Delete a record and its quarantined copy. True if there was either."""
    return any([tier.delete(key) for key in (path, QUARANTINE + path)])


def _read(tier: Tier, path: str, decoded: Callable[[Blob], Record]) -> Found | None:
    blob = tier.open(path)
    if blob is None:
        return None
    try:
        return Found(decoded(blob), blob.buffer)
    except BlobReplaced:
        whole = tier.get(path)
        return None if whole is None else Found(decoded(Blob(whole)), whole)


def tier_for_url(url: str, storage_options: Mapping[str, Any] | None = None, durable: bool = True) -> Tier:
    """The tier for a URL: DiskTier for `file:` and plain paths, S3Tier for `s3://`, else fsspec."""
    if "://" not in url and not url.startswith("file:"):
        return DiskTier(url, durable=durable)  # not parsed: its name may hold what has a meaning in URLs
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DiskTier(unquote(parts.path), durable=durable)
    if parts.scheme in ("s3", "s3a"):
        from kvstore.tiers.s3 import S3Tier  # its client takes long to import

        return S3Tier(url, storage_options)
    return FsspecTier(url, storage_options)
