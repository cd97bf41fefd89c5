"""A file's parts, as they are indexed: pages of documents, passages of texts, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.search.index import Part
from kvstore.uploads.files import FileStore
from serving.documents import office, passages, pdf
from serving.documents.passages import Offsets, as_text
from serving.documents.settings import DocumentSettings
from serving.documents.video import is_video
from serving.retrieval.embedders.base import Item

WHOLE = "whole"  # form of a file that is one part: its content id is the file's


class UnusableFile(ValueError):
    """A file that cannot be indexed; `code` as OpenAI's `last_error` has it."""

    def __init__(self, message: str, code: str = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class TakenApart:
    """A file's parts, and what an embedder sees of each. `form`: the way it was taken apart."""

    form: str
    parts: Sequence[Part]
    items: Sequence[Item]


class FileSplitter:
    """Splitter of files into parts. Thread-safe.

    Args:
        offsets: of a text's tokens.
        has_images: whether pictures of pages are wanted, for an embedder that sees them.
    """

    def __init__(self, files: FileStore, settings: DocumentSettings, offsets: Offsets, has_images: bool) -> None:
        self._files, self._settings, self._offsets, self._has_images = files, settings, offsets, has_images

    def forms(self, chunking: Sequence[int] | None) -> tuple[str, ...]:
        """The ways in which a file of any kind may be taken apart."""
        return pdf.form_of(self._settings), passages.form_of(*(chunking or _DEFAULT)), WHOLE

    def split(self, data: bytes, content: str, owner: str, chunking: Sequence[int] | None) -> TakenApart:
        """Take a file apart; notes its parts for deletion first. Blocks.

        Raises:
            UnusableFile: a PDF or office file that cannot be read, or a video.
        """
        if is_video(data):
            raise UnusableFile("videos are not searched; name the file in a chat", "unsupported_file")
        pages, passages_form, whole = self.forms(chunking)
        if office.has_pages(data):
            return self._pages(data, content, owner, pages)
        text, form = as_text(data), passages_form
        if text is None:
            return TakenApart(whole, [Part(0, content)], [Item(image=data)])
        texts = passages.cut(text, self._offsets, *(chunking or _DEFAULT))
        if len(texts) == 1:
            return TakenApart(form, [Part(0, content, text)], [Item(text)])
        ids = self._files.parts.note(content, owner, form, len(texts))
        parts = [Part(i, one, piece) for i, (one, piece) in enumerate(zip(ids, texts, strict=True))]
        return TakenApart(form, parts, [Item(piece) for piece in texts])

    def passage(self, data: bytes, number: int, chunking: Sequence[int] | None) -> str | None:
        """The text of one passage; None if there is none of that number any more."""
        text = as_text(data)
        found = [] if text is None else passages.cut(text, self._offsets, *(chunking or _DEFAULT))
        return found[number] if number < len(found) else None

    def _pages(self, data: bytes, content: str, owner: str, form: str) -> TakenApart:
        try:
            data = office.as_pdf(data, self._settings, self._files.renditions, content, owner)
            count, pages = pdf.read_pages(data, self._settings, text=True, pixels=self._has_images)
        except pdf.UnreadablePdf as error:
            raise UnusableFile(str(error), error.code) from error
        ids = self._files.parts.note(content, owner, form, count)
        parts = [Part(i, ids[i], page.text, page.number, page.lines) for i, page in enumerate(pages)]
        return TakenApart(form, parts, [Item(page.text, pdf.png(page) if page.rgb else None) for page in pages])


_DEFAULT = (passages.MAX_TOKENS, passages.OVERLAP_TOKENS)
