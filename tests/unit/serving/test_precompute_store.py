"""Vector stores as manifests: every picture and page is named, by the content id that requests know it by."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from pdf_support import pdf
from PIL import Image

from kvstore.errors import UnknownVectorStore
from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.media import MediaResolver
from serving.api.pdf_pages import PdfPages
from serving.config import OrbitServeConfig
from serving.frontend.errors import InvalidRequest
from serving.offline.precompute_manifest import Manifest, ManifestError
from serving.offline.precompute_store import RUN, StorePictures, manifest_of

PAGES = 6


class Stored:
    """A vector store with a PDF, a picture and a text; `owner`: a tenant, or DYNAMIC_TENANT."""

    def __init__(self, folder: Path, owner: str) -> None:
        values = {"model": {"path": folder}, "files_url": str(folder / "files")}
        self.config = OrbitServeConfig.model_validate(values)
        self.files = FileStore(self.config.files_url, self.config.files)
        stores = VectorStores(self.files)
        buffer = io.BytesIO()
        Image.new("RGB", (56, 56), (200, 0, 0)).save(buffer, "PNG")
        contents = {
            "six.pdf": pdf(*([f"page {number}"] for number in range(PAGES)), size="200 200"),
            "red.png": buffer.getvalue(),
            "bees.txt": b"Bees live in hives.",
        }
        self.ids = {name: self.files.create("one", name, "assistants", data).id for name, data in contents.items()}
        self.store = stores.create("all", None, {}, None, owner).id
        stores.add(self.store, "one", {file: {} for file in self.ids.values()})
        pdfs = PdfPages(self.config.documents, self.files, 1_000_000)
        self.media = MediaResolver(self.config.http, self.files, stores, pdfs=pdfs)

    @property
    def pictures(self) -> StorePictures:
        return StorePictures(self.config, self.files, self.media)


@pytest.mark.parametrize("owner", [DYNAMIC_TENANT, "one"])
async def test_what_a_store_shows_is_named_as_requests_name_it(tmp_path: Path, owner: str):
    stored = Stored(tmp_path, owner)
    with manifest_of(stored.store, stored.config) as location:
        entries = list(Manifest(location).entries())
    assert [entry.error for entry in entries] == [None] * 3
    assert [len(entry.images) for entry in entries if entry.name.startswith("six")] == [RUN, PAGES - RUN]
    assert {entry.tenant for entry in entries} == {owner}
    found = [stored.pictures.find(one.location or "") for entry in entries for one in entry.images]
    parts = [{"type": "file", "file": {"file_id": stored.ids[name]}} for name in ("six.pdf", "red.png")]
    (asked,) = await stored.media.resolve_messages([{"role": "user", "content": parts}], "one")
    named = {part["uuid"] for part in asked["content"]}
    assert {one.content for one in found if one} == named
    for one in found:
        assert one is not None
        opened = one.open()
        assert (opened.content, one.owner) == (one.content, owner)
        assert opened.image.convert("RGB").getextrema()[0][1] > 100  # drawn: white paper, or red


def test_what_is_not_there_is_told_by_name(tmp_path: Path):
    stored = Stored(tmp_path, "one")
    with pytest.raises(ManifestError, match="vs_1"), manifest_of("vs_1", stored.config):
        pass
    with pytest.raises(InvalidRequest, match="has no page 7"):
        stored.pictures.find(f"vector-store:///{stored.store}/{stored.ids['six.pdf']}?page=7")
    with pytest.raises(UnknownVectorStore):
        stored.pictures.find("vector-store:///vs_1/file-1")
    assert stored.pictures.find("https://pictures.example/one.png") is None
    with manifest_of("pictures", stored.config) as location:
        assert location == "pictures"


def test_a_file_that_is_gone_leaves_the_others(tmp_path: Path):
    stored = Stored(tmp_path, "one")
    with_all = Stored(tmp_path / "all", "one")
    stored.files.delete("one", stored.ids["red.png"])
    names = []
    for one in (with_all, stored):
        with manifest_of(one.store, one.config) as location:
            names.append({entry.name for entry in Manifest(location).entries()})
    assert names[0] - names[1] == {"red.png"}
    assert names[1] < names[0]
