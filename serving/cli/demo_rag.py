"""The demos of retrieval: pages of PDFs, or notes, that are found by a question, and linked."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image
from rich.console import Console
from rich.markup import escape

from infra.reference import DEFAULT_MODEL, weights
from serving.cli.demo import Answer, Demo, answered, compare, open_client, show, wait_until_formed
from serving.cli.demo_pages import PAGES, Story
from serving.cli.demo_texts import FIRST, NOTES, SECOND, Texts

NOTEBOOKS = ("alder", "birch", "cedar", "maple")
_DPI = 96  # of `documents.dpi`: a picture's pixels are the page's


class Rag(Demo):
    """Retrieval from drawn pages (bundled model), notes (SmolLM2) or a folder of files.

    Args:
        seed: of an earlier run's pages; None: new ones.
        folder: files to ask about, in words that are typed; None: the notebooks, or the notes.
        model: `bundled`, `smollm2`, or a checkpoint's directory; the last needs a folder.
    """

    how_to_go_on = """
your own documents, while a server runs (`make demo-rag KEEP=1`): open {url}/console, or
  curl {url}/v1/files -F purpose=assistants -F file=@manual.pdf
  curl {url}/v1/vector_stores -H 'Content-Type: application/json' -d '{{"name": "manuals", "file_ids": ["file-..."]}}'
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{model}", "messages": [
    {{"role": "user", "content": "What is this?"}}], "orbit": {{"retrieve": {{"vector_store_ids": ["vs_..."]}}}}}}'"""

    def __init__(self, seed: int | None = None, folder: Path | None = None, model: str = "bundled") -> None:
        self._seed = time.time_ns() if seed is None else seed
        self._folder, self._model = folder, model
        self.title = f"{f'bundled model {DEFAULT_MODEL}' if model == 'bundled' else model}, with a retriever"

    def model(self) -> dict[str, Any]:
        if self._model == "smollm2":
            return Texts().model()
        if self._model != "bundled":
            return {"path": Path(self._model)}
        return {"path": weights(DEFAULT_MODEL), "dtype": "float32", "max_model_len": 4096}

    def converse(self, console: Console, url: str, model: str) -> bool:
        client = open_client(url)
        store = client.vector_stores.create(name="demo").id
        if self._folder is not None:
            return self._upload(console, client, store, self._folder)
        if self._model != "bundled":
            return _ask_notes(console, client, model, store)
        stories = [Story.drawn(self._seed + i) for i in range(len(NOTEBOOKS))]
        for name, story in zip(NOTEBOOKS, stories, strict=True):
            pictures = [Image.open(BytesIO(picture)).convert("RGB") for picture in story.pictures]
            words = [f"notebook {name} page {i + 1}" for i in range(len(pictures))]
            file = client.files.create(file=(f"{name}.pdf", pdf_of(pictures, words)), purpose="assistants").id
            added = client.vector_stores.files.create_and_poll(file, vector_store_id=store, poll_interval_ms=100)
            console.print(f"{name}.pdf: {len(pictures)} pages, {added.status}")
        story, about = stories[0], f"notebook {NOTEBOOKS[0]}"
        first = _ask(client, model, store, about, story.questions[0])
        right = self._show(console, "first question", first, story, 0)
        wait_until_formed()
        second = _ask(client, model, store, about, story.questions[1])
        right &= self._show(console, "second question, of the same pages", second, story, 1)
        return compare(console, first, second) and right

    @staticmethod
    def _show(console: Console, title: str, answer: Answer, story: Story, asked: int) -> bool:
        retrieval = answer.orbit["retrieval"]
        pages = ", ".join(f"{one['filename']} page {one['page']} ({one['score']:.2f})" for one in retrieval["results"])
        console.print(f"found by '{escape(retrieval['query'])}': {pages}")
        found = {(one["filename"], one["page"]) for one in retrieval["results"]}
        wanted = {(f"{NOTEBOOKS[0]}.pdf", page + 1) for page in range(PAGES.pages)}
        if found != wanted:
            console.print(f"[red]wrong pages: they are of {NOTEBOOKS[0]}.pdf[/red]")
        question = f"{story.questions[asked]} ({story.hints[asked]})"
        said = show(console, title, question, answer, story.answers[asked], answer.text == story.answers[asked])
        return said and found == wanted

    @staticmethod
    def _upload(console: Console, client: OpenAI, store: str, folder: Path) -> bool:
        """Put a folder's files into the store; they are asked about in the browser."""
        good = True
        for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
            file = client.files.create(file=(path.name, path.read_bytes()), purpose="assistants").id
            added = client.vector_stores.files.create_and_poll(file, vector_store_id=store, poll_interval_ms=100)
            why = f": {added.last_error.message}" if added.last_error else ""
            console.print(f"{path.name}: {added.status}{why}", markup=False)
            good &= added.status == "completed"
        console.print(f"vector store: {store}")
        return good


def _ask_notes(console: Console, client: OpenAI, model: str, store: str) -> bool:
    """Ask two questions that one of three notes answers."""
    for name, note in NOTES.items():
        file = client.files.create(file=(name, note.encode()), purpose="assistants").id
        added = client.vector_stores.files.create_and_poll(file, vector_store_id=store, poll_interval_ms=100)
        console.print(f"{name}: {added.status}")
    answers, good = [], True
    for title, question in (("first question", FIRST), ("second question, of the same note", SECOND)):
        answers.append(answer := _ask(client, model, store, question.text, question.text, 1))
        found = [one["filename"] for one in answer.orbit["retrieval"]["results"]]
        console.print(f"found: {', '.join(found)}")
        good &= found == ["museum.txt"]
        good &= show(console, title, question.text, answer, question.answer, question.answer in answer.text)
        wait_until_formed()
    return compare(console, *answers) and good


def _ask(client: OpenAI, model: str, store: str, about: str, question: str, most: int = PAGES.pages) -> Answer:
    """The greedy answer to a question whose pages are searched for."""
    retrieve = {"vector_store_ids": [store], "query": about, "max_num_results": most}
    return answered(client, model, question, {"retrieve": retrieve})


def pdf_of(pictures: Sequence[Image.Image], words: Sequence[str]) -> bytes:
    """A PDF with a picture on each page, and words in its text layer that are not drawn."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for picture, text in zip(pictures, words, strict=True):
        width, height = (side * 72 / _DPI for side in picture.size)
        drawn = f"q {width} 0 0 {height} 0 0 cm /I Do Q BT 3 Tr /F 8 Tf 4 4 Td ({text}) Tj ET".encode()
        pixels = zlib.compress(picture.tobytes())
        size = f"/Width {picture.width} /Height {picture.height} /Length {len(pixels)}"
        objects += [
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn),
            "<< /Type /XObject /Subtype /Image /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /FlateDecode "
            f"{size} >>\nstream\n".encode()
            + pixels
            + b"\nendstream",
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}] /Contents {len(objects) + 1} 0 R "
            f"/Resources << /Font << /F 3 0 R >> /XObject << /I {len(objects) + 2} 0 R >> >> >>".encode(),
        ]
        kids.append(len(objects))
    listed = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{listed}] /Count {len(kids)} >>".encode()
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    tail = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n"
    return out + f"{tail}<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n".encode()
