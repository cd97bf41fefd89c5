"""PDFs of requests as pages: pictures drawn when pixels are needed, or their text.

A page's content id follows from the file's, the way it is drawn, and its number: a page that is stored is linked
without being drawn again. Office files are PDFs once they are converted, which is put off until something is read.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from PIL import Image

from kvstore.records.keys import part_id
from kvstore.uploads.files import FileStore
from serving.documents import office, pdf
from serving.documents.settings import DocumentSettings
from serving.frontend.errors import InvalidRequest

_KNOWN = 4096  # files whose pages' sizes are kept


class PageImage(Image.Image):
    """Page that is drawn when its pixels are first read; its size is known before."""

    def __init__(self, size: tuple[int, int], draw: Callable[[], Image.Image]) -> None:
        super().__init__()
        self._draw: Callable[[], Image.Image] | None = draw
        self._mode, self._size = "RGB", size

    def load(self) -> Any:
        """Draw the page unless it is; all that Pillow does with pixels begins here."""
        if self._draw is not None:
            self.im, self._draw = self._draw().im, None
        return super().load()


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a PNG file; a page is drawn for it."""
    buffer = io.BytesIO()
    image.load()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


class OpenedPdf:
    """A PDF of one request. Thread-safe.

    `content`, `sizes`: by page, from 0; sizes in pixels. `load`: gives its bytes, or raises UnreadablePdf.
    """

    def __init__(
        self,
        load: Callable[[], bytes],
        content: Sequence[str],
        sizes: Sequence[tuple[int, int]],
        settings: DocumentSettings,
    ) -> None:
        self.content, self.sizes = content, sizes
        self._load, self._settings = load, settings
        self._wanted: dict[int, None] = {}  # pages, from 1, that are drawn together
        self._drawn: dict[int, Image.Image] = {}
        self._lock = threading.Lock()

    def image(self, number: int, is_needed: bool) -> PageImage:
        """Picture of a page, from 1; pages that are needed are drawn in one go."""
        if is_needed:
            self._wanted[number] = None
        return PageImage(self.sizes[number - 1], partial(self._draw, number))

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """Texts of pages, from 1. Raises UnreadablePdf."""
        _, pages = pdf.read_pages(self._load(), self._settings, numbers, text=True)
        return {page.number: page.text for page in pages}

    def _draw(self, number: int) -> Image.Image:
        with self._lock:
            if number not in self._drawn:
                together = sorted({number, *self._wanted})
                self._wanted.clear()
                most = max(width * height for width, height in self.sizes)
                _, pages = pdf.read_pages(self._load(), self._settings, together, pixels=True, max_pixels=most)
                self._drawn |= {page.number: pdf.picture(page) for page in pages}
            return self._drawn.pop(number)


@dataclass(frozen=True)
class _Sizes:
    pages: tuple[tuple[int, int], ...]


class PdfPages:
    """Reader of requests' PDFs. Thread-safe; methods block.

    Args:
        max_pixels: of a page.
    """

    def __init__(self, settings: DocumentSettings, files: FileStore, max_pixels: int) -> None:
        self.max_bytes = settings.max_pdf_bytes
        self._settings, self._files, self._max_pixels = settings, files, max_pixels
        self._known: OrderedDict[str, _Sizes] = OrderedDict()  # sizes of pages, by content id
        self._lock = threading.Lock()
        self._readers = threading.Semaphore(settings.readers)

    def open(self, data: bytes, content: str, owner: str, where: str, is_stored: bool) -> OpenedPdf:
        """Open a PDF or an office file.

        Args:
            is_stored: whether it is a file that may be deleted: its pages are noted for that, and an office file's PDF
                is kept.

        Raises:
            InvalidRequest: it cannot be used, or is too large.
        """
        limit = self._settings.max_pdf_bytes
        if len(data) > limit:
            raise InvalidRequest(
                f"{where}: the document has {len(data)} bytes, at most {limit} are allowed", parameter=where
            )
        kept = self._files.renditions if is_stored else None
        load = cache(partial(office.as_pdf, data, self._settings, kept, content, owner))
        with self._lock:
            known = self._known.get(content)
        if known is None:
            try:
                loaded = load()
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
        return OpenedPdf(load, ids, known.pages, self._settings)

    def numbers(self, opened: OpenedPdf, chosen: str | None) -> list[int]:
        """Pages, from 1, that a request chose. Raises InvalidRequest."""
        if chosen is None:
            return list(range(1, len(opened.sizes) + 1))
        try:
            return pdf.parse_pages(chosen, len(opened.sizes))
        except ValueError as error:
            raise InvalidRequest(f"orbit.pages: {error}", parameter="orbit.pages") from error
