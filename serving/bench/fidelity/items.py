"""Items of the fidelity tables: held-out pages with a question, as pictures, words, prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from infra.reference.families import ReferenceFamily
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Scenes, Split, draw_items
from infra.reference.vocabulary import COLOURS, THINGS, answer, question
from serving.bench.fidelity.reader import Page, Prompt, Reader

SEED = 77_000_001  # training and its evaluation draw from other seeds


@dataclass(frozen=True, eq=False)
class Item:
    """A set of pages with one question.

    `asked` [pages][cells]: whether a cell shows what is asked for.
    """

    pictures: tuple[Image.Image, ...]
    pages: tuple[Page, ...]
    question: str
    answer: str
    asked: tuple[Tensor, ...]

    def prompt(self, reader: Reader, order: Sequence[int] | None = None, **text: Any) -> Prompt:
        """The question behind the pages of these indices, in this order; None: all, as they come."""
        pages = self.pages if order is None else [self.pages[i] for i in order]
        return reader.prompt(pages, self.question, self.answer, **text)


def items(
    reader: Reader, kind: ReferenceFamily, split: Split, count: int, form: Form, seed: int = SEED
) -> Iterator[Item]:
    """`count` held-out items of a split with pages the tower accepts; deterministic."""
    form = kind.form(form)
    generator = torch.Generator().manual_seed(seed)
    scenes, questions = draw_items(split, count, form, generator)
    things, colours = tuple(THINGS), tuple(COLOURS)
    for index in range(count):
        asked = questions.things[index, 0]
        pictures = [page_picture(scenes, index, page, kind.cell) for page in range(form.pages)]
        yield Item(
            pictures=tuple(pictures),
            pages=tuple(reader.pages(pictures)),
            question=question([things[thing] for thing in asked.tolist()]),
            answer=answer([colours[colour] for colour in questions.colours[index, 0].tolist()]),
            asked=_shown(scenes, index, asked.tolist()),
        )


def _shown(scenes: Scenes, index: int, asked: Sequence[int]) -> tuple[Tensor, ...]:
    shown = scenes.cells()[0][index]
    return tuple(torch.isin(page, torch.tensor(asked)) for page in shown)
