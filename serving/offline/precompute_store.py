"""Vector stores in the offline caching job: pictures, and pages of documents, file by file.

    vs_…  →  manifest: a picture an entry, and RUN pages of a PDF, which a search shows in this order when it finds them
    entry →  vector-store:///vs_…/file-…?page=3  →  content id, and the picture when something of it is missing

Texts are left out: their tokens are all that there is to store of them before they are asked about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from kvstore.errors import StoreError, UnknownFile
from kvstore.records.keys import DYNAMIC_TENANT, is_shared
from kvstore.uploads.files import FileStore
from kvstore.uploads.references import Reference
from kvstore.uploads.vector_stores import VectorStores
from serving.api.errors import TooLarge
from serving.api.images import ResolvedImage
from serving.api.media import MediaResolver
from serving.api.pdf_pages import OpenedPdf, PdfPages
from serving.config import OrbitServeConfig
from serving.documents.office import has_pages
from serving.documents.passages import as_text
from serving.documents.pdf import UnreadablePdf
from serving.frontend.errors import InvalidRequest
from serving.offline.precompute_manifest import ManifestError

RUN = 4  # pages of an entry: as many as a search finds by default
_STORE = re.compile(r"vs_\w+")
_SCHEME = "vector-store"


class StoredPicture(NamedTuple):
    """A picture or page of a vector store; `open` reads its pixels.

    `owner`: tenant of what is computed of it.
    """

    content: str
    owner: str
    open: Callable[[], ResolvedImage]


class StorePictures:
    """Pictures and pages of vector stores. Thread-safe; methods block."""

    def __init__(self, config: OrbitServeConfig, files: FileStore, media: MediaResolver) -> None:
        self._files, self._stores, self._media = files, VectorStores(files), media
        self._pdfs = PdfPages(config.documents, files, config.http.max_image_pixels)

    def rows(self, store: str) -> Iterator[dict[str, Any]]:
        """Rows of a manifest of all files of a store, in the order in which they were added.

        A document that cannot be read is a row, too, and fails by name.

        Raises:
            StoreError: there is no such store, or it cannot be read.
        """
        for reference in self._stores.references(store):
            try:
                name = self._files.get(reference.tenant, reference.file).filename
                pages = self._pages(reference)
            except UnknownFile:  # deleted or expired, and about to be swept from the store
                continue
            row = {"tenant": _owner(reference)}
            if pages is None:
                continue
            if not pages:
                yield {**row, "id": name, "url": _location(reference)}
            for first in range(1, pages + 1, RUN):
                last = min(first + RUN - 1, pages)
                images = [{"url": _location(reference, page)} for page in range(first, last + 1)]
                yield {**row, "id": f"{name}, pages {first} to {last}", "images": images}

    def find(self, location: str) -> StoredPicture | None:
        """Picture or page that a manifest's row names; None: another kind of location.

        Raises:
            StoreError: it is not there, or no longer. InvalidRequest, TooLarge: it cannot be used.
        """
        if not location.startswith(f"{_SCHEME}://"):
            return None
        parts = urlsplit(location)
        store, _, file = parts.path.strip("/").partition("/")
        reference = self._stores.reference(store, file)
        owner, page = _owner(reference), parse_qs(parts.query).get("page")
        if page is None:
            data = self._stores.bytes_of(reference)
            return StoredPicture(reference.content, owner, partial(self._media.open, data, owner, reference.file))
        opened, number = self._opened(reference), int(page[0])
        if not 1 <= number <= len(opened.sizes):
            raise InvalidRequest(f"{reference.file} has no page {number}")
        return StoredPicture(opened.content[number - 1], owner, partial(_drawn, opened, number))

    def _opened(self, reference: Reference) -> OpenedPdf:
        data = self._stores.bytes_of(reference)
        return self._pdfs.open(data, reference.content, _owner(reference), reference.file, is_stored=True)

    def _pages(self, reference: Reference) -> int | None:
        """Pages of a PDF; 0: a picture, or a PDF that cannot be read; None: a text."""
        data = self._stores.bytes_of(reference)
        if has_pages(data):
            try:
                return len(self._opened(reference).sizes)
            except (InvalidRequest, TooLarge):
                return 0
        return None if as_text(data) is not None else 0


@contextmanager
def manifest_of(location: str, config: OrbitServeConfig) -> Iterator[str]:
    """Location of a manifest: of a vector store's id one that is written for it, else as it is.

    Raises:
        ManifestError: the store is not there, or has neither pictures nor pages.
    """
    if not _STORE.fullmatch(location):
        yield location
        return
    files = FileStore(config.files_url, config.files)
    media = MediaResolver(config.http, files, VectorStores(files))
    with TemporaryDirectory(prefix="orbitserve-store-") as folder:
        path = Path(folder) / f"{location}.jsonl"
        try:
            lines = [json.dumps(row) for row in StorePictures(config, files, media).rows(location)]
        except StoreError as error:
            raise ManifestError(f"{location}: {error}") from error
        if not lines:
            raise ManifestError(f"{location}: the vector store has neither pictures nor pages")
        path.write_text("\n".join(lines) + "\n")
        yield str(path)


def _drawn(opened: OpenedPdf, number: int) -> ResolvedImage:
    image = opened.image(number, is_needed=True)
    try:
        image.load()
    except UnreadablePdf as error:
        raise InvalidRequest(str(error)) from error
    return ResolvedImage(opened.content[number - 1], image)


def _owner(reference: Reference) -> str:
    """Tenant of what is computed of a reference."""
    return DYNAMIC_TENANT if is_shared(reference.content) else reference.tenant


def _location(reference: Reference, page: int | None = None) -> str:
    at = f"{_SCHEME}:///{reference.store}/{reference.file}"
    return at if page is None else f"{at}?page={page}"
