"""Sweep of stored sessions: idle ones, and those beyond the library's bytes for them.

Workers bound the sessions that they have served, while they live (`store`). What a worker left that died, or that was
scaled down, is only in the library: the keeper sweeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvstore.errors import CorruptRecord
from kvstore.library import Library
from kvstore.records.record import SessionRecord
from kvstore.tiers.paths import record_path
from prefill_workers.sessions.manifest import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """Numbers of what a sweep deleted."""

    sessions: int = 0
    segments: int = 0
    nbytes: int = 0  # of the segments, as stored


def sweep(library: Library, idle_s: float, max_bytes: int, now: float) -> Swept:
    """Delete sessions idle for longer than `idle_s`, and the longest idle beyond `max_bytes`.

    A segment goes when no session that stays needs it, and it has not been used for `idle_s` either, or belonged to one
    that goes. A session that is asked for meanwhile begins anew; its answers stay as they are. What a deletion
    has left of one (`Session.ended`) counts as idle.

    Args:
        now: Unix seconds.

    Raises:
        TierUnavailable: a tier cannot be listed or reached.
    """
    stored = {entry.key: entry for entry in library.listed("segment")}
    sessions = _sessions(library)
    staying = {path: one for path, one in sessions.items() if one is not None and one.used + idle_s >= now}
    needed = _needed(library, staying.values())
    held = sum(stored[path].size for path in needed & stored.keys())
    for path, _ in sorted(staying.items(), key=lambda item: item[1].used):
        if held <= max_bytes:
            break
        del staying[path]
        left = _needed(library, staying.values())
        held -= sum(stored[one].size for one in (needed - left) & stored.keys())
        needed = left
    going = sessions.keys() - staying.keys()
    theirs = _needed(library, [one for path in going if (one := sessions[path]) is not None])
    idle = {path for path, entry in stored.items() if entry.used + idle_s < now}
    segments = (stored.keys() & (theirs | idle)) - needed
    for path in (*going, *segments):
        library.delete_listed(path)
    return Swept(len(going), len(segments), sum(stored[path].size for path in segments))


def _sessions(library: Library) -> Mapping[str, Session | None]:
    """Stored sessions by the paths of their manifests; None: it cannot be read, and serves nobody."""
    found: dict[str, Session | None] = {}
    for entry in library.listed("session"):
        try:
            record = library.read_listed(entry.key)
            if record is not None:
                assert isinstance(record, SessionRecord)
                found[entry.key] = Session.from_json(record.manifest)
        except (CorruptRecord, ValueError, KeyError, TypeError, IndexError) as error:
            logger.warning("a session's manifest cannot be read, it is deleted: %s", error)
            found[entry.key] = None
    return found


def _needed(library: Library, sessions: Collection[Session]) -> set[str]:
    """Paths of the segments that sessions need."""
    return {
        record_path("segment", key, library.fingerprint, session.tenant)
        for session in sessions
        for kv in session.records()
        for key in kv.sizes
    }
