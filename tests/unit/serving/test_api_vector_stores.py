"""Files and vector stores through the official client, without an engine behind them."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from PIL import Image

from kvstore.records.keys import DYNAMIC_TENANT, is_shared
from kvstore.tiers.faults import FaultyTier
from kvstore.tiers.memory import MemoryTier
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.files import files_router
from serving.api.media import MediaResolver
from serving.api.vector_stores import vector_stores_router
from serving.api_keys import KeyRing
from serving.settings import ApiKey, HttpSettings

KEYS = {
    "boss": ApiKey(tenant="ops", admin=True),
    "staff": ApiKey(tenant="ops"),
    "one": ApiKey(tenant="one"),
    "two": ApiKey(tenant="two"),
}


def png(number: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Api:
    """The file and vector store routes; `deleted` are the (content, owner) pairs whose derivatives were dropped."""

    def __init__(self, files: FileStore) -> None:
        self.files, self.stores = files, VectorStores(files)
        self.deleted: list[tuple[str, str]] = []
        self.app = FastAPI()
        media = MediaResolver(HttpSettings(), files, self.stores)
        self.app.include_router(files_router(files, self.stores, media, 1 << 20, self._forget))
        self.app.include_router(vector_stores_router(self.stores, self._forget, media))
        answer_errors(self.app)
        self.app.add_middleware(Authenticate, KeyRing(KEYS))

    async def _forget(self, content: str, owner: str) -> None:
        self.deleted.append((content, owner))

    def client(self, key: str = "boss") -> AsyncOpenAI:
        """The official client, unchanged, as the owner of a key."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app, raise_app_exceptions=False))
        return AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(FileStore(tmp_path))


async def upload(client: AsyncOpenAI, number: int = 0) -> str:
    return (await client.files.create(file=(f"{number}.png", png(number)), purpose="assistants")).id


async def test_a_store_lives_as_openai_describes_it(api: Api):
    client = api.client()
    made = await client.vector_stores.create(name="pages", metadata={"of": "a book"}, description="scans")
    assert (made.object, made.status, made.name, made.metadata) == (
        "vector_store",
        "completed",
        "pages",
        {"of": "a book"},
    )
    assert (made.file_counts.total, made.usage_bytes, made.expires_after) == (0, 0, None)
    renamed = await client.vector_stores.update(made.id, name="leaves")
    assert (renamed.name, renamed.metadata) == ("leaves", {"of": "a book"})
    limited = await client.vector_stores.update(made.id, expires_after={"anchor": "last_active_at", "days": 2})
    assert limited.last_active_at is not None
    assert limited.expires_at == limited.last_active_at + 2 * 24 * 3600
    assert (await client.vector_stores.retrieve(made.id)).to_dict() == limited.to_dict()
    emptied = await client.vector_stores.update(made.id, expires_after=None, metadata=None)
    assert (emptied.name, emptied.metadata, emptied.expires_at) == ("leaves", {}, None)
    assert (await client.vector_stores.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match=made.id):
        await client.vector_stores.retrieve(made.id)


async def test_files_come_and_go(api: Api):
    client = api.client()
    first, second = await upload(client, 1), await upload(client, 2)
    store = await client.vector_stores.create(name="pages", file_ids=[first])
    added = await client.vector_stores.files.create_and_poll(
        file_id=second, vector_store_id=store.id, attributes={"page": 2, "cover": False}
    )
    assert (added.id, added.status, added.attributes) == (second, "completed", {"page": 2, "cover": False})
    grown = await client.vector_stores.retrieve(store.id)
    assert (grown.file_counts.completed, grown.usage_bytes) == (2, len(png(1)) + len(png(2)))
    changed = await client.vector_stores.files.update(second, vector_store_id=store.id, attributes={"page": 3})
    assert changed.attributes == {"page": 3}
    assert (await client.vector_stores.files.retrieve(second, vector_store_id=store.id)).attributes == {"page": 3}
    assert {file.id async for file in client.vector_stores.files.list(store.id)} == {first, second}
    assert [file.id async for file in client.vector_stores.files.list(store.id, filter="failed")] == []
    assert (await client.vector_stores.files.delete(first, vector_store_id=store.id)).deleted
    assert {file.id async for file in client.vector_stores.files.list(store.id)} == {second}
    assert (await client.files.retrieve(first)).id == first, "the file itself stays"


async def test_a_batch_adds_files_together_or_none(api: Api):
    client = api.client()
    store = await client.vector_stores.create(name="pages")
    ids = [await upload(client, number) for number in range(3)]
    batch = await client.vector_stores.file_batches.create_and_poll(
        store.id, files=[{"file_id": file, "attributes": {"n": i}} for i, file in enumerate(ids)]
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 3)
    again = await client.vector_stores.file_batches.retrieve(batch.id, vector_store_id=store.id)
    assert again.to_dict() == batch.to_dict()
    listed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
    assert {file.id: file.attributes async for file in listed} == {file: {"n": i} for i, file in enumerate(ids)}
    with pytest.raises(openai.NotFoundError, match="file-" + "0" * 32):
        await client.vector_stores.file_batches.create(
            store.id, file_ids=[await upload(client, 9), "file-" + "0" * 32], attributes={}
        )
    assert (await client.vector_stores.retrieve(store.id)).file_counts.total == 3


async def test_the_client_pages_through_stores_and_files_once(api: Api):
    client = api.client()
    ids = [await upload(client, number) for number in range(5)]
    stores = [(await client.vector_stores.create(name=str(i), file_ids=ids)).id for i in range(5)]
    for order in ("asc", "desc"):
        assert sorted([s.id async for s in client.vector_stores.list(limit=2, order=order)]) == sorted(stores)
        found = [f.id async for f in client.vector_stores.files.list(stores[0], limit=2, order=order)]
        assert sorted(found) == sorted(ids)
    page = await client.vector_stores.list(limit=2, order="asc")
    following = await client.vector_stores.list(limit=2, order="asc", after=page.data[-1].id)
    back = await client.vector_stores.list(limit=2, order="asc", before=following.data[0].id)
    assert [s.id for s in back.data] == [s.id for s in page.data]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_what_is_deleted_while_it_is_paged_through_is_deleted_in_order_and_whole(api: Api, order: str):
    client = api.client()
    files = [await upload(client, number) for number in (3, 0, 4, 1, 2)]
    batch = await client.vector_stores.create(name="batch", file_ids=files[::-1])
    stores = [batch.id, *[(await client.vector_stores.create(name=str(i))).id for i in range(4)]]
    in_order = lambda ids: ids if order == "asc" else ids[::-1]  # noqa: E731

    async def emptied(listed: Any, delete: Callable[[str], Awaitable[Any]]) -> list[str]:
        gone = []
        async for item in listed:
            await delete(item.id)
            gone.append(item.id)
        return gone

    taken_out = lambda file: client.vector_stores.files.delete(file, vector_store_id=batch.id)  # noqa: E731
    of_store = client.vector_stores.files.list(batch.id, limit=2, order=order)
    assert await emptied(of_store, taken_out) == in_order(files[::-1])
    assert await emptied(client.vector_stores.list(limit=2, order=order), client.vector_stores.delete) == in_order(
        stores
    )
    assert await emptied(client.files.list(limit=2, order=order), client.files.delete) == in_order(files)
    assert [key for key in api.files.tier.keys("") if not key.startswith("owed/")] == []


async def test_a_page_before_an_item_that_is_gone_ends_at_its_place(api: Api):
    client = api.client()
    ids = [await upload(client, number) for number in range(4)]
    store = await client.vector_stores.create(name="pages", file_ids=ids)
    await client.files.delete(ids[2])
    listed = await client.vector_stores.files.list(store.id, order="asc", before=ids[2])
    assert [file.id for file in listed.data] == ids[:2]
    with pytest.raises(openai.BadRequestError, match="before: no such item"):
        await client.vector_stores.files.list(store.id, before=await upload(client, 9))


@pytest.mark.parametrize(
    ("form", "seconds"),
    [
        ({}, None),
        ({"expires_after": '{"anchor": "created_at", "seconds": 3600}'}, 3600),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, 60),
    ],
    ids=str,
)
async def test_an_expiry_is_two_fields_or_one_of_json(api: Api, form: dict[str, str], seconds: int | None):
    made = await posted(api, form)
    assert made.status_code == 200, made.text
    expires = made.json()["expires_at"]
    assert (expires and expires - made.json()["created_at"]) == seconds


@pytest.mark.parametrize(
    "form",
    [
        {"expires_after": ""},
        {"expires_after": "3600"},
        {"expires_after": "created_at"},
        {"expires_after": "{'anchor': 'created_at', 'seconds': 3600}"},
        {"expires_after": '{"anchor": "created_at"}'},
        {"expires_after": '{"anchor": "last_active_at", "seconds": 3600}'},
        {"expires_after": '{"anchor": "created_at", "seconds": true}'},
        {"expires_after": '{"anchor": "created_at", "seconds": 0}'},
        {"expires_after": '{"anchor": "created_at", "seconds": 3600, "days": 1}'},
        {"expires_after[anchor]": "created_at"},
        {"expires_after[anchor]": "", "expires_after[seconds]": ""},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60", "expires_after[days]": "1"},
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": ["60", "61"]},
        {"expires_after": '{"anchor": "created_at", "seconds": 3600}', "expires_after[seconds]": "60"},
        {"expires_after.seconds": "60"},
        {"expires_at": "1900000000"},
    ],
    ids=str,
)
async def test_an_expiry_that_cannot_be_read_is_refused_by_name(api: Api, form: dict[str, Any]):
    refused = await posted(api, form)
    assert refused.status_code == 400, refused.text
    assert "expires_after" in refused.text
    assert api.files.list("ops") == ([], False)


async def posted(api: Api, form: dict[str, Any]) -> httpx.Response:
    """An upload by form fields, as a client without OpenAI's library sends them."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://test") as http:
        return await http.post(
            "/v1/files",
            data={"purpose": "assistants", **form},
            files={"file": ("a.png", png())},
            headers={"Authorization": "Bearer boss"},
        )


async def test_everybody_reads_and_only_administrators_change(api: Api):
    boss, other = api.client("boss"), api.client("one")
    page = await upload(boss)
    store = await boss.vector_stores.create(name="pages", file_ids=[page])
    own = await upload(other)
    assert [s.id async for s in other.vector_stores.list()] == [store.id]
    assert [f.id async for f in other.vector_stores.files.list(store.id)] == [page]
    for change in (
        other.vector_stores.update(store.id, name="mine"),
        other.vector_stores.delete(store.id),
        other.vector_stores.files.create(store.id, file_id=own),
        other.vector_stores.files.update(page, vector_store_id=store.id, attributes={}),
        other.vector_stores.files.delete(page, vector_store_id=store.id),
        other.vector_stores.file_batches.create(store.id, file_ids=[own]),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="administrator"):
            await change
    with pytest.raises(openai.NotFoundError):  # a reference may be named in a chat; the upload is still its owner's
        await other.files.content(page)
    with pytest.raises(openai.NotFoundError):
        await boss.vector_stores.files.create(store.id, file_id=own)


async def test_a_file_of_a_store_is_deleted_by_administrators_only(api: Api):
    boss, staff = api.client("boss"), api.client("staff")
    page, own = await upload(boss, 1), await upload(staff, 2)
    store = await boss.vector_stores.create(name="pages", file_ids=[page])
    with pytest.raises(openai.PermissionDeniedError, match=f"{page} is in a vector store"):
        await staff.files.delete(page)
    assert [f.id async for f in staff.vector_stores.files.list(store.id)] == [page]
    assert (await staff.files.delete(own)).deleted
    await boss.vector_stores.delete(store.id)
    assert (await staff.files.delete(page)).deleted


async def test_another_tenants_file_answers_as_one_that_never_was(api: Api):
    one, two = api.client("one"), api.client("two")
    theirs, nobodys = await upload(one), "file-" + "0" * 32
    for call in (two.files.retrieve, two.files.content, two.files.delete):
        answers = []
        for file_id in (theirs, nobodys):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(file_id)
            answers.append(caught.value.response.text.replace(file_id, "ID"))
        assert answers[0] == answers[1]
    assert [file.id async for file in two.files.list()] == []
    assert (await two.files.list(after=theirs)).data == []
    assert [file.id async for file in one.files.list()] == [theirs]


async def test_removing_the_last_reference_to_content_drops_what_was_derived_from_it(api: Api):
    client = api.client()
    page, copy, other = await upload(client, 1), await upload(client, 1), await upload(client, 2)
    a = await client.vector_stores.create(name="a", file_ids=[page, other])
    b = await client.vector_stores.create(name="b", file_ids=[copy])
    shared = api.stores.reference(a.id, page).content
    assert is_shared(shared)
    await client.vector_stores.files.delete(page, vector_store_id=a.id)
    assert api.deleted == [], "another file with the same content is still in a store"
    await client.vector_stores.delete(b.id)
    assert api.deleted == [(shared, DYNAMIC_TENANT)]
    api.deleted.clear()
    content = api.files.get("ops", other).content
    reference = api.stores.reference(a.id, other).content
    await client.files.delete(other)
    assert sorted(api.deleted) == sorted([(content, "ops"), (reference, DYNAMIC_TENANT)])
    assert (await client.vector_stores.retrieve(a.id)).file_counts.total == 0


async def test_a_text_file_gives_its_words_and_an_image_says_that_it_has_none(api: Api):
    client, image = api.client(), await upload(api.client())
    words = api.files.create("ops", "a.txt", "assistants", "Grüße".encode()).id
    store = await client.vector_stores.create(name="pages", file_ids=[words, image])
    reader = api.client("one").vector_stores.files
    assert [part.text async for part in reader.content(words, vector_store_id=store.id)] == ["Grüße"]
    with pytest.raises(openai.APIStatusError, match="image"):
        await reader.content(image, vector_store_id=store.id)


async def test_what_is_not_there_yet_says_so(api: Api):
    client = api.client()
    store = await client.vector_stores.create(name="pages", file_ids=[await upload(client)])
    with pytest.raises(openai.APIStatusError, match="search") as caught:
        await client.vector_stores.search(store.id, query="a cat")
    assert caught.value.status_code == 501
    assert caught.value.response.json()["error"].keys() >= {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nam": "x"}, "nam"),
        ({"name": 7}, "name"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after"),
        ({"expires_after": {"anchor": "last_active_at", "days": 366}}, "expires_after"),
        ({"chunking_strategy": {"type": "static", "static": {"max_chunk_size_tokens": 100}}}, "chunking_strategy"),
        ({"file_ids": ["../../etc/passwd"]}, "No such file"),
    ],
    ids=str,
)
async def test_bad_fields_are_named_and_leave_nothing(api: Api, fields: dict, words: str):
    client = api.client()
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=words):
        await client.vector_stores.create(extra_body=fields)
    assert [store.id async for store in client.vector_stores.list()] == []


async def test_a_batch_names_its_files_one_way_and_a_cursor_something_listed(api: Api):
    client = api.client()
    page = await upload(client)
    store = await client.vector_stores.create(name="pages")
    for fields in ({}, {"file_ids": [page], "files": [{"file_id": page}]}):
        with pytest.raises(openai.BadRequestError, match="either file_ids or files"):
            await client.vector_stores.file_batches.create(store.id, **fields)
    with pytest.raises(openai.BadRequestError, match="after"):
        await client.vector_stores.list(after="vs_none")


async def test_an_expired_store_is_gone_with_its_references(api: Api, monkeypatch: pytest.MonkeyPatch):
    client = api.client()
    page = await upload(client)
    store = await client.vector_stores.create(
        name="short", file_ids=[page], expires_after={"anchor": "last_active_at", "days": 1}
    )
    shared = api.stores.reference(store.id, page).content
    later = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(openai.NotFoundError):
        await client.vector_stores.retrieve(store.id)
    assert [s.id async for s in client.vector_stores.list()] == []
    assert api.stores.sweep() == {shared}


async def test_a_store_that_cannot_be_reached_is_a_503(caplog: pytest.LogCaptureFixture):
    api = Api(FileStore(FaultyTier(MemoryTier(), "get", "entries")))
    with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError, match="storage failed") as caught:
        await api.client().vector_stores.list()
    assert caught.value.status_code == 503
    assert "on purpose" not in str(caught.value), "what the tier says may name paths, and is for the log"
    assert "on purpose" in caplog.text
