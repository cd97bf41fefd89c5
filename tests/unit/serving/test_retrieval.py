"""Retrieval over HTTP with OpenAI's client, a real retriever behind it, and no engine."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from pdf_support import pdf
from PIL import Image
from ray.exceptions import ActorDiedError, ActorUnavailableError
from video_support import video

from kvstore.library import Library
from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.search.index import StoreIndex
from kvstore.settings import LibrarySettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.index_states import latest, states_of
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.modes import OperatingPoint
from serving.api.auth import Authenticate
from serving.api.console import _PAGE as PAGE
from serving.api.errors import answer_errors
from serving.api.files import files_router
from serving.api.media import FOUND, MediaResolver
from serving.api.pdf_pages import PdfPages
from serving.api.retrieval import Retrieval
from serving.api.retrieve import citations, retrieved
from serving.api.vector_stores import vector_stores_router
from serving.api_keys import KeyRing
from serving.documents.passages import tokens_of
from serving.documents.settings import DocumentSettings
from serving.errors import NoReplica, RoleUnavailable
from serving.frontend.documents import Documents
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import RequestTrace
from serving.replicas.retriever import Retriever
from serving.retrieval.embedders.base import Embedder, EmbedderFailed, Item, unit
from serving.retrieval.embedders.http import HttpEmbedder
from serving.retrieval.embedders.static import StaticEmbedder
from serving.retrieval.indices import StoreIndices
from serving.retrieval.parts import FileSplitter, UnusableFile
from serving.retrieval.settings import RetrieverSettings
from serving.settings import ApiKey, HttpSettings

KEYS = {"boss": ApiKey(tenant="ops", admin=True), "one": ApiKey(tenant="one"), "two": ApiKey(tenant="two")}
BEES = "Honey bees store nectar in the comb. A hive has one queen. " * 3
BOATS = "The ferry crosses the strait at noon. Sailing boats need wind. " * 3


MANUAL = pdf(["Chapter one", "Bolts and nuts"], ["Chapter two", "The carburettor mixes air and fuel"], ["Index"])
LOCK = b"/ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%b> /U <%b> >>" % (b"00" * 32, b"11" * 32)


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(map(ord, text))


class Api:
    """Files and vector stores over HTTP; `retrievers` share what is stored."""

    def __init__(self, folder: Path, embedder: Embedder, retrievers: int = 1, **limits: Any) -> None:
        self.files = FileStore(folder / "files")
        self.stores, self.deleted = VectorStores(self.files), list[tuple[str, str]]()
        self.documents = DocumentSettings(pdf_timeout_s=30)
        self._folder, self._embedder, self._limits = folder, embedder, limits
        self.retrievers = [self.retriever() for _ in range(retrievers)]
        self.retrieval = Retrieval(self.stores, self)
        pdfs = PdfPages(self.documents, self.files, 33_000_000)
        self.media = MediaResolver(HttpSettings(), self.files, self.stores, Documents(Letters()), pdfs=pdfs)
        self.app = FastAPI()
        self.app.include_router(files_router(self.files, self.stores, self.media, 1 << 20, self._forget))
        self.app.include_router(vector_stores_router(self.stores, self._forget, self.media, self.retrieval))
        answer_errors(self.app)
        self.app.add_middleware(Authenticate, KeyRing(KEYS))
        self._turn = 0

    def retriever(self) -> StoreIndices:
        """Another replica."""
        library = Library(
            LibrarySettings(directory=self._folder / "library", object_store_bytes=0), self._embedder.fingerprint
        )
        splitter = FileSplitter(self.files, self.documents, tokens_of(self._folder), has_images=False)
        settings = RetrieverSettings(follow_period_s=0.05, embed_timeout_s=20, **self._limits)
        return StoreIndices(
            settings, self.files, VectorStores(self.files), library, self._embedder, splitter, self.follow
        )

    async def search(self, search: Any) -> Any:
        self._turn += 1
        return await self.retrievers[self._turn % len(self.retrievers)].search(search)

    async def index(self, store: str, files: Sequence[str]) -> None:
        await self.retrievers[0].index(store, files)

    async def follow(self, store: str, files: Sequence[str]) -> None:
        await asyncio.gather(*(one.follow(store, files) for one in self.retrievers))

    async def _forget(self, content: str, owner: str) -> None:
        self.deleted.append((content, owner))

    def client(self, key: str = "boss") -> AsyncOpenAI:
        """The official client, unchanged."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app, raise_app_exceptions=False))
        return AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def static() -> StaticEmbedder:
    return StaticEmbedder()


@pytest.fixture
def api(tmp_path: Path, static: StaticEmbedder) -> Api:
    return Api(tmp_path, static, retrievers=2)


async def test_the_official_client_uploads_polls_and_finds_the_page(api: Api):
    client = api.client()
    store = await client.vector_stores.create(name="manuals")
    file = await client.files.create(file=("manual.pdf", MANUAL), purpose="assistants")
    added = await client.vector_stores.files.create_and_poll(
        file_id=file.id, vector_store_id=store.id, attributes={"year": 1999}, poll_interval_ms=20
    )
    assert added.status == "completed"
    for _ in range(2):  # whatever replica answers
        (best, *_) = (await client.vector_stores.search(store.id, query="how is fuel mixed with air?")).data
        assert (best.file_id, best.filename, best.attributes) == (file.id, "manual.pdf", {"year": 1999})
        assert best.page == 2
        assert "carburettor" in best.content[0].text
        assert best.content[1].image_file == {"file_id": file.id, "page": 2}
        x0, y0, x1, y1 = best.box  # the second line of the page, 72 points from the left of 612
        assert (round(x0, 2), 0.11 < y0 < y1 < 0.16, x0 < x1 < 0.7) == (0.12, True, True)
    assert (await client.vector_stores.retrieve(store.id)).file_counts.completed == 1


async def test_a_batch_completes_though_one_of_its_files_fails(api: Api):
    client = api.client()
    store = await client.vector_stores.create()
    broken = api.files.create("ops", "broken.pdf", "assistants", b"%PDF-1.7\nnothing of one")
    texts = [("bees.txt", io.BytesIO(BEES.encode())), ("boats.txt", io.BytesIO(BOATS.encode()))]
    batch = await client.vector_stores.file_batches.upload_and_poll(
        store.id, files=texts, file_ids=[broken.id], poll_interval_ms=20
    )
    counts = batch.file_counts
    assert (batch.status, counts.completed, counts.failed, counts.in_progress) == ("completed", 2, 1, 0)
    failed = await client.vector_stores.files.retrieve(broken.id, vector_store_id=store.id)
    assert (failed.status, failed.last_error.code) == ("failed", "invalid_file")
    assert "broken" in failed.last_error.message
    (found, *_) = (await client.vector_stores.search(store.id, query="who lives in a hive?")).data
    assert found.filename == "bees.txt"


async def test_what_a_cancelled_batch_had_left_is_not_indexed_until_it_is_added_again(
    tmp_path: Path, static: StaticEmbedder, monkeypatch: pytest.MonkeyPatch
):
    api = Api(tmp_path, static, indexing=1)
    client, gate, asked = api.client(), asyncio.Event(), asyncio.Event()

    async def embed(items: Sequence[Item]) -> Any:
        asked.set()
        await gate.wait()
        return await StaticEmbedder.embed_documents(static, items)

    monkeypatch.setattr(static, "embed_documents", embed)
    store = await client.vector_stores.create()
    texts = {"bees.txt": BEES, "boats.txt": BOATS}
    files = [
        (await client.files.create(file=(name, text.encode()), purpose="assistants")).id for name, text in texts.items()
    ]
    batch = await client.vector_stores.file_batches.create(store.id, file_ids=files)
    async with asyncio.timeout(20):
        await asked.wait()
        await client.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
        gate.set()
        while api.retrievers[0].waiting:
            await asyncio.sleep(0.02)
        batch = await client.vector_stores.file_batches.retrieve(batch.id, vector_store_id=store.id)
        assert (batch.status, batch.file_counts.cancelled, batch.file_counts.completed) == ("cancelled", 2, 0)
        assert (await client.vector_stores.search(store.id, query="bees")).data == []
        again = await client.vector_stores.files.create_and_poll(
            files[0], vector_store_id=store.id, poll_interval_ms=20
        )
    assert again.status == "completed"
    assert len((await client.vector_stores.search(store.id, query="bees")).data) == 1


async def test_a_file_that_failed_and_is_added_again_counts_as_what_it_is_now(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    async def unannounced(store: str, files: Sequence[str]) -> None:
        pass

    client = api.client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    monkeypatch.setattr(api, "index", unannounced)
    await client.vector_stores.files.create(vector_store_id=store.id, file_id=file.id)
    api.stores.states.note(store.id, file.id, api.stores.reference(store.id, file.id).added, "failed", ("x", "y"))
    assert (await client.vector_stores.retrieve(store.id)).file_counts.failed == 1
    await client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    await client.vector_stores.files.create(vector_store_id=store.id, file_id=file.id)
    counts = (await client.vector_stores.retrieve(store.id)).file_counts
    assert (counts.failed, counts.in_progress) == (0, 1)
    await api.retrievers[0].load()
    async with asyncio.timeout(20):
        while (await client.vector_stores.retrieve(store.id)).file_counts.completed == 0:
            await asyncio.sleep(0.02)


def test_of_states_that_are_noted_late_those_of_the_latest_addition_hold():
    known = states_of(["store-index/vs/file-1.20.completed", "store-index/vs/file-1.9.failed"])
    assert latest(known) == {"file-1": "completed"}


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_parts": 3}, "no room for 3 more parts (`retriever.max_parts`)"),
        ({"max_vector_bytes": 3_000}, "no room for 3 more vectors (`retriever.max_vector_bytes`)"),
    ],
)
async def test_a_file_beyond_an_index_bound_fails_and_says_which(
    tmp_path: Path, static: StaticEmbedder, limits: dict[str, int], told: str
):
    client = Api(tmp_path, static, **limits).client()
    store, found = await client.vector_stores.create(), []
    for name, data in (("bees.txt", BEES.encode()), ("manual.pdf", MANUAL)):
        file = await client.files.create(file=(name, data), purpose="assistants")
        added = await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
        found.append((added.status, "" if added.last_error is None else added.last_error.message))
    assert found[0] == ("completed", "")
    assert (found[1][0], told in found[1][1]) == ("failed", True)
    assert [one.filename for one in (await client.vector_stores.search(store.id, query="fuel")).data] == ["bees.txt"]


async def test_a_store_that_is_searched_does_not_expire(api: Api, monkeypatch: pytest.MonkeyPatch):
    client, now = api.client(), time.time()
    expiry: Any = {"anchor": "last_active_at", "days": 1}
    store = await client.vector_stores.create(expires_after=expiry)
    for hours in (20, 40, 60):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        await client.vector_stores.search(store.id, query="bees")
    assert (await client.vector_stores.retrieve(store.id)).last_active_at == int(now + 60 * 3600)
    monkeypatch.setattr(time, "time", lambda: now + 85 * 3600)
    with pytest.raises(openai.NotFoundError):
        await client.vector_stores.search(store.id, query="bees")


async def test_what_had_no_room_is_indexed_once_a_replica_starts_with_more(tmp_path: Path, static: StaticEmbedder):
    client = Api(tmp_path, static, max_parts=1).client()
    store = await client.vector_stores.create()
    broken = Api(tmp_path, static).files.create("ops", "broken.pdf", "assistants", b"%PDF-1.7\nnothing of one").id
    wide = (await client.files.create(file=("manual.pdf", MANUAL), purpose="assistants")).id
    for file in (broken, wide):
        added = await client.vector_stores.files.create_and_poll(file, vector_store_id=store.id, poll_interval_ms=20)
        assert added.status == "failed"
    roomy = Api(tmp_path, static)
    await roomy.retrievers[0].start()
    async with asyncio.timeout(20):
        while (await client.vector_stores.retrieve(store.id)).file_counts.completed == 0:
            await asyncio.sleep(0.02)
    assert (await client.vector_stores.retrieve(store.id)).file_counts.failed == 1
    assert (await roomy.client().vector_stores.search(store.id, query="fuel")).data[0].page == 2


async def test_filters_thresholds_and_counts_bound_what_is_found(api: Api):
    client = api.client()
    store = await client.vector_stores.create()
    for year in range(6):
        file = await client.files.create(file=(f"{year}.txt", BEES.encode() + bytes([65 + year])), purpose="assistants")
        await client.vector_stores.files.create_and_poll(
            file.id, vector_store_id=store.id, attributes={"year": year, "even": year % 2 == 0}, poll_interval_ms=20
        )
    late: Any = {
        "type": "and",
        "filters": [{"type": "gte", "key": "year", "value": 2}, {"type": "eq", "key": "even", "value": True}],
    }
    found = (await client.vector_stores.search(store.id, query="bees", filters=late)).data
    assert sorted(one.attributes["year"] for one in found) == [2, 4]
    assert len((await client.vector_stores.search(store.id, query="bees", max_num_results=3)).data) == 3
    strict = await client.vector_stores.search(store.id, query="volcano", ranking_options={"score_threshold": 0.99})
    assert strict.data == []
    with pytest.raises(openai.BadRequestError, match="none of eq"):
        await client.vector_stores.search(store.id, query="bees", filters={"type": "like", "key": "a", "value": "b"})  # type: ignore[arg-type,typeddict-item]
    with pytest.raises(openai.BadRequestError, match="rewrite_query"):
        await client.vector_stores.search(store.id, query="bees", rewrite_query=True)


async def test_what_is_taken_out_is_not_found_and_new_attributes_are(api: Api):
    client = api.client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    await client.vector_stores.files.update(file.id, vector_store_id=store.id, attributes={"kind": "insects"})
    wanted: Any = {"type": "eq", "key": "kind", "value": "insects"}
    for _ in range(2):
        assert len((await client.vector_stores.search(store.id, query="queen", filters=wanted)).data) == 1
    await client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    for _ in range(2):
        assert (await client.vector_stores.search(store.id, query="queen")).data == []


async def test_an_index_that_is_built_anew_does_not_stop_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch):
    client, threads = api.client(), list[int]()
    monkeypatch.setattr("kvstore.search.index._COMPACTED", 0)
    monkeypatch.setattr(StoreIndex, "_compact", lambda self: threads.append(threading.get_ident()))
    store = await client.vector_stores.create()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    await client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    assert len(threads) == len(api.retrievers)
    assert threading.get_ident() not in threads


async def test_a_tenants_store_is_nobody_elses(api: Api):
    one, two, boss = map(api.client, ("one", "two", "boss"))
    store = await one.vector_stores.create(name="mine")
    file = await one.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    await one.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    assert len((await one.vector_stores.search(store.id, query="queen")).data) == 1
    unknown = "vs_" + "0" * 40
    for other in (two, boss):
        told = []
        for name in (store.id, unknown):
            with pytest.raises(openai.NotFoundError) as error:
                await other.vector_stores.search(name, query="queen")
            told.append(str(error.value).replace(name, "it"))
        assert told[0] == told[1]
        assert [listed.id async for listed in other.vector_stores.list()] == []
        with pytest.raises(openai.NotFoundError):
            await other.vector_stores.files.retrieve(file.id, vector_store_id=store.id)
        parts = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}]
        with pytest.raises(Exception, match="no such file"):
            await api.media.resolve_messages(parts, "two")
    await one.files.delete(file.id)  # it takes no administrator
    assert (await one.vector_stores.search(store.id, query="queen")).data == []


async def test_a_replica_that_starts_reads_records_and_embeds_nothing(api: Api, monkeypatch: pytest.MonkeyPatch):
    client = api.client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("manual.pdf", MANUAL), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)

    async def embed(self: Any, items: Sequence[Item]) -> Any:
        raise AssertionError("a document was embedded again")

    monkeypatch.setattr(StaticEmbedder, "embed_documents", embed)
    started = api.retriever()
    await started.load()
    assert (started.parts, started.waiting) == (3, 0)


async def test_a_replica_that_starts_looks_at_once_for_what_came_meanwhile(api: Api):
    client, started = api.client(), api.retriever()
    started._settings = RetrieverSettings(follow_period_s=3600)
    await started.load()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    keeping = asyncio.create_task(started.keep_up())
    try:
        async with asyncio.timeout(20):
            while not started.parts:
                await asyncio.sleep(0.02)
    finally:
        keeping.cancel()


async def test_without_its_embedder_a_search_goes_by_words_and_says_so(api: Api, monkeypatch: pytest.MonkeyPatch):
    client = api.client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)

    async def fail(items: Sequence[Item]) -> Any:
        raise EmbedderFailed("gone")

    for one in api.retrievers:
        monkeypatch.setattr(one._embed_queries, "_work", fail)
    trace = RequestTrace()
    messages = [{"role": "user", "content": "who is the queen?"}]
    asked = {"vector_store_ids": [store.id]}
    (changed,) = await retrieved(messages, "ops", asked, api.retrieval, api.media, trace)
    assert changed["content"][0]["type"] == FOUND
    assert trace.report.retrieval is not None
    assert trace.report.retrieval.degraded == "lexical"


async def test_found_pages_stand_before_the_question_and_are_drawn(api: Api):
    client = api.client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("manual.pdf", MANUAL), purpose="assistants")
    await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    trace = RequestTrace()
    asked = {"vector_store_ids": [store.id], "max_num_results": 2, "query": "chapter carburettor"}
    messages = [{"role": "user", "content": "What does it mix?"}]
    (message,) = await retrieved(messages, "two", asked, api.retrieval, api.media, trace)
    (resolved,) = await api.media.resolve_messages([message], "two")
    kinds = [part["type"] for part in resolved["content"]]
    assert kinds == ["image_pil", "image_pil", "text"]
    picture = resolved["content"][0]["image_pil"]
    assert picture.size == (816, 1056)  # a letter at 96 dots per inch
    assert picture.getextrema()[0][0] < 64  # something is drawn on it
    report = trace.report.retrieval
    assert report is not None
    assert [(one.page, one.filename) for one in report.results] == [(1, "manual.pdf"), (2, "manual.pdf")]
    (cited,) = citations("It mixes air and fuel [2]. [7]", report)
    assert (cited["page"], cited["file_id"], cited["index"]) == (2, file.id, 22)
    # the same page of the same file by name is the same chunk
    part = {"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}
    (named,) = await api.media.resolve_messages([part], "two", pages="3,2")
    assert [one["uuid"] for one in named["content"]][1] == resolved["content"][1]["uuid"]


class Colours:
    """An embedder of images by their mean colour."""

    fingerprint, dims, modalities = "colours", 3, frozenset({"image"})

    async def embed_queries(self, items: Sequence[Item]) -> list[np.ndarray]:
        return await self.embed_documents(items)

    async def embed_documents(self, items: Sequence[Item]) -> list[np.ndarray]:
        opened = [Image.open(io.BytesIO(item.image)).convert("RGB") if item.image else None for item in items]
        return [np.zeros((0, 3)) if image is None else unit(np.asarray(image).mean((0, 1))[None]) for image in opened]


def coloured(*colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(buffer, "PNG")
    return buffer.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(data).decode()}"}}


async def test_an_image_asks_for_those_like_it(tmp_path: Path):
    api = Api(tmp_path, Colours())
    client = api.client()
    store = (await client.vector_stores.create()).id
    files = {}
    for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        file = await client.files.create(file=(f"{name}.png", coloured(*colour)), purpose="assistants")
        await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store, poll_interval_ms=20)
        files[name] = file.id
    inline = image_part(coloured(90, 0, 9))
    ask = partial(client.vector_stores.search, store)
    (red, blue) = (await ask(query=[inline])).data  # type: ignore[list-item]
    assert (red.file_id, blue.file_id) == (files["red"], files["blue"])
    (best, _) = (await ask(query=[blue.content[0].model_dump()])).data  # type: ignore[list-item]
    assert best.file_id == files["blue"]
    trace = RequestTrace()
    messages = [{"role": "user", "content": [inline]}]
    asked = {"vector_store_ids": [store], "max_num_results": 1}
    await retrieved(messages, "ops", asked, api.retrieval, api.media, trace)
    assert trace.report.retrieval is not None
    assert [one.file_id for one in trace.report.retrieval.results] == [files["red"]]
    for part, why in (
        ({"type": "audio"}, r"query\[0\]: a query's parts are text"),
        ({"type": "text", "text": " "}, "neither words nor images"),
        ({"type": "image_file", "image_file": {"file_id": files["red"], "page": 2}}, "has no page 2"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            await ask(query=[part])  # type: ignore[list-item]


async def test_an_embedder_of_words_is_not_asked_by_images(api: Api):
    client = api.client()
    store = (await client.vector_stores.create()).id
    part = image_part(coloured(9, 9, 9))
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        await client.vector_stores.search(store, query=[part])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"%PDF-1.7\nnothing of one", "broken"),
        (pdf(["big"], size="99999 99999"), "page 1 of the PDF cannot be used: its size"),
        (MANUAL[:300], "broken"),
        (MANUAL.replace(b"/Root 1 0 R", b"/Root 1 0 R " + LOCK), "the PDF is encrypted"),
        (BEES.encode(), "it is named 'it.pdf', but its bytes are no PDF"),
    ],
)
async def test_a_pdf_that_cannot_be_used_is_refused_by_name(api: Api, data: bytes, why: str):
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        await api.client().files.create(file=("it.pdf", data), purpose="assistants")
    error: Any = refused.value.body
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "file", 400)
    inline = {"filename": "it.pdf", "file_data": f"data:application/pdf;base64,{b64encode(data).decode()}"}
    with pytest.raises(InvalidRequest, match=why) as unusable:
        await api.media.resolve_messages([{"role": "user", "content": [{"type": "file", "file": inline}]}], "ops")
    assert unusable.value.parameter == "messages[0].content[0]"
    assert [listed.id async for listed in api.client().files.list()] == []


async def test_pages_that_are_not_there_are_refused(api: Api):
    file = api.files.create("one", "manual.pdf", "user_data", MANUAL)
    messages = [{"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}]
    for pages, why in (("1-4", "no page 4"), ("0", "count from 1"), ("x", "are no pages")):
        with pytest.raises(InvalidRequest, match=why):
            await api.media.resolve_messages(messages, "one", pages)


async def test_long_texts_are_found_by_passage_and_deletion_knows_each(api: Api):
    client = api.client("one")
    store = await client.vector_stores.create()
    long = " ".join(f"word{i}" for i in range(900)) + " zanzibar"
    file = await client.files.create(file=("long.txt", long.encode()), purpose="assistants")
    static: Any = {"type": "static", "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 200}}
    await client.vector_stores.files.create_and_poll(
        file.id, vector_store_id=store.id, chunking_strategy=static, poll_interval_ms=20
    )
    (found, *others) = (await client.vector_stores.search(store.id, query="zanzibar")).data
    assert found.content[0].text.endswith("zanzibar")
    assert len(found.content[0].text) < len(long) / 1.5
    content = api.files.get("one", file.id).content
    assert len(api.files.parts.of(content, "one")) == len(others) + 1 >= 3
    assert api.files.parts.of(content, "two") == []
    assert DYNAMIC_TENANT not in {owner for _, owner in api.deleted}


async def test_eight_writers_leave_what_is_there_and_nothing_else(api: Api):
    store = api.stores.create("busy")
    files = [api.files.create("ops", f"{i}.txt", "assistants", f"text number{i}".encode()) for i in range(16)]

    async def write(mine: Sequence[Any]) -> None:
        for file in mine:
            await asyncio.to_thread(api.stores.add, store.id, "ops", {file.id: {}})
            await api.index(store.id, [file.id])
            if int(file.filename.partition(".")[0]) % 3 == 0:
                await asyncio.to_thread(api.stores.remove, store.id, file.id)
                await api.follow(store.id, [file.id])

    await asyncio.gather(*(write(files[i::8]) for i in range(8)))
    kept = {file.id for file in files if int(file.filename.partition(".")[0]) % 3}
    async with asyncio.timeout(60):
        while any(one.waiting for one in api.retrievers):
            await asyncio.sleep(0.02)
    for one in api.retrievers:
        await one.load()
        index = one._indices[store.id]
        assert (set(index.files), len(index)) == (kept, len(kept))


async def test_an_embedder_behind_a_url_batches_texts_and_tells_what_is_wrong():
    asked: list[dict[str, Any]] = []
    size = [3]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        texts = asked[-1].get("input", ["picture"])
        data = [{"index": i, "embedding": [float(len(text))] + [0.0] * (size[0] - 1)} for i, text in enumerate(texts)]
        return httpx.Response(200, json={"data": data[::-1]})

    embedder = await HttpEmbedder.connect(
        "http://there/v1", "m", key="k", prompts=("q: ", "d: "), has_images=True, transport=httpx.MockTransport(answer)
    )
    assert embedder.dims == 3
    items = [Item("one"), Item(""), Item("three", b"\x89PNG...")]
    vectors = await embedder.embed_documents(items)
    assert [vector.tolist() for vector in vectors] == [[[1.0, 0.0, 0.0]], [], [[1.0, 0.0, 0.0]]]
    assert {"d: one"} == {text for body in asked[1:] for text in body.get("input", ())}
    assert [body["messages"][0]["content"][0]["type"] for body in asked if "messages" in body] == ["image_url"]
    size[0] = 2
    with pytest.raises(EmbedderFailed, match="should have 3"):
        await embedder.embed_queries([Item("one")])


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_file_that_the_embedder_refuses_fails_with_the_reason(tmp_path: Path, status: int):
    def answer(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["input"]
        if any("ferry" in text for text in texts):
            return httpx.Response(status, text="input is too long")
        return httpx.Response(200, json={"data": [{"index": i, "embedding": [1.0]} for i in range(len(texts))]})

    embedder = await HttpEmbedder.connect("http://there/v1", "m", transport=httpx.MockTransport(answer))
    client = Api(tmp_path, embedder).client()
    store = await client.vector_stores.create()
    file = await client.files.create(file=("boats.txt", BOATS.encode()), purpose="assistants")
    async with asyncio.timeout(20):
        added = await client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=20)
    assert (added.status, added.last_error.code) == ("failed", "invalid_file")
    assert f"answered {status}: input is too long" in added.last_error.message
    assert (await client.vector_stores.search(store.id, query="the ferry")).data == []  # by words alone


async def test_a_retriever_starts_without_its_embedder_and_goes_on_with_it(tmp_path: Path):
    is_down = True

    def answer(request: httpx.Request) -> httpx.Response:
        if is_down:
            return httpx.Response(503)
        texts = json.loads(request.content)["input"]
        return httpx.Response(200, json={"data": [{"index": i, "embedding": [1.0]} for i in range(len(texts))]})

    async def connect() -> HttpEmbedder:
        transport = httpx.MockTransport(answer)
        return await HttpEmbedder.connect("http://there/v1", "m", transport=transport, noted=FileStore(tmp_path).tier)

    with pytest.raises(EmbedderFailed, match="503"):
        await connect()
    is_down = False
    before = await connect()
    is_down = True
    embedder = await connect()
    assert (embedder.dims, embedder.fingerprint) == (before.dims, before.fingerprint)
    with pytest.raises(EmbedderFailed):
        await embedder.embed_queries([Item("bees")])
    is_down = False
    assert [vectors.shape for vectors in await embedder.embed_queries([Item("bees")])] == [(1, 1)]


def test_an_embedder_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="lexical, static, model, path"):
        RetrieverSettings(embedder="magic")


async def test_a_known_file_completes_in_another_store_though_nobody_announced_it(api: Api):
    client, first = api.client(), api.retrievers[0]
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    one, other = [(await client.vector_stores.create()).id for _ in range(2)]
    added = await client.vector_stores.files.create_and_poll(file.id, vector_store_id=one, poll_interval_ms=20)
    assert added.status == "completed"
    await asyncio.to_thread(api.stores.add, other, "ops", {file.id: {}})
    async with asyncio.timeout(20):
        while not api.stores.states.of(other):
            await first.load()
            await asyncio.sleep(0.02)


async def test_a_file_completes_though_a_replica_could_not_be_told_at_first(api: Api):
    first, failures = api.retrievers[0], [RoleUnavailable("gone")]

    async def follow(store: str, files: Sequence[str]) -> None:
        if failures:
            raise failures.pop()
        await api.follow(store, files)

    first._follow_all = follow
    client = api.client()
    file = await client.files.create(file=("bees.txt", BEES.encode()), purpose="assistants")
    store = await client.vector_stores.create()
    keeping = asyncio.create_task(first.keep_up())
    try:
        async with asyncio.timeout(20):
            added = await client.vector_stores.files.create_and_poll(
                file_id=file.id, vector_store_id=store.id, poll_interval_ms=20
            )
    finally:
        keeping.cancel()
    assert not failures
    assert added.status == "completed"


def test_a_video_is_no_searchable_file(api: Api):
    with pytest.raises(UnusableFile, match="videos are not searched"):
        api.retrievers[0]._splitter.split(video(), "a" * 64, "ops", None)


def test_the_console_counts_what_is_reused_as_linked():
    (computed,) = re.findall(r"!(\[.*?\])\.includes\(chunk\.operating_point\)", PAGE.read_text())
    assert set(json.loads(computed)) == {point for point in OperatingPoint if not point.is_reuse}


async def test_a_search_without_a_retriever_replica_is_503(api: Api, monkeypatch: pytest.MonkeyPatch):
    async def gone(search: Any) -> Any:
        raise NoReplica("no replica of the retriever role answers")

    monkeypatch.setattr(api, "search", gone)
    client = api.client()
    store = await client.vector_stores.create()
    with pytest.raises(openai.APIStatusError) as error:
        await client.vector_stores.search(store.id, query="x")
    assert error.value.status_code == 503


async def test_a_peer_that_died_fails_no_file_and_one_that_is_cut_off_is_told_again():
    answers: list[Any] = [None, ActorDiedError()]

    async def told(**_: Any) -> list[Any]:
        return answers

    async def follow(*_: Any) -> None:
        pass

    one = object.__new__(Retriever)
    one._indices = SimpleNamespace(follow=follow)
    one._peers = SimpleNamespace(broadcast=lambda *_: SimpleNamespace(results_async=told))
    await one._tell_all("vs", ["file"])
    answers.append(ActorUnavailableError("cut off", bytes(16)))
    with pytest.raises(RoleUnavailable):
        await one._tell_all("vs", ["file"])
