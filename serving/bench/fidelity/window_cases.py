"""Histories of pages to slide a window over: reference models' pages, or prose.

A unit is what one step of an agent adds: a page, or a page and the words behind it, which are segments of their own. A
case has the units of a whole history, the oldest first. Its last ones are the window that is asked about.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from infra.reference.families import ReferenceFamily
from infra.reference.scenes import Form, Split
from serving.bench.fidelity.items import items
from serving.bench.fidelity.reader import Page, Prompt, Reader

PAGE, ACTION, BEHIND, ASKED = 128, (20, 80), 8, 32  # tokens of prose: pages, words behind, up to the answer, of it
_MOST_PROSE = 32  # cases of prose a table: each is about a minute of a core
_THINGS, _COPIES = 8, 6  # a page's, see `Form`
_HEAD = "<|im_start|>user\n"
_LONG = 9000  # characters of a document that holds a window


@dataclass(frozen=True, eq=False)
class Case:
    """A history of segments, and the prompt that asks what stands behind some of them."""

    segments: Sequence[Page]
    ask: Callable[[Sequence[Page]], Prompt]


class Cases(Protocol):
    """Cases of one model, by split."""

    splits: Sequence[str]
    unit: int  # segments of a unit, the page first
    has_answers: bool  # whether an answer is right or wrong

    def draw(self, split: str, units: int, window: int, count: int) -> Iterator[Case]:
        """Up to `count` cases of so many units; the last `window` of them are one item's."""


class Pictures:
    """Pages of a reference model; those of a history before an item's own are other items'.

    These models were never trained on words between pages: their windows are of pages alone, as the paper's are.
    """

    splits: Sequence[str] = (Split.multi, Split.frames)
    unit, has_answers = 1, True

    def __init__(self, reader: Reader, kind: ReferenceFamily) -> None:
        self._reader, self._kind = reader, kind

    def draw(self, split: str, units: int, window: int, count: int) -> Iterator[Case]:
        """See `Cases.draw`."""
        reader, before = self._reader, units - window
        form = Form(window, _THINGS, _COPIES)
        drawn = list(items(reader, self._kind, Split(split), count + -(-before // window), form))
        pages = list(chain.from_iterable(item.pages for item in drawn))
        for i, item in enumerate(drawn[:count]):
            others = [*pages[(i + 1) * window :], *pages[: i * window]][:before]

            def ask(segments: Sequence[Page], question: str = item.question, answer: str = item.answer) -> Prompt:
                return reader.prompt(segments, question, answer)

            yield Case([*others, *item.pages], ask)


class Prose:
    """Stretches of documents, pages and words in turns; the answer is how the document goes on."""

    splits: Sequence[str] = ("prose",)
    unit, has_answers = 2, False

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        long = sorted(name for name, text in pydoc_data.topics.topics.items() if len(text) > _LONG)
        self._documents = [reader.ids(pydoc_data.topics.topics[name]) for name in long]

    def draw(self, split: str, units: int, window: int, count: int) -> Iterator[Case]:
        """See `Cases.draw`; stretches of one document do not overlap."""
        generator = torch.Generator().manual_seed(5)
        head = self._reader.ids(_HEAD)
        left = min(count, _MOST_PROSE)
        for tokens in self._documents:
            at = 0
            while left:
                words = torch.randint(*ACTION, (units,), generator=generator).tolist()
                stop = at + units * PAGE + sum(words)
                if stop + BEHIND + ASKED > len(tokens):
                    break
                segments: list[Page] = []
                for count_of_words in words:
                    for size in (PAGE, count_of_words):
                        segments.append(Page.of_text(tokens[at : at + size]))
                        at += size
                question, answer = tokens[stop : stop + BEHIND], tokens[stop + BEHIND : stop + BEHIND + ASKED]
                at, left = stop + BEHIND + ASKED, left - 1

                def ask(
                    segments: Sequence[Page], question: Sequence[int] = question, answer: Sequence[int] = answer
                ) -> Prompt:
                    return self._reader.lay_out(head, segments, question, answer)

                yield Case(segments, ask)
