"""`/v1/files`: a tenant's uploads (the static library)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

from fastapi import APIRouter, File, Form, Query, Request, Response, UploadFile
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData

from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.errors import Forbidden, TooLarge
from serving.api.media import MediaResolver
from serving.frontend.errors import InvalidRequest

OnDelete = Callable[[str, str], Awaitable[None]]
Purpose = Literal["assistants", "vision", "user_data"]
_EXPIRY = "expires_after"
_EXPIRY_FIELDS = {f"{_EXPIRY}[{name}]": name for name in ("anchor", "seconds")}
_IN_MEMORY = 8  # uploads at once; what waits lies in a temporary file
_IN_MEMORY_OF_ONE = 4  # of one tenant: office files and videos may take minutes


class _ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int


class _ExpiresAfterJson(_ExpiresAfter):
    seconds: int = Field(strict=True)


def _expiry_field(name: str | None, description: str) -> Any:
    """A form field for the API's documentation; `_expiry` reads and checks it."""
    kind = "integer" if name == "seconds" else "string"
    alias = _EXPIRY if name is None else f"{_EXPIRY}[{name}]"
    return Form(alias=alias, description=description, json_schema_extra={"type": kind})


def files_router(
    files: FileStore, stores: VectorStores, media: MediaResolver, most_bytes: int, on_delete: OnDelete
) -> APIRouter:
    """The file endpoints, as OpenAI defines them.

    Args:
        on_delete: called with (content id, owner) when a tenant's last file of some content is gone, or the last
            vector store's.
    """
    router = APIRouter(prefix="/v1/files", tags=["files"])
    reading = asyncio.Semaphore(_IN_MEMORY)
    of_tenants = WeakValueDictionary[str, asyncio.Semaphore]()

    @router.post("", summary="Upload an image, document or video")
    async def create(
        request: Request,
        file: Annotated[UploadFile, File(description="An image, UTF-8 text, a PDF or office file, a video.")],
        purpose: Annotated[Purpose, Form(description="What the file is for.")],
        anchor: Annotated[Any, _expiry_field("anchor", "created_at.")] = None,
        seconds: Annotated[Any, _expiry_field("seconds", "Lifetime in seconds from the upload.")] = None,
        expires_after: Annotated[Any, _expiry_field(None, "Both as JSON, instead of two fields.")] = None,
    ) -> dict[str, Any]:
        lifetime = _expiry(await request.form())  # the parameters document it; an empty field would be missing in them
        if (file.size or 0) > most_bytes:
            raise TooLarge(f"file: {file.size} bytes; images and documents have at most {most_bytes}")
        tenant: str = request.state.tenant
        name = file.filename or "upload"
        of_tenant = of_tenants.setdefault(tenant, asyncio.Semaphore(_IN_MEMORY_OF_ONE))
        async with of_tenant, reading:
            data = await file.read()
            await media.open_for(purpose, data, tenant, "file", name)
            return (await asyncio.to_thread(files.create, tenant, name, purpose, data, lifetime)).to_openai()

    @router.get("", summary="List uploads")
    async def listing(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        page, more = await asyncio.to_thread(files.list, request.state.tenant, purpose, limit, after, order)
        objects = [entry.to_openai() for entry in page]
        return {
            "object": "list",
            "data": objects,
            "first_id": objects[0]["id"] if objects else None,
            "last_id": objects[-1]["id"] if objects else None,
            "has_more": more,
        }

    @router.get("/{file_id}", summary="Describe an upload")
    async def retrieve(request: Request, file_id: str) -> dict[str, Any]:
        return (await asyncio.to_thread(files.get, request.state.tenant, file_id)).to_openai()

    @router.get("/{file_id}/content", summary="Download an upload")
    async def content(request: Request, file_id: str) -> Response:
        data = await asyncio.to_thread(files.content, request.state.tenant, file_id)
        return Response(data, media_type="application/octet-stream")

    @router.delete("/{file_id}", summary="Delete an upload, also from vector stores, and what was derived from it")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        tenant: str = request.state.tenant
        if not request.state.admin:
            await asyncio.to_thread(files.get, tenant, file_id)
            if await asyncio.to_thread(stores.holds, file_id):
                raise Forbidden(f"{file_id} is in a vector store; it takes an administrator's key to delete it")
        gone = await asyncio.to_thread(files.delete, tenant, file_id)
        unheld = [(content, DYNAMIC_TENANT) for content in await asyncio.to_thread(stores.remove_file, file_id)]
        if not await asyncio.to_thread(files.has_content, tenant, gone.content):
            unheld.append((gone.content, tenant))
        await asyncio.gather(*(on_delete(*one) for one in unheld))
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _expiry(form: FormData) -> int | None:
    """Seconds of an upload's `expires_after`: OpenAI's two form fields, or one that is JSON; None without any.

    Raises:
        InvalidRequest: it cannot be read, or has other fields.
    """
    given = [(name, value) for name, value in form.multi_items() if name.startswith("expires")]
    if not given:
        return None
    try:
        if len({name for name, _ in given}) < len(given):
            raise ValueError("a field is given twice")
        if [name for name, _ in given] == [_EXPIRY]:
            return _ExpiresAfterJson.model_validate_json(str(given[0][1])).seconds
        return _ExpiresAfter.model_validate({_EXPIRY_FIELDS.get(name, name): value for name, value in given}).seconds
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
    except ValueError as error:
        problem = str(error)
    raise InvalidRequest(f"{_EXPIRY}: {problem}; it takes anchor (created_at) and seconds", parameter=_EXPIRY)
