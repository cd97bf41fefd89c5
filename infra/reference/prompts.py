"""Scenes as token sequences of a served model, many questions to one set of pages.

The questions of a set stand side by side behind its pages: all at the same positions, none seeing another. One forward
then trains or scores every one of them as if it had been asked alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infra.reference.scenes import Form, Questions, Scenes
from infra.reference.vocabulary import COLOURS, THINGS, question

IGNORED = -100
_NAME = THINGS[0]  # stands for the thing in the template of a question


class Words:
    """Token ids of everything that a prompt is made of, by a family's tokenizer."""

    def __init__(self, tokens: Any, image: str, cell: str) -> None:
        """Vocabulary of a family. `image`: its image placeholder, in which `cell` repeats per cell."""

        def ids(text: str) -> list[int]:
            return list(tokens(text)["input_ids"])

        def single(text: str) -> int:
            found = ids(text)
            if len(found) != 1:
                raise ValueError(f"{text!r} is {len(found)} tokens, not one")
            return found[0]

        before, after = image.split(cell)
        self.things = torch.tensor([single(f" {thing}") for thing in THINGS])
        self.colours = torch.tensor([single(colour) for colour in COLOURS])
        self.next_colours = torch.tensor([single(f" {colour}") for colour in COLOURS])
        self.head = ids("<|im_start|>user\n")
        self.image = (ids(before), single(cell), ids(after))
        tail = ids("<|im_end|>\n<|im_start|>assistant\n")
        self.questions = [ids(question([_NAME] * names)) + tail for names in (1, 2)]
        self.end = single("<|im_end|>")
        self.size = len(tokens)

    def question(self, questions: Questions, short: bool) -> tuple[Tensor, Tensor]:
        """Tokens and labels of all questions with their answers, each [sets, questions, length].

        The answer is asked for from the name on, not only behind the last word: finding it is learnt there first.
        `short`: the name alone is the question.
        """
        sets, count, names = questions.things.shape
        text = [int(self.things[0])] * names if short else self.questions[names - 1]
        template = torch.tensor(text)
        slots = (template == self.things[0]).nonzero().flatten()
        asked = template.repeat(sets, count, 1)
        asked[..., slots] = self.things[questions.things]
        answers = self.colours[questions.colours]
        answers[..., 1:] = self.next_colours[questions.colours[..., 1:]]
        ends = torch.full((sets, count, 1), self.end)
        whole = torch.cat([asked, answers], -1)
        labels = torch.full_like(whole, IGNORED)
        labels[..., len(text) - 1 :] = torch.cat([answers, ends], -1)
        for slot, following in zip(slots, [*slots[1:].tolist(), len(text)], strict=True):
            index = int((slots == slot).nonzero())
            labels[..., slot:following] = self.colours[questions.colours[..., index]][..., None]
        labels[..., len(text) - 1] = answers[..., 0]
        return whole, labels.masked_fill(~questions.asked[..., None], IGNORED)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Token sequences of sets of pages with their questions behind them.

    `tokens` [sets, length]; `positions` [axes, length], three axes with M-RoPE or one; `sees`
    [sets, length, length]: which token attends to which; `cells` [pages * cells]: where the cells' tokens stand;
    `labels` [sets, questions, question length]; `first`: index of the first question's first token.
    """

    tokens: Tensor
    positions: Tensor
    sees: Tensor
    cells: Tensor
    labels: Tensor
    first: int

    def to(self, device: torch.device) -> Prompts:
        """The same, its tensors there."""
        parts: dict[str, Any] = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **parts)


@dataclass(frozen=True)
class Layout:
    """Layout of a prompt around its pages.

    `text`: tokens of other text before each page, [pages]; within a clip there is none. `clip`: so many pages are the
    seconds of one clip; 0: each is a picture. `stride`: by how much their positions in time differ.
    """

    text: tuple[int, ...]
    axes: int
    short: bool = False
    clip: int = 0
    stride: int = 0


def lay_out(
    scenes: Scenes, questions: Questions, words: Words, layout: Layout, hidden: Tensor, generator: torch.Generator
) -> Prompts:
    """Prompts of `scenes`; questions of a `hidden` set [sets] see only the pages they ask about.

    A page that the questions cannot look past has to hold in its own KV what it refers to: this is what makes the
    models bind across pages instead of looking everything up when asked.
    """
    form, sets = scenes.form, len(scenes.things)
    before, cell, after = words.image
    tokens = list(words.head)
    positions = [(at,) * layout.axes for at in range(len(tokens))]
    page_of = [-1] * len(tokens)
    cells: list[int] = []

    def write(ids: list[int], page: int) -> None:
        start = max(positions[-1]) + 1
        tokens.extend(ids)
        positions.extend((start + index,) * layout.axes for index in range(len(ids)))
        page_of.extend([page] * len(ids))

    start, together = 0, layout.clip or 1
    for page in range(form.pages):
        second = page % together
        if not second:
            write(torch.randint(words.size, (layout.text[page],), generator=generator).tolist(), -1)
            write(before, page)
            start = max(positions[-1]) + 1
        cells.extend(range(len(tokens), len(tokens) + form.cells))
        if layout.axes == 1:
            write([cell] * form.cells, page)
        else:
            tokens.extend([cell] * form.cells)  # a clip's has another id, which its code stands in for as well
            page_of.extend([page] * form.cells)
            positions.extend(image_positions(form, start, second * layout.stride))
        if second == together - 1 or page == form.pages - 1:
            write(after, page)
    first = len(tokens)
    asked, labels = words.question(questions, layout.short)
    count, length = asked.shape[1:]
    start = max(positions[-1]) + 1
    positions.extend([(start + index,) * layout.axes for index in range(length)] * count)
    whole = torch.cat([torch.tensor(tokens).expand(sets, -1), asked.flatten(1)], 1)
    return Prompts(
        tokens=whole,
        positions=torch.tensor(positions).T.contiguous(),
        sees=_sees(torch.tensor(page_of), questions, hidden, length),
        cells=torch.tensor(cells),
        labels=labels,
        first=first,
    )


def image_positions(form: Form, start: int, time: int = 0) -> list[tuple[int, int, int]]:
    """M-RoPE positions (time, row, column) of an image whose first token is at `start`.

    Or of a clip's that begins there, at a `time`. The token behind it continues at the largest of them plus one.
    """
    return [(start + time, start + index // form.columns, start + index % form.columns) for index in range(form.cells)]


def _sees(page_of: Tensor, questions: Questions, hidden: Tensor, length: int) -> Tensor:
    sets, count = questions.asked.shape
    first = len(page_of)
    total = first + count * length
    sees = torch.ones(total, total, dtype=torch.bool).tril_()
    block = torch.arange(total).sub_(first).div_(length, rounding_mode="floor")
    sees &= (block[:, None] == block) | (block < 0)
    whole = sees.expand(sets, -1, -1).clone()
    asked_about = (questions.pages[..., None] == page_of).any(2)  # [sets, questions, first]
    visible = asked_about | (page_of < 0) | ~hidden[:, None, None]
    whole[:, first:, :first] &= visible.repeat_interleave(length, 1)
    return whole
