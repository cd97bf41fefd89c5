"""Vector stores: reference sets of all tenants (the dynamic library), and of one.

    stores/<store>.json                                       the VectorStore; written last, deleted first
    store-activity/<store>.json                               when it was last used
    store-files/<store>/<file>.<content id>.<bytes>.json      a Reference: one file in the store
    store-batches/<store>/<batch>.json                        files that were added together
    store-removed/<store>/<file>.<added>                      a file that was taken out, for cursors that name it
    store-index/<store>/<file>.<added>.<state>                whether it can be searched yet, see `index_states`
    references/<file>/<store>.<content id>.<bytes>            which stores hold a file

A store belongs to a tenant, or to all (DYNAMIC_TENANT). A reference of a store for all is a file of the static library
under a content id of the dynamic library: its bytes stay with the tenant that uploaded it, what is computed from it
belongs to all. In a tenant's own store it is the tenant's file itself. Listings answer counts and sizes without reads.
There is no lock between processes: each file of a store has a key of its own, so that additions and removals cannot
undo one another; of two simultaneous updates of a store's own fields the last one stands. An expired store is unknown
at once.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from kvstore.errors import TierUnavailable, UnknownFile, UnknownVectorStore
from kvstore.records.keys import DYNAMIC_TENANT, is_shared, owned_content_id
from kvstore.tiers.base import Entry
from kvstore.tiers.paths import ORPHAN_SECONDS
from kvstore.uploads.files import FileStore
from kvstore.uploads.ids import DIGITS, Place, new_id, next_stamp, stamp_of
from kvstore.uploads.index_states import ROOT as _STATES
from kvstore.uploads.index_states import IndexStates
from kvstore.uploads.json_objects import JsonObjects
from kvstore.uploads.references import Activity, Attributes, Batch, Reference, Summary, VectorStore

_AT_ONCE = 16  # files of a search's results that are asked for
_STORES, _ACTIVITY, _FILES, _BATCHES = "stores/", "store-activity/", "store-files/", "store-batches/"
_INDEX, _REMOVED = "references/", "store-removed/"
_STORE = re.compile(rf"vs_{DIGITS}")
_BATCH = re.compile(rf"vsfb_{DIGITS}")
_FILE = re.compile(rf"file-{DIGITS}")
_FACTS = r"\.(?P<content>[a-z0-9-]+)\.(?P<bytes>\d+)"
_REFERENCE = re.compile(rf"store-files/(?P<store>vs_{DIGITS})/(?P<file>file-{DIGITS}){_FACTS}\.json")
_INDEXED = re.compile(rf"references/(?P<file>file-{DIGITS})/(?P<store>vs_{DIGITS}){_FACTS}")
_DAY = 24 * 3600
_HELD_SECONDS = 60.0  # after this what is held is taken to stay so: a deletion is noted before its file goes
_ACTIVITY_SECONDS = 3600.0  # use in requests is noted this often at most
_REMOVED_SECONDS = 24 * 3600.0  # for which a cursor may name a file that was taken out of a store


@dataclass(frozen=True)
class _Entry:
    """Fields of the keys of a file in a store."""

    store: str
    file: str
    content: str
    bytes: int
    used: float = 0.0

    @classmethod
    def parse(cls, pattern: re.Pattern[str], entry: Entry) -> _Entry | None:
        match = pattern.fullmatch(entry.key)
        if match is None:
            return None
        return cls(match["store"], match["file"], match["content"], int(match["bytes"]), entry.used)

    @property
    def _facts(self) -> str:
        return f"{self.content}.{self.bytes}"

    @property
    def key(self) -> str:
        return f"{_FILES}{self.store}/{self.file}.{self._facts}.json"

    @property
    def index_key(self) -> str:
        return f"{_INDEX}{self.file}/{self.store}.{self._facts}"


class VectorStores:
    """All vector stores. Thread-safe; processes may share one location.

    Methods that remove return the content ids that no store holds any more. Their deletion is noted beforehand
    (`FileStore.pending_deletions`); the caller deletes the derived records (`Library.delete_content` with
    DYNAMIC_TENANT).
    """

    def __init__(self, files: FileStore) -> None:
        """Keep the stores beside the files they refer to."""
        self._files, self._tier = files, files.tier
        self._secret = files.settings.salt_secret.get_secret_value().encode()
        self._stores = JsonObjects(self._tier, VectorStore)
        self._references = JsonObjects(self._tier, Reference)
        self._batches = JsonObjects(self._tier, Batch)
        self._activity = JsonObjects(self._tier, Activity)
        self.states = IndexStates(self._tier)
        self._asking = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvstore-stores")
        self._noted: dict[str, float] = {}  # by store: when this process noted its use in a request
        self._changing = threading.RLock()  # a change looks at what is there and writes in one step

    # Stores

    def create(
        self,
        name: str = "",
        description: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expires_days: int | None = None,
        owner: str = DYNAMIC_TENANT,
    ) -> VectorStore:
        """A new, empty store of a tenant, or for all."""
        others = (key.removeprefix(_STORES).removesuffix(".json") for key in self._tier.keys(_STORES))
        store = VectorStore(
            new_id("vs_", others), name, int(time.time()), description, dict(metadata or {}), expires_days, owner
        )
        self._note_use(store.id)
        self._stores.write(_store_key(store.id), store)
        return store

    def get(self, store_id: str) -> VectorStore:
        """The store of an id. Raises UnknownVectorStore."""
        store = self._stores.read(_store_key(store_id)) if _STORE.fullmatch(store_id) else None
        if store is None or self._expired(store):
            raise UnknownVectorStore(f"No such vector store: {store_id}")
        return store

    def all(self) -> list[VectorStore]:
        """All stores, oldest first."""
        found = [store for store in self._stores.find(_STORES) if not self._expired(store)]
        return sorted(found, key=lambda store: store.place)

    def place(self, store_id: str) -> Place | None:
        """Place of a store in the listing, also of one that is gone; None if unknown."""
        if not _STORE.fullmatch(store_id):
            return None
        stamp = stamp_of(store_id)
        if stamp is not None:
            return stamp, store_id
        store = self._stores.read(_store_key(store_id))
        return None if store is None else store.place

    def summary(self, store: VectorStore) -> Summary:
        """Counts, bytes and times of a store."""
        entries = list(self._entries(store.id))
        size, active = sum(entry.bytes for entry in entries), self._last_use(store)
        expires = None if store.expires_days is None else int(active) + store.expires_days * _DAY
        return Summary(len(entries), size, int(active), expires)

    def update(self, store_id: str, change: Callable[[VectorStore], VectorStore]) -> VectorStore:
        """Replace a store by the result of `change`. Raises UnknownVectorStore."""
        with self._changing:
            changed = change(self.get(store_id))
            self._note_use(store_id)  # first: by its last use, long ago, it may have expired as changed
            self._stores.write(_store_key(store_id), changed)
        return changed

    def delete(self, store_id: str) -> set[str]:
        """Remove a store, not the files in it. Raises UnknownVectorStore."""
        with self._changing:
            self.get(store_id)
            return self._drop_store(store_id)

    # Files of a store

    def add(
        self, store_id: str, tenant: str, files: Mapping[str, Attributes], chunking: Sequence[int] | None = None
    ) -> list[Reference]:
        """Add a tenant's files, with attributes, to a store; sets those of files already in it.

        Raises UnknownVectorStore; UnknownFile, and adds nothing, if the tenant lacks one of the files.
        """
        owner = self.get(store_id).owner
        now, stamp, added = int(time.time()), next_stamp(), []
        for i, (file_id, attributes) in enumerate(files.items()):
            data = self._files.content(tenant, file_id)
            content, place = owned_content_id(data, owner, self._secret), stamp + i
            given = dict(attributes)
            added.append(Reference(file_id, store_id, tenant, content, len(data), now, given, place, chunking))
        with self._changing:
            for i, reference in enumerate(added):
                entry = _entry_of(reference)
                there = self._references.read(entry.key)
                if there is not None:
                    added[i] = reference = replace(reference, created_at=there.created_at, added=there.added)
                    if _tuple(there.chunking) != _tuple(chunking):
                        self.states.note(store_id, reference.file, reference.added, "in_progress")
                    else:
                        self.states.try_again(store_id, reference.file, reference.added)
                    self.states.note_change(store_id, reference.file, reference.added)
                self._tier.put(entry.index_key, [pa.py_buffer(b"")])
                self._references.write(entry.key, reference)
            self._note_use(store_id)
            try:
                self.get(store_id)
            except UnknownVectorStore:  # deleted meanwhile: it must not leave files behind
                self._drop_store(store_id)
                raise
        return added

    def reference(self, store_id: str, file_id: str) -> Reference:
        """A store's entry for a file. Raises UnknownVectorStore if there is none."""
        self.get(store_id)
        reference = self._reference(store_id, file_id)
        if reference is None:
            raise UnknownVectorStore(f"No such file in vector store {store_id}: {file_id}")
        return reference

    def references_there(self, places: Collection[tuple[str, str]]) -> dict[tuple[str, str], Reference]:
        """Entries of files in stores, by (store, file), as far as they are there and can be read.

        All are asked for at once: in an object store each takes some round trips.
        """
        stores = {store: self._asking.submit(self._is_there, store) for store, _ in places}
        files = {place: self._asking.submit(self._reference, *place) for place in places}
        found = dict[tuple[str, str], Reference]()
        for place, asked in files.items():
            with suppress(TierUnavailable):
                if stores[place[0]].result() and (reference := asked.result()) is not None:
                    found[place] = reference
        return found

    def references(self, store_id: str) -> list[Reference]:
        """All files of a store, oldest first. Raises UnknownVectorStore."""
        self.get(store_id)
        found = self._references.find(f"{_FILES}{store_id}/")
        return sorted(found, key=lambda reference: reference.place)

    def listed(self, store_id: str) -> set[str]:
        """Ids of a store's files, from a listing alone. Raises UnknownVectorStore."""
        self.get(store_id)
        return {entry.file for entry in self._entries(store_id)}

    def place_in(self, store_id: str, file_id: str) -> Place | None:
        """Place of a file in a store's listing, also of one that was removed; None if unknown."""
        entry = self._find(store_id, file_id)
        reference = None if entry is None else self._references.read(entry.key)
        if reference is not None:
            return reference.place
        if not _FILE.fullmatch(file_id):
            return None
        noted = [key.rpartition(".")[2] for key in self._tier.keys(f"{_REMOVED}{store_id}/{file_id}.")]
        return (max(map(int, noted)), file_id) if noted else None

    def set_attributes(self, store_id: str, file_id: str, attributes: Attributes) -> Reference:
        """Replace a reference's attributes. Raises UnknownVectorStore."""
        with self._changing:
            reference = replace(self.reference(store_id, file_id), attributes=dict(attributes))
            self._references.write(_entry_of(reference).key, reference)
            self.states.note_change(store_id, file_id, reference.added)
        return reference

    def remove(self, store_id: str, file_id: str) -> set[str]:
        """Remove a file from a store; the file itself stays. Raises UnknownVectorStore."""
        with self._changing:
            dropped = self._drop([_entry_of(self.reference(store_id, file_id))])
            self._note_use(store_id)
        return dropped

    def remove_file(self, file_id: str) -> set[str]:
        """Remove a file that was deleted or has expired from every store."""
        with self._changing:
            return self._drop(list(self._holding(file_id)))

    # Batches

    def add_batch(
        self, store_id: str, tenant: str, files: Mapping[str, Attributes], chunking: Sequence[int] | None = None
    ) -> Batch:
        """`add`, remembering which files came together."""
        self.add(store_id, tenant, files, chunking)
        batch = Batch(new_id("vsfb_"), store_id, int(time.time()), list(files))
        self._batches.write(_batch_key(store_id, batch.id), batch)
        return batch

    def batch(self, store_id: str, batch_id: str) -> Batch:
        """The batch of an id. Raises UnknownVectorStore."""
        self.get(store_id)
        batch = self._batches.read(_batch_key(store_id, batch_id)) if _BATCH.fullmatch(batch_id) else None
        if batch is None:
            raise UnknownVectorStore(f"No such file batch in vector store {store_id}: {batch_id}")
        return batch

    # Use

    def content(self, file_id: str) -> bytes:
        """The bytes of a file that some store for all holds. Raises UnknownFile."""
        for entry in self._holding(file_id):
            if not is_shared(entry.content):
                continue
            reading = self._references.later(entry.key), self._activity.later(_activity_key(entry.store))
            store = self._stores.read(_store_key(entry.store))
            reference, activity = reading[0].result(), reading[1].result()
            if store is None or reference is None or _is_over(store, used := _last_use(store, activity)):
                continue
            if store.expires_days is not None and time.time() - used > _ACTIVITY_SECONDS:
                with suppress(TierUnavailable):  # a failed write is no reason not to read
                    self._note_use(store.id)
            return self._files.content(reference.tenant, file_id)
        raise UnknownFile(file_id)

    def note_use(self, store_id: str) -> None:
        """Note that a store is used in a request; most calls cost nothing."""
        now = time.time()
        if now - self._noted.get(store_id, 0.0) <= _ACTIVITY_SECONDS:
            return
        self._noted[store_id] = now
        with suppress(TierUnavailable):  # a failed write is no reason not to read
            self._note_use(store_id)

    def bytes_of(self, reference: Reference) -> bytes:
        """The bytes of a store's file. Raises UnknownFile."""
        return self._files.content(reference.tenant, reference.file)

    def holds(self, file_id: str) -> bool:
        """True if some store for all has this file, or is about to."""
        return any(is_shared(entry.content) for entry in self._holding(file_id))

    def has_content(self, content: str) -> bool:
        """True if some store still holds this content."""
        return content in self._contents()

    def unheld(self) -> list[tuple[str, str]]:
        """Content ids and owners whose derived records are to be deleted.

        Contents that are still held are settled.

        What something holds still is settled.
        """
        pending, held = self._files.pending_deletions.all(), {DYNAMIC_TENANT: self._contents()}
        for owner in {one.owner for one in pending} - held.keys():
            held[owner] = self._files.contents(owner)
        settled_before = time.time() - _HELD_SECONDS
        for one in pending:
            if one.content in held[one.owner] and one.at < settled_before:
                self._files.pending_deletions.settle_held(one)
        return [(one.content, one.owner) for one in pending if one.content not in held[one.owner]]

    def overdue(self) -> set[str]:
        """Content ids that no store will hold after the next sweep."""
        entries, unfounded = list(self._entries()), self._unfounded()
        gone = {entry.key for entry in unfounded}
        return {e.content for e in unfounded if is_shared(e.content)} - {
            e.content for e in entries if e.key not in gone
        }

    def sweep(self) -> set[str]:
        """Remove expired stores, dangling references and leftovers of unfinished changes."""
        with self._changing:
            dropped = self._drop(self._unfounded())
            for store in self._stores.find(_STORES):
                if self._expired(store):
                    dropped |= self._drop_store(store.id)
            held = {entry.index_key for entry in self._entries()}
            deadline = time.time() - ORPHAN_SECONDS
            for index in list(self._tier.entries(_INDEX)):
                if index.key not in held and index.used < deadline:
                    self._tier.delete(index.key)
            self._tier.delete_all(self.states.orphans({(entry.store, entry.file) for entry in self._entries()}))
            for removed in list(self._tier.entries(_REMOVED)):
                if removed.used < time.time() - _REMOVED_SECONDS:
                    self._tier.delete(removed.key)
            return dropped

    # Inside

    def _entries(self, store_id: str = "") -> Iterator[_Entry]:
        """The files of one store, or of all."""
        prefix = f"{_FILES}{store_id}/" if store_id else _FILES
        parsed = (_Entry.parse(_REFERENCE, entry) for entry in self._tier.entries(prefix))
        return (entry for entry in parsed if entry is not None)

    def _unfounded(self) -> list[_Entry]:
        """Entries whose store or file has expired or is gone."""
        entries = list(self._entries())
        stores, files = {store.id for store in self.all()}, self._files.ids()
        return [entry for entry in entries if entry.store not in stores or entry.file not in files]

    def _holding(self, file_id: str) -> Iterator[_Entry]:
        """The file in each store that holds it, or is about to."""
        if not _FILE.fullmatch(file_id):
            return iter(())
        parsed = (_Entry.parse(_INDEXED, entry) for entry in self._tier.entries(f"{_INDEX}{file_id}/"))
        return (entry for entry in parsed if entry is not None)

    def _is_there(self, store_id: str) -> bool:
        with suppress(UnknownVectorStore):
            return self.get(store_id) is not None
        return False

    def _reference(self, store_id: str, file_id: str) -> Reference | None:
        found = self._find(store_id, file_id)
        return None if found is None else self._references.read(found.key)

    def _find(self, store_id: str, file_id: str) -> _Entry | None:
        return next((entry for entry in self._holding(file_id) if entry.store == store_id), None)

    def _contents(self) -> set[str]:
        """The content ids that existing stores hold."""
        stores = set(self._tier.keys(_STORES))
        return {entry.content for entry in self._entries() if _store_key(entry.store) in stores}

    def _drop_store(self, store_id: str) -> set[str]:
        self._tier.delete(_store_key(store_id))
        self._noted.pop(store_id, None)
        dropped = self._drop(list(self._entries(store_id)), noted=False)
        left = (key for kind in (_BATCHES, _REMOVED, _STATES) for key in self._tier.keys(f"{kind}{store_id}/"))
        for key in [_activity_key(store_id), *left]:
            self._tier.delete(key)
        return dropped

    def _drop(self, entries: Iterable[_Entry], noted: bool = True) -> set[str]:
        """Remove files from stores; their places are noted unless the stores go too."""
        gone = list(entries)
        contents = {entry.content for entry in gone if is_shared(entry.content)}  # a tenant's own lives by its file
        for content in contents:
            self._files.pending_deletions.note(content, DYNAMIC_TENANT)
        for reading in [self._references.later(entry.key) for entry in gone if noted]:
            if (reference := reading.result()) is not None:
                self.states.drop(reference.store, reference.file)
                key = f"{_REMOVED}{reference.store}/{reference.file}.{reference.place[0]}"
                self._tier.put(key, [pa.py_buffer(b"")])
        for entry in gone:
            self._tier.delete(entry.key)
            self._tier.delete(entry.index_key)
        return contents - self._contents() if contents else contents

    def _last_use(self, store: VectorStore) -> float:
        return _last_use(store, self._activity.read(_activity_key(store.id)))

    def _expired(self, store: VectorStore) -> bool:
        return store.expires_days is not None and _is_over(store, self._last_use(store))

    def _note_use(self, store_id: str) -> None:
        self._activity.write(_activity_key(store_id), Activity(time.time()))


def _last_use(store: VectorStore, activity: Activity | None) -> float:
    return store.created_at if activity is None else activity.at


def _is_over(store: VectorStore, used: float) -> bool:
    """True if a store that was last used then has expired."""
    return store.expires_days is not None and int(used) + store.expires_days * _DAY <= time.time()


def _tuple(chunking: Sequence[int] | None) -> tuple[int, ...] | None:
    """Chunking as it compares, also read from JSON."""
    return None if chunking is None else tuple(chunking)


def _store_key(store_id: str) -> str:
    return f"{_STORES}{store_id}.json"


def _activity_key(store_id: str) -> str:
    return f"{_ACTIVITY}{store_id}.json"


def _batch_key(store_id: str, batch_id: str) -> str:
    return f"{_BATCHES}{store_id}/{batch_id}.json"


def _entry_of(reference: Reference) -> _Entry:
    return _Entry(reference.store, reference.file, reference.content, reference.bytes)
