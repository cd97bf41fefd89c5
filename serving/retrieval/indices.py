"""All vector stores in the memory of one retriever replica, brought up to date file by file.

What a file's parts are is derived data, one record of the library per file (`kvstore.search.record`). A replica reads
the records of all files when it starts, and indexes files that have none. Which files belong to a store, with which
attributes, the vector stores say; `follow` makes memory agree with them, whatever happened before, so that it may come
late, twice, or for a file that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.errors import StoreError, UnknownFile, UnknownVectorStore
from kvstore.library import Library
from kvstore.records.keys import index_key
from kvstore.records.record import EmbeddingRecord
from kvstore.search.grown import Array
from kvstore.search.index import Found, IndexedFile, Query, StoreIndex
from kvstore.search.record import index_record, read_index_record
from kvstore.search.vectors import vector_bytes
from kvstore.uploads.files import FileStore
from kvstore.uploads.index_states import State, latest
from kvstore.uploads.references import Reference
from kvstore.uploads.vector_stores import VectorStores
from serving.errors import RoleUnavailable
from serving.retrieval.batching import MicroBatcher
from serving.retrieval.embedders.base import Embedder, EmbedderFailed, InputRefused, Item
from serving.retrieval.parts import FileSplitter, UnusableFile
from serving.retrieval.protocol import Hit, Search, SearchAnswer, SearchRefused
from serving.retrieval.settings import RetrieverSettings

logger = logging.getLogger(__name__)

_EMBEDDED_AT_ONCE = 256  # parts of a file
_FLUSH_SECONDS = 30.0  # for a record to come where other replicas find it; those that do not make their own
_NO_ROOM = "no_room"  # code of a file that failed for a bound of the settings
_QUEUED = 10_000  # files that wait to be indexed; further ones are found by the next look

Follow = Callable[[str, Sequence[str]], Awaitable[None]]  # of all replicas, this one too


class _Held(NamedTuple):
    """Index entry of a file: when it was added, its latest change of attributes, its content id."""

    added: int
    changed: int
    content: str


class StoreIndices:
    """Indices of all vector stores, on one event loop.

    Args:
        follow: has every replica follow a store's files; None: this is the only one.
    """

    def __init__(
        self,
        settings: RetrieverSettings,
        files: FileStore,
        stores: VectorStores,
        library: Library,
        embedder: Embedder,
        splitter: FileSplitter,
        follow: Follow | None = None,
    ) -> None:
        self._settings, self._files, self._stores = settings, files, stores
        self._library, self._embedder, self._splitter = library, embedder, splitter
        self._follow_all = follow or self.follow
        self._indices: dict[str, StoreIndex] = {}
        self._held: dict[tuple[str, str], _Held] = {}  # by store and file
        self._queue: dict[tuple[str, str], None] = {}  # files to be indexed, in order
        self._working: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # by store: it is compared with memory by one task at a time
        self._embed_queries = MicroBatcher(embedder.embed_queries)
        self.indexed, self.failed, self.searches, self.degraded = 0, 0, 0, 0

    @property
    def parts(self) -> int:
        """Number of parts in all indices."""
        return sum(map(len, self._indices.values()))

    @property
    def vector_bytes(self) -> int:
        """Memory of the vectors in all indices."""
        return sum(index.vector_bytes for index in self._indices.values())

    @property
    def waiting(self) -> int:
        """Number of files that are being indexed, or wait for it."""
        return len(self._queue) + len(self._working)

    # Searching

    async def search(self, search: Search) -> SearchAnswer:
        """Find parts in stores. Raises SearchRefused."""
        began = time.perf_counter()
        if search.images and "image" not in self._embedder.modalities:
            raise SearchRefused("this deployment's embedder takes no images (`retriever.embedder`); ask in words")
        for store in search.stores:
            if store not in self._indices:
                await self.follow(store, ())
        vectors, degraded = None, None
        items = [Item(search.text)] if search.text.strip() else []
        items += [Item(image=image) for image in search.images]
        if self._embedder.dims and items:
            try:
                async with asyncio.timeout(self._settings.embed_timeout_s):
                    found = await asyncio.gather(*map(self._embed_queries, items))
                vectors = np.concatenate(found) if any(map(len, found)) else None
            except (EmbedderFailed, TimeoutError) as error:
                logger.warning("searching by words alone: %s", error or "the embedder did not answer in time")
                degraded = "lexical"
                self.degraded += 1
        embedded = time.perf_counter()
        query = Query(
            search.text,
            search.count,
            vectors,
            search.filters,
            search.ranker,
            search.embedding_weight,
            search.text_weight,
            search.score_threshold,
        )
        hits: list[Hit] = []
        for store in search.stores:
            index = self._indices.get(store)
            if index is not None and len(index):
                hits += [_hit(store, one) for one in await asyncio.to_thread(index.search, query)]
        hits.sort(key=lambda hit: -hit.score)
        self.searches += 1
        done = time.perf_counter()
        stages = {"embed": (embedded - began) * 1e3, "search": (done - embedded) * 1e3}
        return SearchAnswer(hits[: search.count], stages, degraded)

    # Following

    async def start(self) -> None:
        """`load` for the first time; what had no room is tried again.

        The bounds may be others now.
        """
        for store in await asyncio.to_thread(self._stores.all):
            await asyncio.to_thread(self._retry, store.id)
        await self.load()

    def _retry(self, store: str) -> None:
        states = self._stores.states
        for (file, added), state in states.of(store).items():
            error = states.error(store, file, added) if state.state == "failed" else None
            if error is not None and error[0] == _NO_ROOM:
                states.try_again(store, file, added)

    async def load(self) -> None:
        """Bring all stores' indices into memory; what has no record is indexed meanwhile."""
        stores = await asyncio.to_thread(self._stores.all)
        for store in stores:
            await self._agree(store.id, None)
        for gone in self._indices.keys() - {store.id for store in stores}:
            self._drop(gone)

    async def keep_up(self) -> None:
        """Follow all stores, for ever.

        The first look is at once: while a replica starts, it is not told what comes.
        """
        while True:
            try:
                await self.load()
            except Exception:
                logger.exception("vector stores cannot be listed; trying again")
            await asyncio.sleep(self._settings.follow_period_s)

    async def follow(self, store: str, files: Sequence[str]) -> None:
        """Make memory agree with some files of a store; none: with all of them."""
        await self._agree(store, files or None)

    async def index(self, store: str, files: Sequence[str]) -> None:
        """Index files of a store that are in progress; returns at once."""
        for file in files:
            self._enqueue(store, file)

    def forget(self, content: str, tenant: str) -> None:
        """Drop files of a deleted content; ids are salted by tenant. Blocks; any thread may call it."""
        for (store, file), held in list(self._held.items()):
            if held.content == content:
                self._held.pop((store, file), None)
                if (index := self._indices.get(store)) is not None:
                    index.remove(file)

    async def _agree(self, store: str, files: Collection[str] | None) -> None:
        """Make memory agree with a store: take out what is gone, take in what is there.

        Of `files` what has no record is indexed at once, so that they can be searched when this returns; of all others
        in its turn.
        """
        async with self._locks.setdefault(store, asyncio.Lock()):
            try:
                there = await asyncio.to_thread(self._stores.listed, store)
            except UnknownVectorStore:
                self._drop(store)
                return
            index = self._indices.setdefault(store, StoreIndex(self._embedder.dims))
            states = await asyncio.to_thread(self._stores.states.of, store)
            for file in [file for (of, file) in self._held if of == store and file not in there]:
                await asyncio.to_thread(index.remove, file)  # it may build the index anew
                self._held.pop((store, file), None)
            changed = {(file, added): state.changed for (file, added), state in states.items()}
            given_up = {file for file, state in latest(states).items() if state in ("failed", "cancelled")}
            settled = {place for place, state in states.items() if state.state != "in_progress"}
            for file in sorted(there) if files is None else [file for file in files if file in there]:
                held = self._held.get((store, file))
                if files is None and file in given_up:
                    continue
                if files is None and held and held.changed == changed.get((file, held.added), 0):
                    if (file, held.added) not in settled:  # who was to note its state did not get to it
                        self._enqueue(store, file)
                    continue
                try:
                    reference = await asyncio.to_thread(self._stores.reference, store, file)
                    indexed = await asyncio.to_thread(self._stored, reference)
                    if indexed is None and files is None:
                        self._enqueue(store, file)
                        continue
                    indexed = indexed or await self._made(reference)
                except (UnknownVectorStore, UnknownFile):
                    continue  # it went meanwhile
                await asyncio.to_thread(index.put, indexed)
                stamp = changed.get((file, reference.added), 0)
                self._held[store, file] = _Held(reference.added, stamp, reference.content)
                if files is None and (file, reference.added) not in settled:
                    self._enqueue(store, file)

    def _stored(self, reference: Reference) -> IndexedFile | None:
        """A file as its record has it; None without a record. Raises UnknownFile, UnknownVectorStore."""
        upload = self._files.get(reference.tenant, reference.file)
        owner = self._stores.get(reference.store).owner
        for form in self._splitter.forms(reference.chunking):
            key = index_key(self._embedder.fingerprint, reference.content, form)
            if (record := self._library.get_embedding(key, owner)) is not None:
                return self._indexed(reference, upload.filename, record)
        return None

    def _indexed(self, reference: Reference, filename: str, record: EmbeddingRecord) -> IndexedFile:
        parts, vectors = read_index_record(record)
        return IndexedFile(
            reference.file, filename, parts, vectors if self._embedder.dims else None, reference.attributes
        )

    def _drop(self, store: str) -> None:
        self._indices.pop(store, None)
        for key in [key for key in self._held if key[0] == store]:
            del self._held[key]

    # Indexing

    def _enqueue(self, store: str, file: str) -> None:
        job = store, file
        if job in self._queue or job in self._working or len(self._queue) >= _QUEUED:
            return
        self._queue[job] = None
        self._start()

    def _start(self) -> None:
        while self._queue and len(self._working) < self._settings.indexing:
            job = next(iter(self._queue))
            del self._queue[job]
            task = asyncio.create_task(self._work(*job))
            self._working[job] = task
            task.add_done_callback(lambda _, job=job: self._ended(job))  # type: ignore[misc]

    def _ended(self, job: tuple[str, str]) -> None:
        self._working.pop(job, None)
        self._start()

    async def _work(self, store: str, file: str) -> None:
        """Index a file, have all replicas take it in, and note its state."""
        states, error = self._stores.states, None
        try:
            reference = await asyncio.to_thread(self._stores.reference, store, file)
            if await self._is_cancelled(reference):
                return
            if await asyncio.to_thread(self._stored, reference) is None:
                await self._made(reference)
                if await self._is_cancelled(reference):
                    return
            await self._follow_all(store, [file])  # first: who reads "completed" must find it, whatever replica answers
        except (UnknownVectorStore, UnknownFile):
            return  # taken out meanwhile
        except InputRefused as failure:
            error = "invalid_file", str(failure)
        except (EmbedderFailed, StoreError, RoleUnavailable) as failure:  # in progress still: the next look tries again
            logger.warning("%s is not indexed yet: %s", file, failure)
            return
        except UnusableFile as failure:
            error = failure.code, str(failure)
        except Exception:
            logger.exception("%s could not be indexed", file)
            error = "server_error", "the file could not be indexed; the server's log says more"
        try:
            state: State = "completed" if error is None else "failed"
            await asyncio.to_thread(states.note, store, file, reference.added, state, error)
        except StoreError as failure:
            logger.warning("the state of %s could not be noted: %s", file, failure)
        if error is None:
            self.indexed += 1
        else:
            self.failed += 1

    async def _is_cancelled(self, reference: Reference) -> bool:
        where = reference.store, reference.file, reference.added
        return await asyncio.to_thread(self._stores.states.one, *where) == "cancelled"

    async def _made(self, reference: Reference) -> IndexedFile:
        """Take a file apart, embed it, and write its record.

        Raises:
            UnusableFile, EmbedderFailed, InputRefused, UnknownFile, UnknownVectorStore.
        """
        began = time.perf_counter()
        upload = await asyncio.to_thread(self._files.get, reference.tenant, reference.file)
        data = await asyncio.to_thread(self._files.content, reference.tenant, reference.file)
        owner = (await asyncio.to_thread(self._stores.get, reference.store)).owner
        taken = await asyncio.to_thread(self._splitter.split, data, reference.content, owner, reference.chunking)
        if self.parts + len(taken.parts) > self._settings.max_parts:
            raise UnusableFile(f"there is no room for {len(taken.parts)} more parts (`retriever.max_parts`)", _NO_ROOM)
        vectors: list[Array] | None = None
        if self._embedder.dims:
            vectors = []
            for at in range(0, len(taken.items), _EMBEDDED_AT_ONCE):
                vectors += await self._embedder.embed_documents(taken.items[at : at + _EMBEDDED_AT_ONCE])
            count = sum(map(len, vectors))
            if self.vector_bytes + vector_bytes(count, self._embedder.dims) > self._settings.max_vector_bytes:
                raise UnusableFile(
                    f"there is no room for {count} more vectors (`retriever.max_vector_bytes`)", _NO_ROOM
                )
        record = index_record(
            taken.parts,
            vectors,
            content=reference.content,
            owner=owner,
            embedder=self._embedder.fingerprint,
            form=taken.form,
            seconds=time.perf_counter() - began,
        )
        self._library.put(record)
        await asyncio.to_thread(self._library.flush, _FLUSH_SECONDS)
        return self._indexed(reference, upload.filename, record)


def _hit(store: str, found: Found) -> Hit:
    part = found.part
    return Hit(
        store,
        found.file,
        found.filename,
        found.score,
        part.number,
        part.content,
        part.text,
        part.page,
        found.box,
        dict(found.attributes),
    )
