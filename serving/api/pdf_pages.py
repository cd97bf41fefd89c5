"""PDFs of requests as pages: pictures drawn when pixels are needed, or their text.

A page's content id follows from the file's, the way it is drawn, and its number: a page that is stored is linked
without being drawn again. Office files are PDFs once they are converted, which is put off until something is read.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from PIL import Image

from kvstore.records.keys import part_id
from kvstore.uploads.files import FileStore
from kvstore.uploads.renditions import Renditions
from serving.documents import office, pdf
from serving.documents.settings import DocumentSettings
from serving.frontend.errors import InvalidRequest

_KNOWN = 4096  # files whose pages' sizes are kept
_T = TypeVar("_T")


class PageImage(Image.Image):
    """Page that is drawn when its pixels are first read; its size is known before."""

    def __init__(self, opened: OpenedPdf, number: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.opened: OpenedPdf | None = opened  # until it is drawn
        self._number = number
        self._mode, self._size = "RGB", size

    def load(self) -> Any:
        """Draw the page unless it is; all that Pillow does with pixels begins here."""
        if self.opened is not None:
            self.im, self.opened = self.opened.draw(self._number).im, None
        return super().load()


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a PNG file; a page is drawn for it."""
    buffer = io.BytesIO()
    image.load()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


class _Source:
    """A file's bytes as a PDF: those of an office file once it is converted, or was before. Thread-safe.

    Args:
        kept: where PDFs of stored files are, by content id and owner; None: the file is not stored.
    """

    def __init__(
        self, data: bytes, settings: DocumentSettings, kept: Renditions | None, content: str, owner: str
    ) -> None:
        self._data, self._settings, self._kept, self._named = data, settings, kept, (content, owner)
        self._pdf = data if pdf.is_pdf(data) else None
        self._lock = threading.Lock()

    def find(self) -> bool:
        """True if the PDF is there without a conversion."""
        if self._pdf is None and self._kept is not None:
            self._pdf = self._kept.get(*self._named)
        return self._pdf is not None

    def load(self) -> bytes:
        """The PDF; converts the file unless that was done. Raises UnreadablePdf."""
        with self._lock:
            if self._pdf is None:
                self._pdf = office.as_pdf(self._data, self._settings, self._kept, *self._named)
            return self._pdf


class OpenedPdf:
    """A PDF of one request. Thread-safe.

    Args:
        source: gives its bytes.
        content: ids by page, from 0.
        sizes: in pixels, by page.
        readers: what one holds that reads.
    """

    def __init__(
        self,
        source: _Source,
        content: Sequence[str],
        sizes: Sequence[tuple[int, int]],
        settings: DocumentSettings,
        readers: AbstractContextManager[object],
    ) -> None:
        self.source, self.content, self.sizes = source, content, sizes
        self._settings, self._readers = settings, readers
        self._wanted: dict[int, None] = {}  # pages, from 1, that are drawn together
        self._drawn: dict[int, Image.Image] = {}
        self._lock = threading.Lock()

    def image(self, number: int, is_needed: bool) -> PageImage:
        """Picture of a page, from 1; pages that are needed are drawn in one go."""
        if is_needed:
            self._wanted[number] = None
        return PageImage(self, number, self.sizes[number - 1])

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Texts of pages, from 1. Raises UnreadablePdf."""
        data = self.source.load()
        with self._readers:
            _, pages = pdf.read_pages(data, self._settings, numbers, text=True)
        return {page.number: page.text for page in pages}

    def draw(self, number: int) -> Image.Image:
        """A page, from 1, drawn with all that are wanted. Raises UnreadablePdf."""
        with self._lock:
            if number not in self._drawn:
                together = sorted({number, *self._wanted})
                self._wanted.clear()
                most = max(width * height for width, height in self.sizes)
                data = self.source.load()
                with self._readers:
                    _, pages = pdf.read_pages(data, self._settings, together, pixels=True, max_pixels=most)
                self._drawn |= {page.number: pdf.picture(page) for page in pages}
            return self._drawn.pop(number)


@dataclass(frozen=True)
class _Sizes:
    pages: tuple[tuple[int, int], ...]


class PdfPages:
    """Reader of requests' PDFs. Thread-safe.

    `open` blocks. What is `in_turn` waits without a thread for one of those that convert or read: however much one
    tenant sends, the others' images and files find threads.

    Args:
        max_pixels: of a page.
    """

    def __init__(self, settings: DocumentSettings, files: FileStore, max_pixels: int) -> None:
        self.max_bytes = settings.max_pdf_bytes
        self._settings, self._files, self._max_pixels = settings, files, max_pixels
        self._known: OrderedDict[str, _Sizes] = OrderedDict()  # sizes of pages, by content id
        self._lock = threading.Lock()
        self._readers = threading.Semaphore(settings.readers)
        self._reading = ThreadPoolExecutor(settings.readers, "pdf")
        self._converting = ThreadPoolExecutor(office.AT_ONCE, "office")

    def open(self, data: bytes, content: str, owner: str, where: str, is_stored: bool) -> OpenedPdf:
        """Open a PDF or an office file.

        Args:
            is_stored: whether it is a file that may be deleted: its pages are noted for that, and an office file's PDF
                is kept.

        Raises:
            InvalidRequest: it cannot be used, or is too large.
        """
        return self._open(self._source(data, content, owner, where, is_stored), content, owner, where, is_stored)

    async def open_in_turn(self, data: bytes, content: str, owner: str, where: str, is_stored: bool) -> OpenedPdf:
        """See `open`."""
        source = self._source(data, content, owner, where, is_stored)
        call = partial(self._open, source, content, owner, where, is_stored)
        with self._lock:
            is_known = content in self._known
        if is_known:
            return await asyncio.to_thread(call)
        await self._convert(source, where)
        return await asyncio.get_running_loop().run_in_executor(self._reading, call)

    async def read_in_turn(self, opened: OpenedPdf, where: str, call: Callable[[], _T]) -> _T:
        """Result of a call that reads pages or draws them.

        Raises:
            InvalidRequest: they cannot be read.
        """
        await self._convert(opened.source, where)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reading, call)
        except pdf.UnreadablePdf as error:
            raise InvalidRequest(f"{where}: {error}", parameter=where) from error

    async def _convert(self, source: _Source, where: str) -> None:
        try:
            if not await asyncio.to_thread(source.find):
                await asyncio.get_running_loop().run_in_executor(self._converting, source.load)
        except pdf.UnreadablePdf as error:
            raise InvalidRequest(f"{where}: {error}", parameter=where) from error

    def _source(self, data: bytes, content: str, owner: str, where: str, is_stored: bool) -> _Source:
        limit = self._settings.max_pdf_bytes
        if len(data) > limit:
            raise InvalidRequest(
                f"{where}: the document has {len(data)} bytes, at most {limit} are allowed", parameter=where
            )
        return _Source(data, self._settings, self._files.renditions if is_stored else None, content, owner)

    def _open(self, source: _Source, content: str, owner: str, where: str, is_stored: bool) -> OpenedPdf:
        with self._lock:
            known = self._known.get(content)
        if known is None:
            try:
                loaded = source.load()
                with self._readers:
                    _, pages = pdf.read_pages(loaded, self._settings, max_pixels=self._max_pixels)
            except pdf.UnreadablePdf as error:
                raise InvalidRequest(f"{where}: {error}", parameter=where) from error
            known = _Sizes(tuple((page.width, page.height) for page in pages))
            with self._lock:
                self._known[content] = known
                if len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        form, count = pdf.form_of(self._settings), len(known.pages)
        if is_stored:
            ids = self._files.parts.note(content, owner, form, count)
        else:
            ids = [part_id(content, form, number) for number in range(count)]
        return OpenedPdf(source, ids, known.pages, self._settings, self._readers)

    def numbers(self, opened: OpenedPdf, chosen: str | None) -> list[int]:
        """Pages, from 1, that a request chose. Raises InvalidRequest."""
        if chosen is None:
            return list(range(1, len(opened.sizes) + 1))
        try:
            return pdf.parse_pages(chosen, len(opened.sizes))
        except ValueError as error:
            raise InvalidRequest(f"orbit.pages: {error}", parameter="orbit.pages") from error
