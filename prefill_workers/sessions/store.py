"""Store of one worker's sessions, bounded in bytes and idle time."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args
from weakref import WeakSet

from kvstore.deletions import reaches
from kvstore.errors import StoreError
from kvstore.library import Library
from kvstore.records.keys import session_key
from kvstore.records.record import SessionRecord
from prefill_workers.protocol import SessionInfo, SessionRef
from prefill_workers.sessions.manifest import KeptKV, MadeIdle, Session
from prefill_workers.settings import SessionSettings

logger = logging.getLogger(__name__)

Name = tuple[str, str]  # tenant, session id

_MOST_ENDED = 4096  # deleted sessions that are remembered, for links that began before


@dataclass(eq=False)
class Opened:
    """Session that a link has opened, in the store's `epoch` of then.

    Its records are not deleted until it is put, or nobody has this any more.
    """

    session: Session
    epoch: int


class SessionStore:
    """Sessions that this worker has served. Thread-safe.

    Each is also a record of the library, from which another worker, or the next one, goes on. Their KV are records by
    themselves: what lies in a slower tier, or was evicted, is loaded or computed. Forks share records; one goes when no
    session of this worker needs it, and no link under way has opened one that does. Those of a session that another
    worker has served or gone on with stay; the keeper, which knows all manifests, sweeps them.

    Args:
        precision: of the engine's KV; sessions of another are not found.
        clock: Unix seconds.
    """

    def __init__(
        self, library: Library, precision: str, settings: SessionSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._library, self._precision, self._settings, self._clock = library, precision, settings, clock
        self._lock = threading.Lock()
        self._sessions: dict[Name, Session] = {}  # latest use last
        self._holders: Counter[tuple[str, str]] = Counter()  # sessions by tenant and key of a record
        self._sizes: dict[tuple[str, str], int] = {}
        self._bytes: Counter[str] = Counter()  # by tenant
        self._open = WeakSet[Opened]()
        self._put_off = set[tuple[str, str]]()  # records to be deleted once no link has them open
        self._ended: dict[Name, int] = {}  # deleted sessions, the latest last, by the epoch that began with it
        self.epoch = 0  # deletions so far
        self._deleting = ThreadPoolExecutor(1, thread_name_prefix="session-delete")  # tiers may be slow

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that sessions of this worker hold, in whatever tier."""
        return self._bytes.total()

    def open(self, tenant: str, ref: SessionRef) -> Opened:
        """Open the session that a request names: known, forked or new. May wait for a tier."""
        now = self._clock()
        opened = Opened(Session(ref.id, tenant, now, now, parent=ref.parent), self.epoch)
        if self._find(tenant, ref.id, opened) is None and ref.parent is not None:
            parent = self._find(tenant, ref.parent, opened)
            if parent is not None:
                opened.session = parent.forked(ref.id, now, clean=ref.clean)
        return opened

    def let_go(self, opened: Opened) -> None:
        """Hold the records of an opened session no longer: its link has failed."""
        with self._lock:
            self._open.discard(opened)

    def resident(self, tenant: str, ref: SessionRef) -> Session | None:
        """The session, or the one that it begins as a fork of, if it is in memory."""
        with self._lock:
            found = self._sessions.get((tenant, ref.id))
            if found is None and ref.parent is not None and not ref.clean:
                found = self._sessions.get((tenant, ref.parent))
        return None if found is None or self._is_expired(found) else found

    def get(self, tenant: str, id: str) -> Session | None:
        """A session that is not expired; None: there is none. May wait for a tier."""
        return self._find(tenant, id)

    def put(self, session: Session, instead_of: Session | None = None, opened: Opened | None = None) -> bool:
        """Replace a session by what became of it.

        Records that no session needs any more are deleted, behind the caller, and so are those that find no room.

        Args:
            session: what became of it.
            instead_of: only while it is this one.
            opened: what it was when it was opened; only if it was not deleted since.

        Returns:
            False: it was replaced or deleted meanwhile.
        """
        offered, session = session, self._bounded(session)
        record = self._record(session)
        name = session.tenant, session.id
        with self._lock:
            if instead_of is not None and self._sessions.get(name) is not instead_of:
                return False
            is_deleted = opened is not None and self._ended.get(name, 0) > opened.epoch
            gone, ended, left = set[tuple[str, str]](), list[Session](), set[tuple[str, str]]()
            if not is_deleted:
                gone.update(self._replace(name, session))
                ended, left = self._make_room(name)
                self._library.put(record)  # under the lock: a deletion comes before or after
            if opened is not None:
                self._open.discard(opened)
            gone |= self._unheld(_places(offered))
        self._delete(gone)
        if ended:
            self._deleting.submit(partial(self._delete_ended, ended, left))
        return not is_deleted

    def add_refreshed(self, tenant: str, id: str, found: Mapping[str, KeptKV], made: MadeIdle = "refreshed") -> None:
        """Add KV that was made in idle time, by segments' ids (see `Session.refreshed`).

        What it does not take is to be discarded.
        """
        with self._lock:
            session = self._sessions.get((tenant, id))
        if session is not None:
            self.put(session.refreshed(found, made), instead_of=session)

    def discard(self, tenant: str, made: Iterable[KeptKV]) -> None:
        """Delete what was stored, KV or a patch of it, and is no session's."""
        with self._lock:
            unheld = self._unheld((tenant, kv.patch or kv.key) for kv in made)
        self._delete(unheld)

    def delete(self, tenant: str, id: str) -> bool:
        """Delete a session and its records. True if there was one.

        Of one that another worker has served, which is gone perhaps, this one knows no forks: the records that only its
        stored manifest names are left to the keeper's next sweep.

        Raises:
            TierUnavailable: a tier cannot be reached.
        """
        with self._lock:
            self.epoch += 1
            self._ended.pop((tenant, id), None)
            self._ended[tenant, id] = self.epoch
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            served = self._sessions.get((tenant, id))
            dropped = self._replace((tenant, id), None)
        self._delete(dropped)
        stored = self._load(tenant, id)
        was_stored = self._library.delete("session", self._key(id), tenant)
        if stored is not None and not _places(stored).keys() <= set(dropped):
            self._library.put(self._record(stored.ended()))
        known = [session for session in (served, stored) if session is not None]
        return any(not self._is_expired(session) for session in known) if known else was_stored

    def of_tenant(self, tenant: str) -> list[SessionInfo]:
        """The tenant's sessions that this worker has served, the latest first."""
        with self._lock:
            mine = [session for (owner, _), session in self._sessions.items() if owner == tenant]
        return [self.info(session) for session in reversed(mine) if not self._is_expired(session)]

    def names(self, limit: int) -> list[Name]:
        """Tenants and ids of the sessions that were used last."""
        with self._lock:
            return list(reversed(self._sessions))[:limit]

    def info(self, session: Session) -> SessionInfo:
        """Description of a session for its tenant."""
        records = _places(session)
        return SessionInfo(
            id=session.id,
            created=session.created,
            used=session.used,
            expires=session.used + self._settings.idle_s,
            segments=len(session.segments),
            chunks=sum(bool(segment.content) for segment in session.segments),
            tokens=session.tokens,
            nbytes=sum(records.values()),
            parent=session.parent,
        )

    def forget(self, content: str, tenant: str) -> None:
        """Drop what derives from a deleted content; `Library.delete_content` deletes the records."""
        with self._lock:
            affected = [
                (name, session)
                for name, session in self._sessions.items()
                if reaches(content, tenant, name[0]) and content in session.contents
            ]
            dropped = [one for name, session in affected for one in self._replace(name, session.without(content))]
        self._delete(dropped)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _key(self, id: str) -> str:
        return session_key(self._library.fingerprint, id, self._precision)

    def _record(self, session: Session) -> SessionRecord:
        return SessionRecord(
            key=self._key(session.id),
            fingerprint=self._library.fingerprint,
            tenant=session.tenant,
            antecedents=session.contents,
            manifest=session.to_json(),
        )

    def _load(self, tenant: str, id: str) -> Session | None:
        record = self._library.get_session(self._key(id), tenant)
        if record is None:
            return None
        try:
            return Session.from_json(record.manifest)
        except (ValueError, KeyError, TypeError, IndexError) as error:  # of another version
            logger.warning("session %.32r begins anew: its manifest cannot be read: %s", id, error)
            return None

    def _find(self, tenant: str, id: str, opened: Opened | None = None) -> Session | None:
        """A session that is not expired, which `opened` is from now on. May wait for a tier."""
        with self._lock:  # it is held before a later put can drop records of it
            session = self._sessions.get((tenant, id))
            if session is not None and not self._is_expired(session):
                self._hold(session, opened)
                return session
        session = self._load(tenant, id)  # another worker may have gone on with it
        if session is None or self._is_expired(session):
            return None
        with self._lock:
            self._hold(session, opened)
        return session

    def _hold(self, session: Session, opened: Opened | None) -> None:
        if opened is not None:
            opened.session = session
            self._open.add(opened)

    def _is_expired(self, session: Session) -> bool:
        return session.used + self._settings.idle_s < self._clock()

    def _bounded(self, session: Session) -> Session:
        """The session with as much KV as its bytes allow.

        There is room first for what its segments were linked with, without which they are computed: for that of the
        head, with which every window begins, then from the last segment back, as the oldest leaves next. Then for what
        idle time made, pass by pass (see `background.session_refresh`), the oldest segment's first: it is needed next.
        """
        left, segments = self._settings.max_bytes // 2, session.segments  # others' sessions stay beside it
        head = next((i for i, segment in enumerate(segments) if segment.content), 0)
        places = [(i, "conditioned") for i in (*range(head), *reversed(range(head, len(segments))))]
        places += [(i, made) for made in get_args(MadeIdle) for i in range(len(segments))]
        sizes, gone = dict[str, int](), defaultdict[int, dict[str, Any]](dict)
        for i, field in places:
            kv: KeptKV | None = getattr(segments[i], field)
            new = {} if kv is None else {key: size for key, size in kv.sizes.items() if key not in sizes}
            if sum(new.values()) > left:
                gone[i][field] = None
                continue
            sizes |= new
            left -= sum(new.values())
        if not gone:
            return session
        return replace(session, segments=tuple(replace(one, **gone[i]) for i, one in enumerate(segments)))

    def _replace(self, name: Name, session: Session | None) -> list[tuple[str, str]]:
        """Exchange a session, the latest in use from now on; returns records that no session holds any more."""
        before = self._sessions.pop(name, None)
        if session is not None:
            self._sessions[name] = session
            for key, nbytes in _places(session).items():
                self._holders[key] += 1
                if key not in self._sizes:
                    self._sizes[key] = nbytes
                    self._bytes[key[0]] += nbytes
        dropped = []
        for key in _places(before) if before is not None else ():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._bytes[key[0]] -= self._sizes.pop(key)
                dropped.append(key)
        return dropped

    def _unheld(self, places: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Records of these that no session holds."""
        return {place for place in places if place not in self._holders}

    def _make_room(self, current: Name) -> tuple[list[Session], set[tuple[str, str]]]:
        """Drop expired sessions, and, past the limit, idle ones of the tenant that holds most; `current` stays.

        Returns them, and the records that no session holds any more.
        """
        ended, dropped = list[Session](), set[tuple[str, str]]()

        def drop(name: Name) -> None:
            ended.append(self._sessions[name])
            dropped.update(self._replace(name, None))

        for name in [name for name, session in self._sessions.items() if self._is_expired(session)]:
            drop(name)
        while self.nbytes > self._settings.max_bytes:
            ranks = {tenant: rank for rank, (tenant, _) in enumerate(self._bytes.most_common())}
            others = [name for name in self._sessions if name != current]
            if not others:
                break
            drop(min(others, key=lambda name: ranks.get(name[0], len(ranks))))
        return ended, dropped

    def _delete(self, places: Collection[tuple[str, str]]) -> None:
        """Delete those of these records that nothing needs, in a while, and those that were put off."""
        if places or self._put_off:
            self._deleting.submit(partial(self._delete_now, places))

    def _delete_ended(self, ended: Iterable[Session], places: set[tuple[str, str]]) -> None:
        """Delete what dropped sessions held, but for those that another worker has gone on with."""
        for session in ended:
            latest = self._load(session.tenant, session.id)
            if latest is not None and latest.used > session.used:
                places = places - _places(session).keys()
        self._delete_now(places)

    def _delete_now(self, places: Iterable[tuple[str, str]]) -> None:
        with self._lock:
            unheld = self._unheld((*places, *self._put_off))
            opened = {place for one in self._open for place in _places(one.session)}
            self._put_off = unheld & opened
        for tenant, key in unheld - opened:
            try:
                self._library.delete("segment", key, tenant)
            except StoreError as error:  # the keeper deletes what was not used for long
                logger.info("a session's record is not deleted yet: %s", error)


def _places(session: Session) -> dict[tuple[str, str], int]:
    """Places of a session's records, and their bytes."""
    return {(session.tenant, key): size for kv in session.records() for key, size in kv.sizes.items()}
