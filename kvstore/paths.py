"""Where the library keeps things inside a tier.

    records/<fingerprint>/<kind>/<tenant>/<first two digits of key>/<key>.arrow     a record
    by-content/<tenant>/<content id>/<fingerprint>.<kind>.<key>.<milliseconds>      a marker, see below
    quarantine/<path>                                                              a record that failed its checks

Fingerprint and tenant appear as digests. A marker says that a record was derived from a content id and what a miss
would cost; it is written before its record, so that deleting by content never overlooks one, and both eviction and
deletion work from a listing alone, without opening files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from kvstore.errors import InvalidKey
from kvstore.format import Record, RecordKind, kind_of

RECORDS = "records/"
MARKERS = "by-content/"
_HEX64 = re.compile(r"[0-9a-f]{64}")
_RECORD = re.compile(r"(?:quarantine/)?records/[0-9a-f]{16}/\w+/([0-9a-f]{32})/[0-9a-f]{2}/([0-9a-f]{64})\.arrow")
_MARKER = re.compile(r"by-content/([0-9a-f]{32})/[0-9a-f]{64}/([0-9a-f]{16})\.(\w+)\.([0-9a-f]{64})\.(\d+)")


def tenant_digest(tenant: str) -> str:
    """A tenant's name inside a tier: 32 hex digits, whatever characters the name has."""
    return blake3(tenant.encode(), derive_key_context="orbitserve 2026 tenant v1").hexdigest()[:32]


def _fingerprint_digest(fingerprint: str) -> str:
    return blake3(fingerprint.encode(), derive_key_context="orbitserve 2026 fingerprint v1").hexdigest()[:16]


def _content_digest(content: str) -> str:
    return content if _HEX64.fullmatch(content) else blake3(content.encode()).hexdigest()


def record_path(kind: RecordKind, key: str, fingerprint: str, tenant: str) -> str:
    """Raises InvalidKey unless `key` is 64 hex digits."""
    if not _HEX64.fullmatch(key):
        raise InvalidKey(f"a record's key is 64 hex digits, not {key!r}")
    return f"{RECORDS}{_fingerprint_digest(fingerprint)}/{kind}/{tenant_digest(tenant)}/{key[:2]}/{key}.arrow"


def path_of(record: Record) -> str:
    return record_path(kind_of(record), record.key, record.fingerprint, record.tenant)


def marker_paths(record: Record) -> list[str]:
    """One marker for the content the record was derived from and for each content it was conditioned on."""
    contents = dict.fromkeys(content for content in (record.content, *record.antecedents) if content)
    fingerprint, milliseconds = _fingerprint_digest(record.fingerprint), round(record.recompute_seconds * 1000)
    name = f"{fingerprint}.{kind_of(record)}.{record.key}.{milliseconds}"
    return [content_prefix(content, record.tenant) + name for content in contents]


def content_prefix(content: str, tenant: str) -> str:
    """What the markers of one content id of one tenant start with."""
    return f"{MARKERS}{tenant_digest(tenant)}/{_content_digest(content)}/"


@dataclass(frozen=True)
class RecordPath:
    """What a record's path says."""

    tenant: str
    key: str

    @classmethod
    def parse(cls, path: str) -> RecordPath | None:
        """None if `path` is not a record's, quarantined or not."""
        match = _RECORD.fullmatch(path)
        return None if match is None else cls(match.group(1), match.group(2))


@dataclass(frozen=True)
class Marker:
    """What a marker's path says: the record it stands for and the seconds a miss would cost."""

    record: str
    recompute_seconds: float

    @classmethod
    def parse(cls, path: str) -> Marker | None:
        """None if `path` is not a marker's."""
        match = _MARKER.fullmatch(path)
        if match is None:
            return None
        tenant, fingerprint, kind, key, milliseconds = match.groups()
        return cls(f"{RECORDS}{fingerprint}/{kind}/{tenant}/{key[:2]}/{key}.arrow", int(milliseconds) / 1000)
