"""PDFs as pages: pictures and text with boxes, by pdfium in a bounded process."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from kvstore.search.index import Line
from serving.documents.bounded_child import Child, bounded_child
from serving.documents.settings import DocumentSettings

_CHILD = Path(__file__).with_name("pdf_child.py")
_HEADER = re.compile(rb"%PDF-\d\.\d")  # within the first 1024 bytes, by the PDF specification
_WITHIN = 1024
_PARTS = (b"endobj", b"startxref", b"%%EOF")  # what a text that only speaks of PDFs does not have besides


class UnreadablePdf(ValueError):
    """A PDF, or a page of one, that cannot be used; `code` says why in a word."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Page:
    """A page of a PDF.

    `number` from 1; size in pixels; `lines` cover `text` in order; `rgb`: height · width · 3 bytes, empty if they were
    not asked for.
    """

    number: int
    width: int
    height: int
    text: str = ""
    lines: tuple[Line, ...] = ()
    rgb: bytes = b""


def is_pdf(data: bytes) -> bool:
    """True for a PDF, also one whose header stands behind other bytes."""
    start = data[:_WITHIN].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"%PDF-"):
        return True
    return bool(_HEADER.search(data[: _WITHIN + 8])) and any(part in data for part in _PARTS)


def form_of(settings: DocumentSettings) -> str:
    """The way PDFs are drawn: pages drawn otherwise are other chunks."""
    return f"pages-{settings.dpi}-1-{_renderer()}"


@cache
def _renderer() -> str:
    """Version of what draws: another one may draw other pixels."""
    try:
        return re.sub(r"[^A-Za-z0-9.]", "-", version("pypdfium2"))
    except PackageNotFoundError:
        return "none"


def read_pages(
    data: bytes,
    settings: DocumentSettings,
    pages: Sequence[int] | None = None,
    *,
    text: bool = False,
    pixels: bool = False,
    max_pixels: int = 33_000_000,
) -> tuple[int, list[Page]]:
    """The number of pages of a PDF, and those asked for; blocks for as long as that takes.

    Args:
        pages: from 1; None: all.
        max_pixels: of a page.

    Raises:
        UnreadablePdf: encrypted, broken, too long, without pages; a page that was asked for is not there or cannot be
            drawn; or reading took more memory or time than is allowed.
    """
    job = {
        "site": str(Path(str(_pdfium())).parent.parent),
        "max_pages": settings.max_pdf_pages,
        "max_pixels": max_pixels,
        "dpi": settings.dpi,
        "pages": None if pages is None else [page - 1 for page in pages],
        "text": text,
        "pixels": pixels,
    }
    with bounded_child(_CHILD, job, data, settings.pdf_timeout_s, settings.pdf_memory_bytes) as child:
        count, found = _read(child, max_pixels)
    late = child.is_late
    if count is None or (pages is None and len(found) < count):
        why = f"took longer than {settings.pdf_timeout_s:g} s" if late else "took too much memory, or broke the reader"
        raise UnreadablePdf(f"reading the PDF {why}", "unreadable_file")
    if pages is not None and (missing := [page for page in pages if page not in {one.number for one in found}]):
        if all(page <= count for page in missing):
            why = f"took longer than {settings.pdf_timeout_s:g} s" if late else "broke the reader"
            raise UnreadablePdf(f"page {missing[0]} of the PDF {why}", "unreadable_file")
        raise UnreadablePdf(f"the PDF has {count} pages, no page {max(missing)}", "no_such_page")
    return count, found


def _read(child: Child, max_pixels: int) -> tuple[int | None, list[Page]]:
    """Answers of the child, as far as they come; it is no more trusted than the PDF."""
    head = child.line()
    if head is None:
        return None, []
    if "error" in head:
        raise UnreadablePdf(str(head["error"]), str(head["code"]))
    found = list(_pages(child, max_pixels))
    return int(head["pages"]), found


def _pages(child: Child, max_pixels: int) -> Iterator[Page]:
    while (line := child.line()) is not None:
        number = int(line["page"]) + 1
        if "error" in line:
            raise UnreadablePdf(f"page {number} of the PDF cannot be used: {line['error']}", str(line["code"]))
        width, height = int(line["width"]), int(line["height"])
        size = int(line["bytes"])
        if width * height > max_pixels or size not in (0, width * height * 3):
            return
        rgb = child.stdout.read(size)
        if len(rgb) < size:
            return
        lines = tuple(tuple(each) for each in line.get("lines", ()))
        yield Page(number, width, height, line.get("text", ""), lines, rgb)


def _pdfium() -> str | None:
    spec = find_spec("pypdfium2")
    return None if spec is None else spec.origin


def parse_pages(value: str, count: int) -> list[int]:
    """Page numbers of "1-3,7", from 1, in the order given, each once.

    Raises:
        ValueError: it cannot be read, or names a page that is not there.
    """
    found: dict[int, None] = {}
    for piece in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6}))?\s*", piece)
        if match is None:
            raise ValueError(f"{value!r} are no pages, such as '1-3,7'")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ValueError(f"{piece.strip()!r} are no pages: they count from 1, and a range goes up")
        if last > count:
            raise ValueError(f"there is no page {last}: the PDF has {count}")
        found.update(dict.fromkeys(range(first, last + 1)))
    return list(found)


def picture(page: Page) -> Image.Image:
    """A page that was drawn, as an image."""
    return Image.frombytes("RGB", (page.width, page.height), page.rgb)


def png(page: Page) -> bytes:
    """A page that was drawn, as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture(page).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
