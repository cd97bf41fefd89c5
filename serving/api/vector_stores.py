"""`/v1/vector_stores`: sets of files that can be searched, of one tenant or of all.

Those of all make up the dynamic library: everybody may search them and name their files in a chat; administrators
change them. A file is completed when every replica of the retriever finds it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.uploads.ids import Place
from kvstore.uploads.index_states import Known, latest
from kvstore.uploads.references import Attributes, Batch, Reference, VectorStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.errors import Forbidden, NotAvailable
from serving.api.files import OnDelete
from serving.api.media import MediaResolver
from serving.api.query_parts import read_query
from serving.api.retrieval import Retrieval, SearchBody, search_page
from serving.documents.passages import MAX_TOKENS, OVERLAP_TOKENS, as_text
from serving.frontend.errors import InvalidRequest

_MAX_BATCH = 2000
_DELETED_AT_ONCE = 8  # contents, each of which is looked for in every tier and worker
_Key = Annotated[str, StringConstraints(max_length=64)]
_Text = Annotated[str, StringConstraints(max_length=512)]
_Metadata = Annotated[dict[_Key, _Text], Field(max_length=16)]
_Attributes = Annotated[dict[_Key, _Text | bool | float], Field(max_length=16)]


class _Placed(Protocol):
    @property
    def place(self) -> Place: ...


_Item = TypeVar("_Item", bound=_Placed)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _ExpiresAfter(_Body):
    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class _StaticChunking(_Body):
    max_chunk_size_tokens: int = Field(ge=100, le=4096)
    chunk_overlap_tokens: int = Field(ge=0)

    @model_validator(mode="after")
    def _half_at_most(self) -> _StaticChunking:
        if self.chunk_overlap_tokens > self.max_chunk_size_tokens // 2:
            raise ValueError("chunk_overlap_tokens must not be more than half of max_chunk_size_tokens")
        return self


class _Chunking(_Body):
    type: Literal["auto", "static"] = Field(
        "auto", description="Texts become passages: auto, of 800 tokens that overlap by 400. Pages of PDFs stay whole."
    )
    static: _StaticChunking | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Chunking:
        if (self.type == "static") != (self.static is not None):
            raise ValueError("`static` belongs to the type static, which needs it")
        return self


class _StoreFields(_Body):
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    metadata: _Metadata | None = None
    expires_after: _ExpiresAfter | None = None

    @property
    def days(self) -> int | None:
        return None if self.expires_after is None else self.expires_after.days

    def changed(self, store: VectorStore) -> VectorStore:
        """The store with the fields that were sent; one sent as null is emptied."""
        sent = self.model_fields_set
        return replace(
            store,
            name=self.name or "" if "name" in sent else store.name,
            metadata=self.metadata or {} if "metadata" in sent else store.metadata,
            expires_days=self.days if "expires_after" in sent else store.expires_days,
        )


class _NewStore(_StoreFields):
    description: _Text | None = None
    file_ids: list[str] = Field(default_factory=list, max_length=_MAX_BATCH)
    chunking_strategy: _Chunking | None = None


class _NewFile(_Body):
    file_id: str
    attributes: _Attributes | None = None
    chunking_strategy: _Chunking | None = None


class _NewBatch(_Body):
    file_ids: list[str] | None = Field(None, min_length=1, max_length=_MAX_BATCH)
    files: list[_NewFile] | None = Field(None, min_length=1, max_length=_MAX_BATCH)
    attributes: _Attributes | None = None
    chunking_strategy: _Chunking | None = None

    def attributes_by_file(self) -> dict[str, Attributes]:
        """Attributes by file; raises InvalidRequest unless one of `file_ids` and `files` is given."""
        if (self.file_ids is None) == (self.files is None):
            raise InvalidRequest("a file batch needs either file_ids or files", parameter="file_ids")
        if self.files is not None:
            return {file.file_id: file.attributes or {} for file in self.files}
        return {file: self.attributes or {} for file in self.file_ids or ()}


class _NewAttributes(_Body):
    attributes: _Attributes | None


class _Page(BaseModel):
    """Section of a listing, by OpenAI's cursors."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: str | None = None


class _FilesPage(_Page):
    status: Literal["in_progress", "completed", "failed", "cancelled"] | None = Field(None, alias="filter")


Cursor = Annotated[_Page, Query()]
FilesCursor = Annotated[_FilesPage, Query()]


class _Caller(NamedTuple):
    """A request's tenant, and whether its key is an administrator's."""

    tenant: str
    is_admin: bool


def _caller(request: Request) -> _Caller:
    return _Caller(request.state.tenant, request.state.admin)


Caller = Annotated[_Caller, Depends(_caller)]


def vector_stores_router(
    stores: VectorStores, on_delete: OnDelete, media: MediaResolver, retrieval: Retrieval | None = None
) -> APIRouter:
    """The vector store endpoints, as OpenAI defines them.

    A store that an administrator makes is for all tenants, and administrators alone change it; one that another key
    makes is that tenant's, and nobody else learns of it.

    Args:
        on_delete: called with (content id, DYNAMIC_TENANT) when no store holds some content any more.
        media: reads the images of queries.
        retrieval: None: no retriever; files are completed as soon as they are added.
    """
    router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"])
    searched = retrieval or Retrieval(stores)

    async def forget(contents: set[str]) -> None:
        at_once = asyncio.Semaphore(_DELETED_AT_ONCE)

        async def one(content: str) -> None:
            async with at_once:
                await on_delete(content, DYNAMIC_TENANT)

        await asyncio.gather(*map(one, contents))

    async def seen(store_id: str, caller: _Caller) -> VectorStore:
        return await asyncio.to_thread(searched.visible, store_id, caller.tenant)

    async def owned(store_id: str, caller: _Caller) -> VectorStore:
        """A store that the caller may change. Raises Forbidden, UnknownVectorStore."""
        store = await seen(store_id, caller)
        if store.owner == DYNAMIC_TENANT and not caller.is_admin:
            raise Forbidden("only an administrator's key may change a vector store of all tenants")
        return store

    def shown(store: VectorStore) -> dict[str, Any]:
        return _store_object(stores, store, searched)

    def shown_file(reference: Reference, known: Known | None = None) -> dict[str, Any]:
        states = stores.states.of(reference.store) if known is None else known
        state = searched.state(states, reference)
        error = stores.states.error(reference.store, reference.file, reference.added) if state == "failed" else None
        return _file_object(reference, state, error)

    def shown_batch(batch: Batch) -> dict[str, Any]:
        return _batch_object(batch, _counts([state for _, state in _states_of(batch)]))

    def _states_of(batch: Batch) -> list[tuple[Reference, str]]:
        known, there = stores.states.of(batch.store), set(stores.listed(batch.store))
        found = [stores.reference(batch.store, file) for file in batch.files if file in there]
        return [(reference, searched.state(known, reference)) for reference in found]

    @router.post("", summary="Create a vector store")
    async def create(body: _NewStore, caller: Caller) -> dict[str, Any]:
        owner = DYNAMIC_TENANT if caller.is_admin else caller.tenant

        def work() -> VectorStore:
            store = stores.create(body.name or "", body.description, body.metadata, body.days, owner)
            try:
                if body.file_ids:
                    added: dict[str, Attributes] = {file: {} for file in body.file_ids}
                    stores.add(store.id, caller.tenant, added, _chunking(body.chunking_strategy))
            except BaseException:
                stores.delete(store.id)
                raise
            return store

        store = await asyncio.to_thread(work)
        await searched.added(store.id, list(dict.fromkeys(body.file_ids)))
        return await asyncio.to_thread(shown, store)

    @router.get("", summary="List vector stores")
    async def listing(page: Cursor, caller: Caller) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            visible = [store for store in stores.all() if store.is_visible(caller.tenant)]
            return _listed(visible, page, stores.place, shown)

        return await asyncio.to_thread(work)

    @router.get("/{store_id}", summary="Describe a vector store")
    async def retrieve(store_id: str, caller: Caller) -> dict[str, Any]:
        return await asyncio.to_thread(shown, await seen(store_id, caller))

    @router.post("/{store_id}", summary="Change a vector store's name, metadata or expiry")
    async def update(store_id: str, body: _StoreFields, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        return await asyncio.to_thread(lambda: shown(stores.update(store_id, body.changed)))

    @router.delete("/{store_id}", summary="Delete a vector store; its files stay with their owner")
    async def delete(store_id: str, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        gone = await asyncio.to_thread(stores.delete, store_id)
        await asyncio.gather(forget(gone), searched.changed(store_id))
        return {"id": store_id, "object": "vector_store.deleted", "deleted": True}

    @router.post("/{store_id}/search", summary="Search a vector store")
    async def search(store_id: str, body: SearchBody, caller: Caller) -> dict[str, Any]:
        if body.rewrite_query:
            raise InvalidRequest(
                "rewrite_query: queries are not rewritten here; send the words to search by", parameter="rewrite_query"
            )
        given = [body.query] if isinstance(body.query, str) else body.query
        queries, images = [one for one in given if isinstance(one, str)], tuple[bytes, ...]()
        if not queries:
            await searched.check([store_id], caller.tenant)
            parts = [one for one in given if not isinstance(one, str)]
            text, images = await read_query(parts, media, caller.tenant, "query")
            queries = [text]
        results, _ = await searched.search(caller.tenant, [store_id], queries, body, images)
        return search_page(results, queries)

    @router.post("/{store_id}/files", summary="Add a file to a vector store")
    async def add(store_id: str, body: _NewFile, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        given = {body.file_id: body.attributes or {}}
        (added,) = await asyncio.to_thread(
            stores.add, store_id, caller.tenant, given, _chunking(body.chunking_strategy)
        )
        await searched.added(store_id, [body.file_id])
        return await asyncio.to_thread(shown_file, added)

    def files_page(store_id: str, page: _FilesPage, among: Collection[str] | None = None) -> dict[str, Any]:
        known = stores.states.of(store_id)
        kept = [
            reference
            for reference in stores.references(store_id)
            if (among is None or reference.file in among)
            and (page.status is None or searched.state(known, reference) == page.status)
        ]
        return _listed(kept, page, partial(stores.place_in, store_id), partial(shown_file, known=known))

    @router.get("/{store_id}/files", summary="List the files of a vector store")
    async def files(store_id: str, page: FilesCursor, caller: Caller) -> dict[str, Any]:
        await seen(store_id, caller)
        return await asyncio.to_thread(files_page, store_id, page)

    @router.get("/{store_id}/files/{file_id}", summary="Describe a file of a vector store")
    async def file(store_id: str, file_id: str, caller: Caller) -> dict[str, Any]:
        await seen(store_id, caller)
        return await asyncio.to_thread(lambda: shown_file(stores.reference(store_id, file_id)))

    @router.post("/{store_id}/files/{file_id}", summary="Replace the attributes of a file of a vector store")
    async def attributes(store_id: str, file_id: str, body: _NewAttributes, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        given: Attributes = body.attributes or {}
        changed = await asyncio.to_thread(stores.set_attributes, store_id, file_id, given)
        known = await asyncio.to_thread(stores.states.of, store_id)
        if searched.state(known, changed) == "completed":
            await searched.changed(store_id, [file_id])
        return await asyncio.to_thread(shown_file, changed, known)

    @router.delete("/{store_id}/files/{file_id}", summary="Take a file out of a vector store")
    async def remove(store_id: str, file_id: str, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        gone = await asyncio.to_thread(stores.remove, store_id, file_id)
        await asyncio.gather(forget(gone), searched.changed(store_id, [file_id]))
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @router.get("/{store_id}/files/{file_id}/content", summary="The text of a file of a vector store")
    async def content(store_id: str, file_id: str, caller: Caller) -> dict[str, Any]:
        await seen(store_id, caller)
        reference = await asyncio.to_thread(stores.reference, store_id, file_id)
        text = as_text(await asyncio.to_thread(stores.bytes_of, reference))
        if text is None:
            raise NotAvailable("this file is an image or a PDF: what is found in it has its text, by page")
        page = {"object": "vector_store.file_content.page", "data": [{"type": "text", "text": text}]}
        return {**page, "has_more": False, "next_page": None}

    @router.post("/{store_id}/file_batches", summary="Add several files to a vector store")
    async def add_batch(store_id: str, body: _NewBatch, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)
        given, chunking = body.attributes_by_file(), _chunking(body.chunking_strategy)
        batch = await asyncio.to_thread(stores.add_batch, store_id, caller.tenant, given, chunking)
        await searched.added(store_id, list(given))
        return await asyncio.to_thread(shown_batch, batch)

    @router.get("/{store_id}/file_batches/{batch_id}", summary="Describe a file batch")
    async def batch(store_id: str, batch_id: str, caller: Caller) -> dict[str, Any]:
        await seen(store_id, caller)
        return await asyncio.to_thread(lambda: shown_batch(stores.batch(store_id, batch_id)))

    @router.post("/{store_id}/file_batches/{batch_id}/cancel", summary="Cancel what is left to do of a file batch")
    async def cancel(store_id: str, batch_id: str, caller: Caller) -> dict[str, Any]:
        await owned(store_id, caller)

        def work() -> dict[str, Any]:
            batch = stores.batch(store_id, batch_id)
            for reference, state in _states_of(batch):
                if state == "in_progress":
                    stores.states.note(store_id, reference.file, reference.added, "cancelled")
            return shown_batch(batch)

        return await asyncio.to_thread(work)

    @router.get("/{store_id}/file_batches/{batch_id}/files", summary="List the files of a batch")
    async def batch_files(store_id: str, batch_id: str, page: FilesCursor, caller: Caller) -> dict[str, Any]:
        await seen(store_id, caller)

        def work() -> dict[str, Any]:
            return files_page(store_id, page, set(stores.batch(store_id, batch_id).files))

        return await asyncio.to_thread(work)

    return router


def _listed(
    items: Sequence[_Item], page: _Page, find: Callable[[str], Place | None], show: Callable[[_Item], dict[str, Any]]
) -> dict[str, Any]:
    """One page of `items` (oldest first) as OpenAI lists them; what a cursor names may be gone.

    Args:
        find: gives the place of an item that is, or was, in the list.

    Raises:
        InvalidRequest: a cursor names nothing that has a place in the list.
    """

    def place(field: str, cursor: str) -> Place:
        found = find(cursor)
        if found is None:
            raise InvalidRequest(f"{field}: no such item in the list: {cursor}", parameter=field)
        return found

    window, descending = list(items), page.order == "desc"
    if page.after is not None:
        start = place("after", page.after)
        window = [item for item in window if (item.place < start if descending else item.place > start)]
    if page.before is not None:
        stop = place("before", page.before)
        window = [item for item in window if (item.place > stop if descending else item.place < stop)]
    if descending:
        window.reverse()
    if page.before is not None and page.after is None:
        window = window[-page.limit :]
    objects = [show(item) for item in window[: page.limit]]
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": len(window) > page.limit,
    }


def _counts(states: Iterable[str]) -> dict[str, int]:
    found = Counter(states)
    named = {state: found[state] for state in ("in_progress", "completed", "failed", "cancelled")}
    return {**named, "total": found.total()}


def _chunking(strategy: _Chunking | None) -> tuple[int, int] | None:
    """Tokens of a passage and of its overlap with the next one; None: the defaults."""
    static = None if strategy is None else strategy.static
    return None if static is None else (static.max_chunk_size_tokens, static.chunk_overlap_tokens)


def _store_object(stores: VectorStores, store: VectorStore, searched: Retrieval) -> dict[str, Any]:
    summary = stores.summary(store)
    days = store.expires_days
    known = latest(stores.states.of(store.id)) if searched.is_on else {}
    there = stores.listed(store.id)
    counts = _counts(known.get(file, "in_progress" if searched.is_on else "completed") for file in there)
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": store.created_at,
        "name": store.name,
        "description": store.description,
        "usage_bytes": summary.bytes,
        "file_counts": counts,
        "status": "in_progress" if counts["in_progress"] else "completed",
        "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
        "expires_at": summary.expires_at,
        "last_active_at": summary.last_active_at,
        "metadata": store.metadata,
    }


_KNOWN_ERRORS = ("server_error", "unsupported_file", "invalid_file")  # that OpenAI's clients know


def _file_object(reference: Reference, state: str, error: tuple[str, str] | None) -> dict[str, Any]:
    chunking = reference.chunking or (MAX_TOKENS, OVERLAP_TOKENS)
    told = None
    if error is not None:
        told = {"code": error[0] if error[0] in _KNOWN_ERRORS else "invalid_file", "message": error[1]}
    return {
        "id": reference.file,
        "object": "vector_store.file",
        "created_at": reference.created_at,
        "vector_store_id": reference.store,
        "usage_bytes": reference.bytes,
        "status": state,
        "last_error": told,
        "attributes": reference.attributes,
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": chunking[0], "chunk_overlap_tokens": chunking[1]},
        },
    }


def _batch_object(batch: Batch, counts: dict[str, int]) -> dict[str, Any]:
    status = "in_progress" if counts["in_progress"] else "cancelled" if counts["cancelled"] else "completed"
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_at,
        "vector_store_id": batch.store,
        "status": status,
        "file_counts": counts,
    }
