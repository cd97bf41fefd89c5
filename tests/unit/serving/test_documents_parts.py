"""Pages of PDFs and passages of texts, and the bounds on reading them."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pdf_support import pdf as pdf_text
from PIL import Image

from kvstore.uploads.files import FileStore
from serving.cli.demo_rag import pdf_of
from serving.documents import passages, pdf
from serving.documents.settings import DocumentSettings

SETTINGS = DocumentSettings()


def pages_of(count: int) -> bytes:
    shades = [Image.new("RGB", (64, 96), (40 * i, 10, 200)) for i in range(count)]
    return pdf_of(shades, [f"words of page {i + 1}" for i in range(count)])


def test_pages_come_in_the_order_asked_for_with_their_pixels_and_words():
    count, pages = pdf.read_pages(pages_of(4), SETTINGS, [3, 1], text=True, pixels=True)
    assert (count, [page.number for page in pages]) == (4, [3, 1])
    assert [np.array(pdf.picture(page))[5, 5].tolist() for page in pages] == [[80, 10, 200], [0, 10, 200]]
    assert [page.text for page in pages] == ["words of page 3\n", "words of page 1\n"]
    assert all(sum(line[0] for line in page.lines) == len(page.text) for page in pages)
    assert Image.open(io.BytesIO(pdf.png(pages[0]))).size == (64, 96)


@pytest.mark.parametrize("turned", [0, 90, 180, 270])
def test_a_lines_box_is_where_it_is_drawn_however_a_page_is_turned(turned: int):
    _, (page,) = pdf.read_pages(pdf_text(["Bolts and nuts"], turned=turned), SETTINGS, text=True, pixels=True)
    rows, columns = np.nonzero(np.array(pdf.picture(page)).min(axis=2) < 128)
    drawn = [columns.min() / page.width, rows.min() / page.height, columns.max() / page.width, rows.max() / page.height]
    ((_, *box),) = page.lines
    assert box == pytest.approx(drawn, abs=0.01)


def test_pages_that_another_renderer_draws_are_other_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = pdf.form_of(SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr(pdf, "version", lambda name: "99.1rc1+local")
        pdf._renderer.cache_clear()
        other = pdf.form_of(SETTINGS)
    pdf._renderer.cache_clear()
    journal = FileStore(tmp_path).parts
    ids = [journal.note("a" * 64, "one", form, 2) for form in (drawn, other)]
    assert set(ids[0]).isdisjoint(ids[1])
    assert sorted(journal.of("a" * 64, "one")) == sorted(ids[0] + ids[1]), "deletion finds them"


@pytest.mark.parametrize(
    ("changed", "pages", "why", "code"),
    [
        ({"max_pdf_pages": 3}, None, "has 4 pages, at most 3", "too_many_pages"),
        ({"pdf_timeout_s": 0.01}, None, "took longer than 0.01 s", "unreadable_file"),
        ({}, [2, 9], "4 pages, no page 9", "no_such_page"),
    ],
)
def test_a_pdf_beyond_a_bound_is_refused(changed: dict[str, float], pages: list[int] | None, why: str, code: str):
    with pytest.raises(pdf.UnreadablePdf, match=why) as caught:
        pdf.read_pages(pages_of(4), SETTINGS.model_copy(update=changed), pages)
    assert caught.value.code == code


def test_a_page_of_too_many_pixels_is_refused():
    with pytest.raises(pdf.UnreadablePdf, match="64x96 pixels, at most 1000"):
        pdf.read_pages(pages_of(1), SETTINGS, max_pixels=1000)


def test_a_page_that_takes_too_much_memory_breaks_its_process_alone():
    wide = pdf_of([Image.new("RGB", (9000, 9000))], ["wide"])
    tight = SETTINGS.model_copy(update={"pdf_memory_bytes": 192 << 20})
    with pytest.raises(pdf.UnreadablePdf, match=r"too much memory|cannot be used"):
        pdf.read_pages(wide, tight, pixels=True, max_pixels=100_000_000)


@pytest.mark.parametrize("size", [1, 799, 800, 801, 1200, 2001])
def test_passages_cover_a_text_and_overlap(size: int):
    text = " ".join(f"w{i}" for i in range(size))
    ends = np.cumsum([len(word) + 1 for word in text.split(" ")])
    offsets = [(int(end) - len(word) - 1, int(end) - 1) for end, word in zip(ends, text.split(" "), strict=True)]
    found = passages.cut(text, lambda _: offsets)
    assert len(found) == (1 if size <= 800 else 2 + (size - 801) // 400)
    seen = [set(piece.split()) for piece in found]
    assert set().union(*seen) == set(text.split())
    assert all(len(a & b) >= 392 for a, b in pairwise(seen))
    assert all(len(piece) <= 800 for piece in seen)
    assert all(piece in text for piece in found)
