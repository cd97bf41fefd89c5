"""Pages that refer to one another and questions about them, drawn in batches.

A page holds different things. Each is drawn in a colour, or in pencil with another thing beside it: it has the colour
that this other thing had on the pages before ("the same colour as the star before"; kamera.md App. B, two-page
questions). A thing that refers to itself is one that a new frame repeats. A pattern beside it that no page before
shows is a tally mark: the thing has the colour that most things on the pages before have. What a page says about its
pencilled things therefore stands on earlier pages only, and its own KV has to take it up when it is read behind them.

| split | the question is about | pages |
|---|---|---|
| single | a coloured thing | 3 |
| multi | a pencilled thing of the last page, half of which is pencilled | 3 |
| legend | a thing of the last page, all drawn like one of the patterns that the first page colours | 3 |
| frames | a thing of the last page, which repeats the one before it but for a few changes | 3 |
| chain | a thing that refers to a pencilled thing that refers to a coloured one | 3 |
| tally | a thing beside a tally mark: colours counted across pages, each of which alone leaves two as frequent | 3 |
| retrieval | a coloured thing, on one of many pages | 6 |
| control | two coloured things on two pages: reading each page is enough | 3 |

`legend` and `frames` spread what is lost over most tokens of a page (kamera.md §4), in most models more than the others
(`orbitserve bench fidelity`, deficit spread).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from infra.reference.vocabulary import COLOURS, PATTERNS, THINGS

NOWHERE = -1
_NAMED = len(THINGS) - len(PATTERNS)
_SURELY = 8.0  # more than chance and all other reasons together


class Split(StrEnum):
    """Kinds of questions; see the module's table."""

    single = "single"
    multi = "multi"
    legend = "legend"
    frames = "frames"
    chain = "chain"
    tally = "tally"
    retrieval = "retrieval"
    control = "control"


@dataclass(frozen=True)
class Form:
    """Numbers of pages, of things on each, and of cells that show each thing."""

    pages: int = 3
    things: int = 8
    copies: int = 1

    @property
    def cells(self) -> int:
        """Cells of a page, each of which becomes one token."""
        return self.things * self.copies

    @property
    def rows(self) -> int:
        """Rows of a page: the most that divide its cells and are no more than its columns."""
        return max(rows for rows in range(1, int(self.cells**0.5) + 1) if self.cells % rows == 0)

    @property
    def columns(self) -> int:
        """Cells of a row."""
        return self.cells // self.rows


ASKED = {
    Split.single: Form(3, 12, 12), Split.multi: Form(3, 12, 12), Split.legend: Form(3, 8, 18),
    Split.frames: Form(3, 12, 12), Split.chain: Form(3, 12, 12), Split.tally: Form(3, 12, 12),
    Split.retrieval: Form(6, 6, 12), Split.control: Form(3, 12, 12),
}  # fmt: skip
"""Pages on which held-out questions of each split are asked."""


@dataclass(frozen=True, eq=False)
class Scenes:
    """Sets of pages. `things`, `colours` and `sources` are [sets, pages, things per page].

    `sources`: the thing that is drawn beside a pencilled one, NOWHERE for a thing that is drawn in its colour.
    `colours`: what colour a thing has, resolved. `order` [sets, pages, cells]: which of the page's things a cell shows.
    """

    form: Form
    things: Tensor
    colours: Tensor
    sources: Tensor
    order: Tensor

    def take(self, sets: Tensor) -> Scenes:
        """These sets only."""
        parts = {name: getattr(self, name)[sets] for name in ("things", "colours", "sources", "order")}
        return replace(self, **parts)

    def cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Thing, colour and source shown by every cell, each [sets, pages, cells]."""
        return self.things.gather(2, self.order), self.colours.gather(2, self.order), self.sources.gather(2, self.order)

    def sources_of(self, questions: Questions) -> Tensor:
        """Sources of the things that questions ask for, [sets, questions, names]."""
        rows = torch.arange(len(self.things))[:, None, None]
        at = (self.things[rows, questions.pages] == questions.things[..., None]).long().argmax(-1)
        return self.sources[rows, questions.pages, at]

    def last(self) -> Tensor:
        """True where a thing is on no later page, [sets, pages, things]; its colour is the answer."""
        present = torch.zeros(*self.things.shape[:2], len(THINGS), dtype=torch.bool).scatter_(2, self.things, True)
        later = present.flip(1).cumsum(1).flip(1) - present.long()  # how often it comes after a page
        return later.gather(2, self.things) == 0


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions on sets of pages: `things`, `colours`, `pages`, each [sets, questions, 1 or 2].

    `asked` [sets, questions]: whether the question has one answer (a thing that comes again later has not).
    """

    things: Tensor
    colours: Tensor
    pages: Tensor
    asked: Tensor

    def take(self, sets: Tensor) -> Questions:
        """The questions on these sets only."""
        return Questions(*(getattr(self, name)[sets] for name in ("things", "colours", "pages", "asked")))


@dataclass(frozen=True)
class Style:
    """Drawing style of pages.

    `pencilled`: the share of pencilled things on the last page, and on those between the first and the last.
    `repeated`: the share of things that a page repeats from the pages before it. `itself`: the share of repeated and
    pencilled things that refer to themselves. `patterns`: whether the first page shows patterns, and only they are
    referred to. `through`: whether only things of the page before are referred to. `tally`: whether pencilled things
    stand beside tally marks, and colours on the pages before the last are as `_tallied` says. `clear`: how much larger
    than there the share of the most frequent one may be; as large as is drawn for each set.
    """

    pencilled: tuple[float, float] = (0.5, 0.0)
    repeated: float = 0.0
    itself: float = 0.0
    patterns: bool = False
    through: bool = False
    tally: bool = False
    clear: float = 0.0

    def fitting(self, form: Form) -> Form:
        """The form nearest to this one in which such pages can be drawn."""
        if self.patterns and form.things > len(PATTERNS):
            return replace(form, things=len(PATTERNS))
        return replace(form, pages=3) if self.tally and form.pages < 3 else form


STYLES = {
    Split.single: Style(),
    Split.multi: Style(),
    Split.legend: Style(pencilled=(1.0, 0.0), patterns=True),
    Split.frames: Style(pencilled=(0.85, 0.5), repeated=1.0, itself=1.0),
    Split.chain: Style(pencilled=(1.0, 1.0), through=True),
    Split.tally: Style(tally=True),
    Split.retrieval: Style(),
    Split.control: Style(),
}


def draw_scenes(count: int, form: Form, style: Style, generator: torch.Generator) -> Scenes:
    """`count` sets of pages, made as `style` says."""
    tallied = _tallied(count, form, style.clear, generator) if style.tally else []
    known = torch.full((count, len(THINGS)), NOWHERE)  # the colour that a thing has by now
    things: list[Tensor] = []
    colours: list[Tensor] = []
    sources: list[Tensor] = []
    for page in range(form.pages):
        seen, is_last = known != NOWHERE, page == form.pages - 1
        here = _things(page, seen, form, style, generator)
        colour = torch.randint(len(COLOURS), here.shape, generator=generator)
        source = torch.full_like(here, NOWHERE)
        if style.tally and not is_last:
            colour = tallied[page]
        elif style.tally:
            pencilled = torch.rand(here.shape, generator=generator) < style.pencilled[0]
            marks = torch.randint(_NAMED, len(THINGS), here.shape, generator=generator)
            source = torch.where(pencilled, marks, source)
            colour = torch.where(pencilled, _most_frequent(torch.cat(colours, 1)), colour)
        elif page:
            referred = _referred(here, things[-1], seen, style, generator)
            pencilled = torch.rand(here.shape, generator=generator) < style.pencilled[0 if is_last else 1]
            source = torch.where(pencilled, referred, source)
            colour = torch.where(pencilled, known.gather(1, referred), colour)
        known = known.scatter(1, here, colour)
        things.append(here)
        colours.append(colour)
        sources.append(source)
    order = torch.arange(form.things).repeat(form.copies).expand(count, form.pages, form.cells)
    shuffle = torch.rand(order.shape, generator=generator).argsort(-1)
    drawn = [torch.stack(part, 1) for part in (things, colours, sources)]
    return Scenes(form, drawn[0], drawn[1], drawn[2], order.gather(2, shuffle))


def _things(page: int, seen: Tensor, form: Form, style: Style, generator: torch.Generator) -> Tensor:
    """The things that a page shows [sets, things]; `seen`: which of all were on pages before."""
    rank = torch.rand(seen.shape, generator=generator)
    if style.patterns:
        rank[:, _NAMED:] += 2.0 if page == 0 else -_SURELY
    if style.tally:
        rank[:, _NAMED:] -= _SURELY
    if page:
        again = torch.rand(seen.shape, generator=generator) < style.repeated
        rank += torch.where(seen, torch.where(again, 1.0, -1.0), 0.0)
    return rank.topk(form.things, 1).indices[:, torch.randperm(form.things, generator=generator)]


def _referred(here: Tensor, before: Tensor, seen: Tensor, style: Style, generator: torch.Generator) -> Tensor:
    """Things that each thing of a page would refer to in pencil, given the page before's."""
    eligible = seen.clone()
    if style.patterns:
        eligible[:, :_NAMED] = False
    if style.through:
        eligible = torch.zeros_like(seen).scatter_(1, before, True)
    referred = torch.multinomial(eligible.float(), here.shape[1], replacement=True, generator=generator)
    itself = seen.gather(1, here) & (torch.rand(here.shape, generator=generator) < style.itself)
    return torch.where(itself, here, referred)


def _tallied(count: int, form: Form, clear: float, generator: torch.Generator) -> list[Tensor]:
    """Colours of the things on every page but the last, each [sets, things].

    Two fifths of a page's things have the colour that is the most frequent of all these pages together, as many another
    one, which is another on every page (of the first seven): only who counts across pages can tell them apart. Where
    it may be `clear`, up to that much more than two fifths have the first colour, and no more than these the other.
    """
    order = torch.rand(count, len(COLOURS), generator=generator).argsort(1)  # the first is the most frequent
    others = len(COLOURS) - 1
    alike = second = torch.full((count, 1), math.ceil(0.4 * form.things))
    if clear:
        share, part = torch.rand(2, count, 1, generator=generator)
        alike = ((0.4 + clear * share) * form.things).ceil().long()
        second = (part * alike).ceil().long()
    at = torch.arange(form.things)
    pages = []
    for page in range(form.pages - 1):
        rest = torch.randint(1, others, (count, form.things), generator=generator)  # further than the page's second
        which = 1 + (page + rest) % others
        which = which.where(at >= alike + second, 1 + page % others)
        pages.append(order.gather(1, which.where(at >= alike, 0)))
    return pages


def _most_frequent(colours: Tensor) -> Tensor:
    """The colour that most of a set's things have, [sets, 1], of [sets, things]."""
    counted = torch.zeros(len(colours), len(COLOURS)).scatter_add_(1, colours, torch.ones(colours.shape))
    return counted.argmax(1, keepdim=True)


def draw_questions(scenes: Scenes, count: int, two: bool, on_last: float, generator: torch.Generator) -> Questions:
    """`count` questions per set, on one thing or `two`; a share `on_last` on the last page."""
    sets, pages, things = scenes.things.shape
    names = 2 if two else 1
    page = torch.randint(pages, (sets, count, names), generator=generator)
    page[..., 0] = torch.where(torch.rand(sets, count, generator=generator) < on_last, pages - 1, page[..., 0])
    at = torch.randint(things, page.shape, generator=generator)
    set_index = torch.arange(sets)[:, None, None]
    drawn = (scenes.things, scenes.colours, scenes.last())
    thing, colour, last = (part[set_index, page, at] for part in drawn)
    return Questions(thing, colour, page, last.all(-1) & ((thing[..., 0] != thing[..., -1]) | (not two)))


_LEAST = {  # pages and things on each
    Split.single: (1, 1), Split.retrieval: (1, 1), Split.multi: (2, 1), Split.frames: (2, 1), Split.control: (2, 1),
    Split.legend: (3, 2), Split.chain: (3, 2), Split.tally: (3, 2),
}  # fmt: skip


def draw_items(split: Split, count: int, form: Form, generator: torch.Generator) -> tuple[Scenes, Questions]:
    """`count` sets of pages with one question of `split` each, for evaluation.

    Raises ValueError if the split cannot be drawn in that form.
    """
    pages, things = _LEAST[split]
    if form.pages < pages or form.things < things:
        raise ValueError(f"{split} needs {pages} pages of {things} things, not {form}")
    kept: list[tuple[Scenes, Questions]] = []
    found = 0
    while found < count:
        scenes = draw_scenes(2 * count, form, STYLES[split], generator)
        on_last = 0.0 if split in (Split.single, Split.retrieval, Split.control) else 1.0
        questions = draw_questions(scenes, 1, split is Split.control, on_last, generator)
        fits = questions.asked[:, 0] & _fits(split, scenes, questions)
        where = fits.nonzero().flatten()[: count - found]
        kept.append((scenes.take(where), questions.take(where)))
        found += len(where)
    return _joined(kept)


def _fits(split: Split, scenes: Scenes, questions: Questions) -> Tensor:
    """True where every question of a set is one of the split, [sets]."""
    source = scenes.sources_of(questions)[:, 0]
    coloured = (source == NOWHERE).all(-1)
    if split in (Split.single, Split.retrieval):
        return coloured
    if split is Split.control:
        return coloured & (questions.pages[:, 0, 0] != questions.pages[:, 0, 1])
    if split is Split.frames:
        return source[:, 0] == questions.things[:, 0, 0]
    return ~coloured & (source[:, 0] != questions.things[:, 0, 0])


def _joined(parts: list[tuple[Scenes, Questions]]) -> tuple[Scenes, Questions]:
    scenes, questions = zip(*parts, strict=True)
    names = ("things", "colours", "sources", "order")
    whole = replace(scenes[0], **{name: torch.cat([getattr(part, name) for part in scenes]) for name in names})
    asked = ("things", "colours", "pages", "asked")
    return whole, Questions(*(torch.cat([getattr(part, name) for part in questions]) for name in asked))
