"""Operations on one tier's records for operators: list, inspect, verify, tidy up.

Everything works from outside, on any tier, beside a running service: a record that was read stays readable after its
file is gone, and one that vanishes while it is looked at was evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from kvstore.errors import CorruptRecord
from kvstore.records.format import decode, layer_checks, read_metadata
from kvstore.records.record import Record
from kvstore.tiers.base import QUARANTINE, Entry, Tier
from kvstore.tiers.eviction import AT_ONCE, delete_records, worth
from kvstore.tiers.paths import ORPHAN_SECONDS, Marker, content_prefix, record_path, sorted_out

_SOUND = "sound"
_READERS = 8  # records read at once: their checksums use the other cores, an object store's latency overlaps
Advance = Callable[[int], None]  # told the bytes of each record that is done with


@dataclass(frozen=True)
class Item:
    """A record as a listing shows it.

    `tenant` and `fingerprint` are digests, `used` is in Unix seconds.
    """

    path: str
    kind: str
    tenant: str
    fingerprint: str
    key: str
    size: int
    used: float
    quarantined: bool
    recompute_seconds: float = 0.0
    markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """A tier's records, and the markers that have no record."""

    items: tuple[Item, ...]
    orphans: tuple[Entry, ...]


@dataclass(frozen=True)
class Selection:
    """Filter of records; None selects all.

    `fingerprint` is a digest, `key` a key's beginning.

    `tenants`: digests, any of which is meant.
    """

    tenants: Collection[str] | None = None
    kind: str | None = None
    fingerprint: str | None = None
    key: str | None = None

    def of(self, items: Iterable[Item]) -> list[Item]:
        """The selected ones."""
        return [item for item in items if self._selects(item)]

    def _selects(self, item: Item) -> bool:
        return (
            (self.tenants is None or item.tenant in self.tenants)
            and self.kind in (None, item.kind)
            and self.fingerprint in (None, item.fingerprint)
            and item.key.startswith(self.key or "")
        )


@dataclass(frozen=True)
class Verified:
    """Result of reading every record. `vanished` records were deleted meanwhile."""

    sound: int
    vanished: int
    corrupt: tuple[tuple[Item, str], ...]  # and what is wrong with each


@dataclass(frozen=True)
class Removal:
    """A record or marker to delete, and why. `markers` go with it."""

    path: str
    size: int
    reason: str
    markers: tuple[str, ...] = ()


def contents(tier: Tier) -> Contents:
    """A tier's records and orphaned markers, from its listing alone. Raises TierUnavailable."""
    records, orphans = sorted_out(tier.entries())
    items = [
        Item(
            path=entry.key,
            kind=path.kind,
            tenant=path.tenant,
            fingerprint=path.fingerprint,
            key=path.key,
            size=entry.size,
            used=entry.used,
            quarantined=path.quarantined,
            recompute_seconds=recompute_seconds,
            markers=markers,
        )
        for entry, path, markers, recompute_seconds in records
    ]
    return Contents(tuple(items), tuple(orphans))


def inspect(tier: Tier, item: Item) -> dict[str, Any] | None:
    """A record's metadata and the state of each layer's checksum; None if it vanished.

    Raises CorruptRecord if its frame is damaged, so that nothing it says can be believed.
    """
    buffer = tier.get(item.path)
    if buffer is None:
        return None
    document = read_metadata(buffer)
    layers = [{"layer": i, "blake3": digest, "sound": sound} for i, (digest, sound) in enumerate(layer_checks(buffer))]
    del document["digests"]
    return {"path": item.path, "size": item.size, "used": item.used, **document, "layers": layers}


def checked(buffer: pa.Buffer | bytes, path: str) -> Record:
    """The record in `buffer`, every byte of it verified, and that `path` is its place.

    Raises CorruptRecord.
    """
    document = read_metadata(buffer)
    try:
        key, fingerprint, tenant = document["key"], document["fingerprint"], document["tenant"]
        place = record_path(document["kind"], key, fingerprint, tenant)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"the record's metadata is inconsistent: {error}") from error
    if place != path:
        raise CorruptRecord("the record lies in another record's place")
    return decode(buffer, expect_key=key, expect_fingerprint=fingerprint, expect_tenant=tenant)


def verify(
    tier: Tier, items: Sequence[Item], quarantine: bool = False, advance: Advance = lambda size: None
) -> Verified:
    """Read records and check every byte; quarantine corrupt ones if told to.

    Raises TierUnavailable.
    """

    def state(item: Item) -> str | None:
        """The defect of a record; `_SOUND`; None if it has vanished."""
        buffer = tier.get(item.path)
        if buffer is None:
            return None
        try:
            checked(buffer, item.path)
        except CorruptRecord as error:
            return str(error)
        return _SOUND

    sound = vanished = 0
    corrupt: list[tuple[Item, str]] = []
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kvstore-verify") as pool:
        for item, found in zip(items, pool.map(state, items), strict=True):
            if found is None:
                vanished += 1
            elif found is _SOUND:
                sound += 1
            else:
                corrupt.append((item, found))
                if quarantine:
                    tier.quarantine(item.path)
            advance(item.size)
    return Verified(sound, vanished, tuple(corrupt))


def garbage(
    found: Contents,
    *,
    fingerprint: str | None = None,
    unused_seconds: float | None = None,
    max_bytes: int | None = None,
    indices: Collection[str] = (),
) -> list[Removal]:
    """Records to delete: quarantined ones and orphaned markers always, the rest on request.

    Args:
        fingerprint: digest of the model to keep; records of any other go.
        unused_seconds: records that lay idle for longer go, but for bases: these are read at start-up alone, and all
            patches on one need it.
        max_bytes: the least worthy records go (as eviction weighs them) until the others fit; no basis does.
        indices: paths of files' index records. They go with their files alone: retrievers read them at start-up, and
            they are of an embedder, not of the model.
    """
    now = time.time()
    removals = [
        Removal(entry.key, entry.size, "orphaned marker")
        for entry in found.orphans
        if entry.used < now - ORPHAN_SECONDS
    ]
    kept: list[Item] = []
    lasting = {item.path for item in found.items if item.kind == "basis"}.union(indices)
    for item in found.items:
        if item.quarantined:
            reason = "quarantined"
        elif fingerprint is not None and item.fingerprint != fingerprint and item.path not in indices:
            reason = "of another model"
        elif unused_seconds is not None and item.path not in lasting and item.used < now - unused_seconds:
            reason = "unused"
        else:
            kept.append(item)
            continue
        removals.append(_removal(item, reason))
    excess = 0 if max_bytes is None else sum(item.size for item in kept) - max_bytes
    others = [item for item in kept if item.path not in lasting]
    for item in sorted(others, key=lambda i: worth(i.recompute_seconds, i.size, now - i.used)):
        if excess <= 0:
            break
        removals.append(_removal(item, "least worthy"))
        excess -= item.size
    return removals


def index_paths(tier: Tier, found: Contents, model: str | None) -> set[str]:
    """Paths of files' index records (`kvstore.search.record`).

    Args:
        model: digest of a model whose embeddings are those of images, and need not be read; None: not known.

    Raises:
        TierUnavailable.
    """
    paths = set()
    for item in found.items:
        if item.kind == "embedding" and item.fingerprint != model and not item.quarantined:
            with suppress(CorruptRecord):
                buffer = tier.get(item.path)
                if buffer is not None and is_index(buffer):
                    paths.add(item.path)
    return paths


def is_index(buffer: pa.Buffer | bytes) -> bool:
    """True for a file's index record. Raises CorruptRecord."""
    return "counts" in read_metadata(buffer)["meta"]


def derived_from(tier: Tier, found: Contents, content: str, owner: str, reason: str) -> list[Removal]:
    """The records that were derived from a content id or conditioned on it.

    Raises TierUnavailable.
    """
    markers = (Marker.parse(key) for key in tier.keys(content_prefix(content, owner)))
    paths = {marker.record for marker in markers if marker is not None}
    paths |= {QUARANTINE + path for path in paths}
    return [_removal(item, reason) for item in found.items if item.path in paths]


def remove(tier: Tier, removals: Iterable[Removal], advance: Advance = lambda size: None) -> None:
    """Delete records with their markers. Raises TierUnavailable."""
    left = iter(removals)
    while batch := list(islice(left, AT_ONCE)):
        delete_records(tier, {removal.path: removal.markers for removal in batch})
        advance(sum(removal.size for removal in batch))


def _removal(item: Item, reason: str) -> Removal:
    return Removal(item.path, item.size, reason, item.markers)
