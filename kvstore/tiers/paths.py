"""Paths of records and markers inside a tier.

    records/<fingerprint>/<kind>/<tenant>/<first two digits of key>/<key>.arrow     a record
    by-content/<owner>/<content id>/<fingerprint>.<kind>.[<tenant>.]<key>.<milliseconds>    a marker, see below
    quarantine/<path>                                                              a record that failed its checks

Fingerprint, tenant and owner appear as digests. A marker says that a record was derived from a content id and what a
miss would cost; it is written before its record, so that deleting by content never overlooks one, and both eviction
and deletion work from a listing alone, without opening files. It lies with the owner of the content, which for a
reference is the dynamic library, and names the record's tenant if that is another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from kvstore.errors import InvalidKey
from kvstore.records.keys import owner_of
from kvstore.records.record import Record, RecordKind, kind_of
from kvstore.tiers.base import QUARANTINE, Entry

RECORDS = "records/"
MARKERS = "by-content/"
ORPHAN_SECONDS = 3600.0  # what is missing its other half may be half written; not after this long
_HEX64 = re.compile(r"[0-9a-f]{64}")
_RECORD = re.compile(
    r"(?P<quarantine>quarantine/)?records/(?P<fingerprint>[0-9a-f]{16})/(?P<kind>\w+)/(?P<tenant>[0-9a-f]{32})"
    r"/[0-9a-f]{2}/(?P<key>[0-9a-f]{64})\.arrow"
)
_MARKER = re.compile(
    r"by-content/([0-9a-f]{32})/[0-9a-f]{64}/([0-9a-f]{16})\.(\w+)\.(?:([0-9a-f]{32})\.)?([0-9a-f]{64})\.(\d+)"
)


def tenant_digest(tenant: str) -> str:
    """A tenant's name inside a tier: 32 hex digits, whatever characters the name has."""
    return blake3(tenant.encode(), derive_key_context="orbitserve 2026 tenant v1").hexdigest()[:32]


def fingerprint_digest(fingerprint: str) -> str:
    return blake3(fingerprint.encode(), derive_key_context="orbitserve 2026 fingerprint v1").hexdigest()[:16]


def _content_digest(content: str) -> str:
    return content if _HEX64.fullmatch(content) else blake3(content.encode()).hexdigest()


def record_path(kind: RecordKind, key: str, fingerprint: str, tenant: str) -> str:
    """Path of a record. Raises InvalidKey unless `key` is 64 hex digits."""
    if not _HEX64.fullmatch(key):
        raise InvalidKey(f"a record's key is 64 hex digits, not {key!r}")
    return f"{RECORDS}{fingerprint_digest(fingerprint)}/{kind}/{tenant_digest(tenant)}/{key[:2]}/{key}.arrow"


def kind_prefix(fingerprint: str, kind: RecordKind) -> str:
    """Common prefix of the paths of a model's records of a kind."""
    return f"{RECORDS}{fingerprint_digest(fingerprint)}/{kind}/"


def patches_prefix(fingerprint: str) -> str:
    """Common prefix of the paths of a model's patches."""
    return kind_prefix(fingerprint, "patch")


def path_of(record: Record) -> str:
    return record_path(kind_of(record), record.key, record.fingerprint, record.tenant)


def marker_paths(record: Record) -> list[str]:
    """Markers of a record: one for its content and one for each content it was conditioned on."""
    contents = dict.fromkeys(content for content in (record.content, *record.antecedents) if content)
    derived = f"{fingerprint_digest(record.fingerprint)}.{kind_of(record)}"
    name = f"{record.key}.{round(record.recompute_seconds * 1000)}"
    paths = []
    for content in contents:
        foreign = owner_of(record.tenant, content) != record.tenant
        whose = f"{tenant_digest(record.tenant)}." if foreign else ""
        paths.append(f"{content_prefix(content, record.tenant)}{derived}.{whose}{name}")
    return paths


def content_prefix(content: str, tenant: str) -> str:
    """Common prefix of a content id's markers; a reference's lie together, for all tenants."""
    return f"{MARKERS}{tenant_digest(owner_of(tenant, content))}/{_content_digest(content)}/"


@dataclass(frozen=True)
class RecordPath:
    """Fields of a record's path; fingerprint and tenant are digests."""

    fingerprint: str
    kind: str
    tenant: str
    key: str
    quarantined: bool

    @classmethod
    def parse(cls, path: str) -> RecordPath | None:
        """Fields of a record's path, quarantined or not; None if `path` is not a record's."""
        match = _RECORD.fullmatch(path)
        if match is None:
            return None
        return cls(
            **{name: match[name] for name in ("fingerprint", "kind", "tenant", "key")}, quarantined=bool(match[1])
        )


@dataclass(frozen=True)
class Marker:
    """Fields of a marker's path: the record it stands for and the seconds a miss would cost."""

    record: str
    recompute_seconds: float

    @classmethod
    def parse(cls, path: str) -> Marker | None:
        """Fields of a marker's path; None if `path` is not a marker's."""
        match = _MARKER.fullmatch(path)
        if match is None:
            return None
        owner, fingerprint, kind, tenant, key, milliseconds = match.groups()
        return cls(f"{RECORDS}{fingerprint}/{kind}/{tenant or owner}/{key[:2]}/{key}.arrow", int(milliseconds) / 1000)


class StoredRecord(NamedTuple):
    """A record as a tier lists it, its markers, and what they say a miss would cost."""

    entry: Entry
    path: RecordPath
    markers: tuple[str, ...]
    recompute_seconds: float


def sorted_out(entries: Iterable[Entry]) -> tuple[list[StoredRecord], list[Entry]]:
    """A tier's listing as records, and the markers without one (not even quarantined)."""
    records: list[tuple[Entry, RecordPath]] = []
    markers: dict[str, list[tuple[Entry, Marker]]] = {}
    for entry in entries:
        record, marker = RecordPath.parse(entry.key), Marker.parse(entry.key)
        if record is not None:
            records.append((entry, record))
        elif marker is not None:
            markers.setdefault(marker.record, []).append((entry, marker))
    found = []
    for entry, record in records:
        own = markers.pop(entry.key, [])
        cost = max((marker.recompute_seconds for _, marker in own), default=0.0)
        found.append(StoredRecord(entry, record, tuple(marked.key for marked, _ in own), cost))
    for entry, _ in records:
        markers.pop(entry.key.removeprefix(QUARANTINE), None)
    return found, [entry for group in markers.values() for entry, _ in group]
