"""Office files as pages: what they are told by, what converting may not do, and what is kept of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from office_support import docx, odp, odt, stand_in, zipped
from pdf_support import pdf
from PIL import Image
from waiting import wait_for

from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.files import files_router
from serving.api.media import MediaResolver
from serving.api.pdf_pages import PdfPages
from serving.api_keys import KeyRing
from serving.cli.doctor import check_office
from serving.documents import office
from serving.documents.passages import tokens_of
from serving.documents.pdf import UnreadablePdf, picture, read_pages
from serving.documents.settings import DocumentSettings
from serving.frontend.errors import InvalidRequest
from serving.retrieval.parts import FileSplitter, UnusableFile
from serving.settings import ApiKey, HttpSettings

PPTX = zipped({"[Content_Types].xml": "", "ppt/presentation.xml": "", "ppt/slides/slide1.xml": ""})
REPORT = docx("Quarterly report", "Sales rose.")
MADE = pdf(["Quarterly report"], ["Sales rose."])
SETTINGS = DocumentSettings(office_timeout_s=20)
Standing = Callable[..., None]


@pytest.fixture
def soffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """Puts a script in LibreOffice's place; without lines it makes `MADE` of every file."""
    (tmp_path / "made.pdf").write_bytes(MADE)

    def place(*script: str) -> None:
        folder = stand_in(tmp_path / "bin", script or [f'cp "{tmp_path}/made.pdf" "$OUT"'])
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return place


@pytest.fixture
def no_soffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


class Api:
    """Uploads over HTTP, and what reads them."""

    def __init__(self, folder: Path) -> None:
        self.files = FileStore(folder / "files")
        self.stores = VectorStores(self.files)
        self.pdfs = PdfPages(SETTINGS, self.files, 33_000_000)
        self.media = MediaResolver(HttpSettings(), self.files, self.stores, pdfs=self.pdfs)
        self.splitter = FileSplitter(self.files, SETTINGS, tokens_of(folder), has_images=False)
        self.app = FastAPI()
        self.app.include_router(files_router(self.files, self.stores, self.media, 1 << 20, self._forget))
        self.app.add_middleware(Authenticate, KeyRing({"one": ApiKey(tenant="one")}))
        answer_errors(self.app)

    async def _forget(self, content: str, owner: str) -> None:
        pass

    async def upload(self, data: bytes, name: str = "report.docx") -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(
                "/v1/files",
                headers={"Authorization": "Bearer one"},
                data={"purpose": "assistants"},
                files={"file": (name, data)},
            )

    async def pages(self, file: dict[str, Any]) -> list[str]:
        """Content ids of what a chat's file part becomes."""
        message = {"role": "user", "content": [{"type": "file", "file": file}]}
        (resolved,) = await self.media.resolve_messages([message], "one")
        return [part["uuid"] for part in resolved["content"]]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("docx", REPORT),
        ("docx", zipped({"[Content_Types].xml": "", "word/document2.xml": ""})),
        ("pptx", PPTX),
        ("odt", odt("words")),
        ("odp", odp("words")),
        ("html", b"<!DOCTYPE html><p>words"),
        ("html", b"\xef\xbb\xbf\n<?xml version='1.0'?>\n<!-- a -- b -->\n<HTML lang=en><p>words"),
        (None, b"PK\x03\x04 and no more"),
        (None, REPORT[: len(REPORT) // 2]),
        (None, zipped({"xl/workbook.xml": "", "[Content_Types].xml": ""})),
        (None, zipped({"mimetype": "application/epub+zip", "a.xhtml": ""})),
        (None, b"How to write <html>: begin with <!doctype html>."),
        (None, b"<htmlish>"),
        (None, b"<!-->" * 1000),  # in a time that does not double with each
        (None, MADE),
        (None, b""),
    ],
)
def test_a_kind_is_told_by_the_content_alone(kind: str | None, data: bytes):
    assert office.kind_of(data) == kind
    assert office.has_pages(data) == (kind is not None or data == MADE)


@pytest.mark.parametrize(("kind", "data"), [("docx", REPORT), ("pptx", PPTX), ("html", b"<html>words")])
@pytest.mark.usefixtures("no_soffice")
async def test_without_libreoffice_a_file_is_refused_by_its_kind_wherever_it_comes(
    tmp_path: Path, kind: str, data: bytes
):
    api, told = Api(tmp_path), f"a {kind} file is read through LibreOffice, which is not installed"
    answer = await api.upload(data, "named.txt")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (400, "file")
    assert told in error["message"]
    inline = {"filename": "named.pdf", "file_data": f"data:text/plain;base64,{b64encode(data).decode()}"}
    with pytest.raises(InvalidRequest, match=told) as refused:
        await api.pages(inline)
    assert refused.value.parameter == "messages[0].content[0]"
    with pytest.raises(UnusableFile, match=told) as unusable:
        api.splitter.split(data, "content", "one", None)
    assert unusable.value.code == "unsupported_file"
    assert "not installed" in check_office().detail


async def test_an_upload_becomes_the_same_pages_in_a_chat_and_in_a_store(tmp_path: Path, soffice: Standing):
    soffice()
    api = Api(tmp_path)
    file = (await api.upload(REPORT)).json()
    assert api.files.content("one", file["id"]) == REPORT, "what is downloaded is what was sent"
    content = api.files.get("one", file["id"]).content
    split = api.splitter.split(REPORT, content, "one", None)
    assert [(part.page, part.text) for part in split.parts] == [(1, "Quarterly report\n"), (2, "Sales rose.\n")]
    assert await api.pages({"file_id": file["id"]}) == [part.content for part in split.parts]
    drawn = api.pdfs.open(REPORT, content, "one", "file", is_stored=True).image(2, is_needed=True)
    assert drawn.convert("L").getextrema() == (0, 255)
    assert check_office().detail.endswith("/bin/soffice")


async def test_an_upload_is_converted_once_and_its_pdf_goes_with_it(tmp_path: Path, soffice: Standing):
    soffice()
    api = Api(tmp_path)
    file = api.files.get("one", (await api.upload(REPORT)).json()["id"])
    soffice("exit 1")
    other = Api(tmp_path)  # another process
    assert len(await other.pages({"file_id": file.id})) == 2
    with pytest.raises(InvalidRequest, match="LibreOffice makes no PDF"):
        await other.pages({"file_data": f"data:;base64,{b64encode(docx('another')).decode()}"})
    assert (file.content, "one") not in api.stores.unheld()
    api.files.delete("one", file.id)
    assert (file.content, "one") in api.stores.unheld()
    api.files.parts.settle(file.content, "one")
    assert api.files.renditions.get(file.content, "one") is None


async def test_files_that_wait_to_be_converted_take_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = threading.Event()

    def converted(*_: Any) -> bytes:
        gate.wait()
        return MADE

    def inline(data: bytes) -> dict[str, Any]:
        return {"file_data": f"data:;base64,{b64encode(data).decode()}"}

    monkeypatch.setattr(office, "to_pdf", converted)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    api = Api(tmp_path)
    waiting = [asyncio.create_task(api.pages(inline(docx(f"report {n}")))) for n in range(5)]
    uploads = [asyncio.create_task(api.upload(docx(f"upload {n}"))) for n in range(5)]
    await asyncio.sleep(0.05)
    try:
        assert len(await asyncio.wait_for(api.pages(inline(MADE)), 20)) == 2
    finally:
        gate.set()
    assert [len(pages) for pages in await asyncio.gather(*waiting)] == [2] * 5
    assert {answer.status_code for answer in await asyncio.gather(*uploads)} == {200}


async def test_no_more_pdfs_are_read_at_once_than_there_are_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    running, most, lock, read = 0, 0, threading.Lock(), read_pages

    def counted(*given: Any, **asked: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        found = read(*given, **asked)
        time.sleep(0.02)  # others would come
        with lock:
            running -= 1
        return found

    monkeypatch.setattr("serving.documents.pdf.read_pages", counted)
    pdfs = PdfPages(SETTINGS.model_copy(update={"readers": 1}), FileStore(tmp_path / "files"), 33_000_000)

    def texts_and_picture(name: str) -> None:
        opened = pdfs.open(MADE, name, "one", "file", is_stored=False)
        assert opened.texts([2]) == {2: "Sales rose.\n"}
        assert opened.image(2, is_needed=True).convert("L").getextrema() == (0, 255)

    await asyncio.gather(*(asyncio.to_thread(texts_and_picture, f"{n:064x}") for n in range(3)))
    assert most == 1


def test_a_pdf_that_is_kept_after_its_file_went_is_found_by_the_next_sweep(tmp_path: Path):
    api = Api(tmp_path)
    api.files.renditions.put("0123abc", "one", MADE)
    assert api.stores.unheld() == [("0123abc", "one")]


@pytest.mark.parametrize(
    "script",
    ["exit 77", "kill -SEGV $$", ': > "$OUT"', 'echo "no PDF" > "$OUT"'],
    ids=["fails", "crashes", "empty", "no PDF"],
)
def test_a_conversion_that_fails_is_that_files_error(soffice: Standing, script: str):
    soffice(script)
    with pytest.raises(UnreadablePdf, match="LibreOffice makes no PDF of the docx file"):
        office.to_pdf(REPORT, "docx", SETTINGS)


def test_a_conversion_that_hangs_ends_in_time(soffice: Standing):
    soffice("sleep 60")
    with pytest.raises(UnreadablePdf, match=r"converting the docx file took longer than 0\.5 s"):
        office.to_pdf(REPORT, "docx", SETTINGS.model_copy(update={"office_timeout_s": 0.5}))


@pytest.mark.parametrize("ends", [False, True])
def test_no_process_of_a_conversion_outlives_it(tmp_path: Path, soffice: Standing, ends: bool):
    left = tmp_path / "left"
    soffice("sleep 60 &", f'echo $! > "{left}"', "exit 0" if ends else "sleep 60")
    with pytest.raises(UnreadablePdf):
        office.to_pdf(REPORT, "docx", SETTINGS.model_copy(update={"office_timeout_s": 20.0 if ends else 5.0}))
    pid = int(left.read_text())

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # its parent, not this process, is to read it
        except psutil.NoSuchProcess:
            return True

    wait_for(has_ended)


def test_a_conversion_has_bounds_a_profile_of_its_own_and_nothing_of_the_service(
    tmp_path: Path, soffice: Standing, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the service")
    said = tmp_path / "said"
    said.mkdir()
    soffice(
        f'(ulimit -v; ulimit -t; ulimit -f; ulimit -c) > "{said}/limits"',
        f'env > "{said}/env"; cat /proc/$$/net/dev > "{said}/net"',
        f'for A; do case "$A" in -env:UserInstallation=file://*) cp "${{A#*file://}}"/user/*.xcu "{said}"; esac; done',
        f'cp "{tmp_path}/made.pdf" "$OUT"',
    )
    before = set(os.listdir(os.environ.get("TMPDIR", "/tmp")))
    made = office.to_pdf(REPORT, "docx", SETTINGS)
    assert [page.text for page in read_pages(made, SETTINGS, text=True)[1]] == ["Quarterly report\n", "Sales rose.\n"]
    kib, blocks = SETTINGS.office_memory_bytes >> 10, SETTINGS.max_pdf_bytes >> 9
    assert (said / "limits").read_text().split() == [str(kib), "20", str(blocks), "0"]
    assert "of the service" not in (said / "env").read_text()
    assert "DisableMacrosExecution" in (said / "registrymodifications.xcu").read_text()
    if office._without_network():
        names = [line.split(":")[0].strip() for line in (said / "net").read_text().splitlines() if ":" in line]
        assert names == ["lo"]
    assert not [name for name in set(os.listdir(os.environ.get("TMPDIR", "/tmp"))) - before if "office" in name]


REAL = pytest.mark.skipif(office.converter() is None, reason="LibreOffice is not installed: no `soffice` on PATH")


@REAL
@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("docx", docx("Quarterly report")),
        ("odt", odt("Quarterly report")),
        ("odp", odp("Quarterly report")),
        ("html", b"<!doctype html><title>t</title><h1>Quarterly report</h1>"),
    ],
)
def test_libreoffice_converts_every_kind(kind: str, data: bytes):
    assert office.kind_of(data) == kind
    count, pages = read_pages(office.to_pdf(data, kind, DocumentSettings()), SETTINGS, text=True)
    assert (count, "Quarterly report" in pages[0].text) == (1, True)


@REAL
def test_libreoffice_reads_no_file_that_a_document_names(tmp_path: Path):
    """Which it does without a profile that forbids it: the page shows the picture then."""
    red = 255, 0, 0
    Image.new("RGB", (50, 50), red).save(tmp_path / "secret.png")
    url = (tmp_path / "secret.png").as_uri()
    shown = f'<!doctype html><p>words<img src="{url}" width="50" height="50">'
    for kind, data in (("odt", odt("words", image=url)), ("html", shown.encode())):
        _, (page,) = read_pages(office.to_pdf(data, kind, DocumentSettings()), SETTINGS, text=True, pixels=True)
        assert page.text == "words\n"
        assert red not in {colour for _, colour in picture(page).getcolors(1 << 20)}
