"""`/v1/vector_stores`: reference sets that an administrator maintains for every tenant.

They make up the dynamic library.

Everybody may read them and name their files in a chat; only an administrator's key changes them. A file is ready as
soon as it was added: a file is one chunk, and what is computed from it is kept when it is first used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.uploads.ids import Place
from kvstore.uploads.vector_stores import Attributes, Batch, Reference, VectorStore, VectorStores
from serving.api.errors import Forbidden, NotAvailable
from serving.api.files import OnDelete
from serving.api.media import as_text
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


class _Chunking(_Body):
    type: Literal["auto"] = Field("auto", description="A file is one chunk; there is nothing to choose.")


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


def vector_stores_router(stores: VectorStores, on_delete: OnDelete) -> APIRouter:
    """The vector store endpoints, as OpenAI defines them, but for the search.

    Args:
        on_delete: called with (content id, DYNAMIC_TENANT) when no store holds some content any more.
    """
    router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"])

    async def forget(contents: set[str]) -> None:
        at_once = asyncio.Semaphore(_DELETED_AT_ONCE)

        async def one(content: str) -> None:
            async with at_once:
                await on_delete(content, DYNAMIC_TENANT)

        await asyncio.gather(*map(one, contents))

    def shown(store: VectorStore) -> dict[str, Any]:
        return _store_object(stores, store)

    @router.post("", summary="Create a vector store")
    async def create(body: _NewStore, tenant: Administrator) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            store = stores.create(body.name or "", body.description, body.metadata, body.days)
            try:
                if body.file_ids:
                    stores.add(store.id, tenant, {file: {} for file in body.file_ids})
            except BaseException:
                stores.delete(store.id)
                raise
            return shown(store)

        return await asyncio.to_thread(work)

    @router.get("", summary="List vector stores")
    async def listing(page: Cursor) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            return _listed(stores.all(), page, stores.place, shown)

        return await asyncio.to_thread(work)

    @router.get("/{store_id}", summary="Describe a vector store")
    async def retrieve(store_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: shown(stores.get(store_id)))

    @router.post("/{store_id}", summary="Change a vector store's name, metadata or expiry")
    async def update(store_id: str, body: _StoreFields, _: Administrator) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: shown(stores.update(store_id, body.changed)))

    @router.delete("/{store_id}", summary="Delete a vector store; its files stay with their owner")
    async def delete(store_id: str, _: Administrator) -> dict[str, Any]:
        await forget(await asyncio.to_thread(stores.delete, store_id))
        return {"id": store_id, "object": "vector_store.deleted", "deleted": True}

    @router.post("/{store_id}/search", summary="Search a vector store")
    async def search(store_id: str) -> dict[str, Any]:
        await asyncio.to_thread(stores.get, store_id)
        raise NotAvailable("searching a vector store is not available in this version; name its files in a chat")

    @router.post("/{store_id}/files", summary="Add a file to a vector store")
    async def add(store_id: str, body: _NewFile, tenant: Administrator) -> dict[str, Any]:
        (added,) = await asyncio.to_thread(stores.add, store_id, tenant, {body.file_id: body.attributes or {}})
        return _file_object(added)

    def files_page(store_id: str, page: _FilesPage, among: Collection[str] | None = None) -> dict[str, Any]:
        found = stores.references(store_id) if page.status in (None, "completed") else []
        kept = [reference for reference in found if among is None or reference.file in among]
        return _listed(kept, page, partial(stores.place_in, store_id), _file_object)

    @router.get("/{store_id}/files", summary="List the files of a vector store")
    async def files(store_id: str, page: FilesCursor) -> dict[str, Any]:
        return await asyncio.to_thread(files_page, store_id, page)

    @router.get("/{store_id}/files/{file_id}", summary="Describe a file of a vector store")
    async def file(store_id: str, file_id: str) -> dict[str, Any]:
        return _file_object(await asyncio.to_thread(stores.reference, store_id, file_id))

    @router.post("/{store_id}/files/{file_id}", summary="Replace the attributes of a file of a vector store")
    async def attributes(store_id: str, file_id: str, body: _NewAttributes, _: Administrator) -> dict[str, Any]:
        given: Attributes = body.attributes or {}
        return _file_object(await asyncio.to_thread(stores.set_attributes, store_id, file_id, given))

    @router.delete("/{store_id}/files/{file_id}", summary="Take a file out of a vector store")
    async def remove(store_id: str, file_id: str, _: Administrator) -> dict[str, Any]:
        await forget(await asyncio.to_thread(stores.remove, store_id, file_id))
        return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}

    @router.get("/{store_id}/files/{file_id}/content", summary="The text of a file of a vector store")
    async def content(store_id: str, file_id: str) -> dict[str, Any]:
        await asyncio.to_thread(stores.reference, store_id, file_id)
        text = as_text(await asyncio.to_thread(stores.content, file_id))
        if text is None:
            raise NotAvailable("this file is an image, which has no text content")
        page = {"object": "vector_store.file_content.page", "data": [{"type": "text", "text": text}]}
        return {**page, "has_more": False, "next_page": None}

    @router.post("/{store_id}/file_batches", summary="Add several files to a vector store")
    async def add_batch(store_id: str, body: _NewBatch, tenant: Administrator) -> dict[str, Any]:
        given = body.attributes_by_file()
        return _batch_object(await asyncio.to_thread(stores.add_batch, store_id, tenant, given))

    @router.get("/{store_id}/file_batches/{batch_id}", summary="Describe a file batch")
    async def batch(store_id: str, batch_id: str) -> dict[str, Any]:
        return _batch_object(await asyncio.to_thread(stores.batch, store_id, batch_id))

    @router.post("/{store_id}/file_batches/{batch_id}/cancel", summary="Cancel a file batch: it is complete already")
    async def cancel(store_id: str, batch_id: str, _: Administrator) -> dict[str, Any]:
        return _batch_object(await asyncio.to_thread(stores.batch, store_id, batch_id))

    @router.get("/{store_id}/file_batches/{batch_id}/files", summary="List the files of a batch")
    async def batch_files(store_id: str, batch_id: str, page: FilesCursor) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            return files_page(store_id, page, set(stores.batch(store_id, batch_id).files))

        return await asyncio.to_thread(work)

    return router


def _administrator(request: Request) -> str:
    """The administrator's tenant. Raises Forbidden for an ordinary key."""
    if not request.state.admin:
        raise Forbidden("only an administrator's key may change vector stores")
    tenant: str = request.state.tenant
    return tenant


Administrator = Annotated[str, Depends(_administrator)]


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


def _counts(files: int) -> dict[str, int]:
    return {"in_progress": 0, "completed": files, "failed": 0, "cancelled": 0, "total": files}


def _store_object(stores: VectorStores, store: VectorStore) -> dict[str, Any]:
    summary = stores.summary(store)
    days = store.expires_days
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": store.created_at,
        "name": store.name,
        "description": store.description,
        "usage_bytes": summary.bytes,
        "file_counts": _counts(summary.files),
        "status": "completed",
        "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
        "expires_at": summary.expires_at,
        "last_active_at": summary.last_active_at,
        "metadata": store.metadata,
    }


def _file_object(reference: Reference) -> dict[str, Any]:
    return {
        "id": reference.file,
        "object": "vector_store.file",
        "created_at": reference.created_at,
        "vector_store_id": reference.store,
        "usage_bytes": reference.bytes,
        "status": "completed",
        "last_error": None,
        "attributes": reference.attributes,
        "chunking_strategy": {"type": "other"},
    }


def _batch_object(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": batch.created_at,
        "vector_store_id": batch.store,
        "status": "completed",
        "file_counts": _counts(len(batch.files)),
    }
