"""Pages of the benchmark `mrag` in vector stores: drawn with questions, noise with words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from openai import OpenAI
from PIL import Image

from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Scenes, Style, draw_scenes
from infra.reference.vocabulary import COLOURS, THINGS, question
from serving.cli.demo_rag import pdf_of
from serving.loadtest.images import PIXELS, noise

FORM = Form(pages=1, things=6, copies=12)  # the reference models' own pages of the split `retrieval`
_NAMED = 4  # things by which a page is asked for
_PAGES_OF_A_FILE = 20
_ATTEMPTS = 1000  # for each question
LEVELS = 4  # ranks that a word of `worded` can give its page


@dataclass(frozen=True)
class Asked:
    """A question about one of many pages.

    `query` names what else the page shows: no other page shows all of it.
    """

    page: int
    query: str
    question: str
    colour: str


def draw_pages(count: int, generator: torch.Generator) -> Scenes:
    """So many pages that do not refer to one another: `count` sets of one."""
    return draw_scenes(count, FORM, Style(pencilled=(0.0, 0.0)), generator)


def draw_questions(scenes: Scenes, count: int, places: int, generator: torch.Generator) -> list[Asked]:
    """Questions that one page answers, and that no page likely to be found beside it confuses.

    Of the pages that share most of what the query names, as many as fill `places` and all that share as much as the
    last of them, none but the right one shows the thing that is asked for: read together they leave one answer.

    Raises:
        ValueError: so many cannot be drawn of these pages.
    """
    things, colours = scenes.things[:, 0], scenes.colours[:, 0]
    shown = torch.zeros(len(things), len(THINGS), dtype=torch.bool).scatter_(1, things, True)
    found: list[Asked] = []
    for _ in range(_ATTEMPTS * count):
        page = int(torch.randint(len(things), (1,), generator=generator))
        order = torch.randperm(FORM.things, generator=generator)
        named, others = things[page, order[:_NAMED]], order[_NAMED:]
        shared = shown[:, named].sum(1)
        if int((shared == _NAMED).sum()) != 1:
            continue
        rivals = shared >= shared.topk(places).values[-1]
        rivals[page] = False
        place = next((int(at) for at in others if not shown[rivals, things[page, at]].any()), None)
        if place is None:
            continue
        names = [f"the {THINGS[thing]}" for thing in named.tolist()]
        query = f"the page that shows {', '.join(names[:-1])} and {names[-1]}"
        asked = question([THINGS[int(things[page, place])]])
        found.append(Asked(page, query, asked, [*COLOURS][int(colours[page, place])]))
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} questions found, not {count}: too few pages, or too many")


def pictures(scenes: Scenes) -> list[Image.Image]:
    """The pages as they are drawn."""
    return [page_picture(scenes, i, 0, PIXELS) for i in range(len(scenes.things))]


def files_of(pages: Sequence[Image.Image]) -> Iterator[tuple[str, bytes]]:
    """PDFs of pages in order, without a text layer, by name."""
    for first in range(0, len(pages), _PAGES_OF_A_FILE):
        some = pages[first : first + _PAGES_OF_A_FILE]
        yield f"{first:05d}.pdf", pdf_of(some, [""] * len(some))


def place_of(page: int) -> tuple[str, int]:
    """File of `files_of` and number in it, from 1, of a page."""
    within = page % _PAGES_OF_A_FILE
    return f"{page - within:05d}.pdf", within + 1


def worded(number: int, tokens: int) -> tuple[Image.Image, str]:
    """A noisy page of so many tokens, and its words.

    The word of a level stands on it as often as the level says, and on no other page: a query of several pages' words
    finds them from the highest level to the lowest.
    """
    words = [word_of(number, level) for level in range(LEVELS) for _ in range(level + 1)]
    return noise(tokens, number), " ".join(words)


def word_of(number: int, level: int) -> str:
    """A page's word of a level."""
    return f"{chr(ord('b') + number)}{level}"


def fill(client: OpenAI, name: str, files: Mapping[str, bytes]) -> tuple[str, dict[str, str]]:
    """A new vector store with these files, in this order; its id, and the files' by name.

    Raises:
        RuntimeError: a file could not be indexed.
    """
    store, ids = client.vector_stores.create(name=name).id, {}
    for filename, data in files.items():
        ids[filename] = client.files.create(file=(filename, data), purpose="assistants").id
        added = client.vector_stores.files.create_and_poll(ids[filename], vector_store_id=store, poll_interval_ms=50)
        if added.status != "completed":
            raise RuntimeError(f"{filename} was not indexed: {added.last_error}")
    return store, ids
