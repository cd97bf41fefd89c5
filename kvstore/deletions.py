"""Recently deleted contents, which requests still in flight must not bring back."""

from __future__ import annotations

import threading
import time

from kvstore.records.keys import is_shared, owner_of
from kvstore.records.record import Record


class Deletions:
    """Deleted content ids, remembered for `seconds`. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[tuple[str, str], float] = {}  # by content id and its owner

    def note(self, content: str, tenant: str) -> None:
        """Note that a content id of a tenant is being deleted; a reference's is every tenant's."""
        now = time.monotonic()
        with self._lock:
            self._until = {known: until for known, until in self._until.items() if until > now}
            self._until[content, owner_of(tenant, content)] = now + self._seconds

    def covers(self, record: Record) -> bool:
        """True if a record derives from deleted content, or was conditioned on it."""
        now = time.monotonic()
        return any(
            self._until.get((content, owner_of(record.tenant, content)), now) > now
            for content in (record.content, *record.antecedents)
        )


def reaches(content: str, tenant: str, other: str) -> bool:
    """True if deleting a tenant's content affects tenant `other`.

    A reference belongs to every tenant.
    """
    return other == tenant or is_shared(content)


def derives(record: Record, content: str, tenant: str) -> bool:
    """True if a record goes when a tenant's content is deleted.

    A reference takes every tenant's records along.
    """
    return reaches(content, tenant, record.tenant) and (record.content == content or content in record.antecedents)
