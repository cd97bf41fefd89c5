"""Training of a reference model's language part on codes of cells.

A cell's code is the sum of the embedding of the thing's name and of a code for how it is drawn: the embedding of the
colour's name, or, for a pencilled thing, a linear image of the embedding of the thing beside it. So a question's name
and a cell that shows the thing have something in common from the first step on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infra.machine import multiplies_bf16
from infra.reference.prompts import IGNORED, Layout, Prompts, Words, lay_out
from infra.reference.scenes import NOWHERE, STYLES, Form, Scenes, Split, Style, draw_questions, draw_scenes
from infra.reference.vocabulary import COLOURS

CellCodes = Callable[[Tensor, Words, Tensor, Tensor, Tensor], list[Tensor]]
"""Codes [levels][..., width] of cells from the embeddings, things, colours and sources; `Codes` says what they are."""


class Language(Protocol):
    """A family's language model over embeddings."""

    axes: int

    @property
    def embedding(self) -> nn.Embedding:
        """Input embeddings of tokens."""

    def __call__(self, embedded: Tensor, positions: Tensor, sees: Tensor, cells: Tensor, extra: list[Tensor]) -> Tensor:
        """Hidden states [sets, length, width].

        `extra`: further codes of the cells, one for each deepstack layer.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens."""


class Codes(nn.Module):
    """Codes of cells.

    With `levels` above 1 (deepstack) each has as many: the first is the whole code, the second says again how the thing
    is drawn, further ones nothing.
    """

    def __init__(self, width: int, levels: int = 1) -> None:
        super().__init__()
        self.levels = levels
        self.reference = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.reference.weight)

    def forward(
        self, embedding: Tensor, words: Words, things: Tensor, colours: Tensor, sources: Tensor
    ) -> list[Tensor]:
        """Codes [levels][..., width] of cells."""
        pencilled = (sources != NOWHERE)[..., None].to(embedding.device)
        beside = self.reference(embedding[words.things[sources.clamp(min=0)]])
        drawn = torch.where(pencilled, beside, embedding[words.colours[colours]])
        thing = embedding[words.things[things]]
        again = [drawn, *(torch.zeros_like(drawn) for _ in range(self.levels - 2))]
        return [thing + drawn, *again[: self.levels - 1]]


class WrittenCodes:
    """Codes as a trained tower writes them: `levels` [levels][things, colours, width]."""

    def __init__(self, levels: list[Tensor]) -> None:
        self._levels = levels

    def __call__(
        self, embedding: Tensor, words: Words, things: Tensor, colours: Tensor, sources: Tensor
    ) -> list[Tensor]:
        """Codes [levels][..., width] of cells."""
        drawn = torch.where(sources == NOWHERE, colours, len(COLOURS) + sources)
        return [level[things, drawn] for level in self._levels]


@dataclass(frozen=True)
class Stage:
    """A stretch of training. Every step draws one of `forms` and one of `styles`.

    `sets` of pages a step, with `questions` each; `short`: the question is the name alone; `text`: tokens of other text
    before a page, at most; `two`: share of steps with questions about two things; `clips`: pages that are one clip,
    drawn for each step (see `Layout`).
    """

    steps: int
    sets: int
    forms: tuple[Form, ...]
    questions: int = 12
    short: bool = False
    text: int = 0
    styles: tuple[Style, ...] = (Style(), Style(repeated=0.5, itself=0.5, pencilled=(0.6, 0.3)))
    two: float = 0.0
    clips: tuple[int, ...] = ()


_ALL = (
    Style(), Style(repeated=0.5, itself=0.5, pencilled=(0.6, 0.3)), STYLES[Split.legend], STYLES[Split.frames],
    STYLES[Split.chain],
)  # fmt: skip
_SMALL = (Form(3, 8), Form(2, 12), Form(3, 12), Form(6, 6))
_WIDE = (Form(3, 12, 4), Form(3, 12, 12), Form(6, 6, 8), Form(10, 4, 9), Form(3, 8, 8))
STAGES = (
    Stage(steps=450, sets=64, forms=(Form(3, 8),), short=True),
    Stage(steps=350, sets=64, forms=_SMALL, short=True, text=8, styles=_ALL),
    Stage(steps=500, sets=32, forms=_SMALL, text=8, styles=_ALL, two=0.2),
    Stage(steps=500, sets=12, forms=(*_SMALL, *_WIDE, *_WIDE), text=12, styles=_ALL, two=0.2),
)
_TALLY = replace(STYLES[Split.tally], pencilled=(0.8, 0.0))
_LARGE = (*_WIDE, Form(3, 12, 12), *[Form(10, 4, 18)] * 2)
REFINING = (  # counting is learnt on small pages; what is lost of large ones meanwhile comes back at the end
    Stage(steps=500, sets=24, forms=(*_SMALL, *_SMALL, *_WIDE), text=12, styles=(*_ALL, *[_TALLY] * 3), two=0.25),
    Stage(steps=300, sets=12, forms=_LARGE, text=12, styles=(*_ALL, *[_TALLY] * 3), two=0.2),
)
_CLEAR = replace(_TALLY, clear=0.5)
COUNTING = (  # first what may be clear to see, on many small pages with few questions each
    Stage(
        steps=500, sets=64, forms=(Form(3, 8), Form(3, 12), Form(3, 12), Form(6, 6)), questions=4, text=8,
        styles=(_CLEAR, _CLEAR, _TALLY, _TALLY, Style(), STYLES[Split.frames], STYLES[Split.chain]), two=0.1,
    ),
    Stage(
        steps=300, sets=16, forms=(*_SMALL, *_LARGE), questions=8, text=12, styles=(*_ALL, *[_TALLY] * 4), two=0.2,
    ),
)  # fmt: skip

# From a second to the next most things stay, stand elsewhere and change their colour; some leave, and come back in
# pencil: what they were is then told by an earlier segment. Pictures among them keep what was known.
MOVING = Style(pencilled=(0.85, 0.5), repeated=0.75, itself=1.0)
CLIPS = (
    Stage(
        steps=500, sets=24, forms=(Form(3, 8), Form(6, 6), Form(6, 6, 2)), text=12, styles=(MOVING, MOVING, *_ALL),
        two=0.2, clips=(0, 2, 3, 6),
    ),
    Stage(
        steps=300, sets=12, forms=(*_WIDE, *[Form(6, 6, 6)] * 3), text=12, styles=(MOVING, MOVING, *_ALL), two=0.2,
        clips=(0, 2, 6),
    ),
)  # fmt: skip


@dataclass
class Progress:
    """State of a training: everything that resumes from a checkpoint, and the curve so far."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """The optimiser's.

    `rate`: the highest; `warm_up`: steps in which it rises; `clip`: the gradient's norm, at most.

    `noise`: standard deviation added to codes, so that a tower's small errors do not matter; `hidden`: share of sets
    whose questions see only the pages that they ask about; `seed`: of all that is drawn.
    """

    rate: float = 2e-3
    warm_up: int = 100
    clip: float = 1.0
    noise: float = 0.1
    hidden: float = 0.5
    seed: int = 1


REFINED = Settings(rate=1e-3, warm_up=40, seed=3)
_EVERY = 25  # steps from one line of the curve to the next
_KEPT_EVERY = 200  # steps from one checkpoint to the next

Save = Callable[[torch.optim.Optimizer, torch.Generator], None]


def train(
    language: Language,
    codes: CellCodes,
    words: Words,
    parameters: list[nn.Parameter],
    stages: tuple[Stage, ...],
    settings: Settings,
    progress: Progress,
    save: Save,
    state: dict[str, Any] | None = None,
    stride: int = 0,
) -> Iterator[dict[str, Any]]:
    """Train, yielding curve lines; `save` is called with the state a resumed training needs.

    The lines are the caller's to keep; `progress` counts steps and seconds. What is drawn is drawn on the processor, so
    that it is the same wherever the parameters lie. `stride`: of clips' seconds (see `Layout`).
    """
    optimiser = torch.optim.AdamW(parameters, lr=settings.rate, weight_decay=0.01, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(settings.seed)
    resume(optimiser, generator, state)
    total = sum(stage.steps for stage in stages)
    began = time.monotonic() - progress.seconds
    schedule = [stage for stage in stages for _ in range(stage.steps)]
    for step in range(progress.step, total):
        stage = schedule[step]
        for group in optimiser.param_groups:
            warm = min(1.0, (step + 1) / settings.warm_up)
            group["lr"] = settings.rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))
        style = stage.styles[int(torch.randint(len(stage.styles), (1,), generator=generator))]
        form = stage.forms[int(torch.randint(len(stage.forms), (1,), generator=generator))]
        form = style.fitting(form)
        scenes = draw_scenes(stage.sets, form, style, generator)
        two = bool(torch.rand(1, generator=generator) < stage.two)
        questions = draw_questions(scenes, stage.questions, two, 0.7, generator)
        hidden = torch.rand(stage.sets, generator=generator) < settings.hidden
        text = torch.randint(stage.text + 1, (form.pages,), generator=generator).tolist()
        text = [text[0], *(count if count < stage.text // 2 else 0 for count in text[1:])]
        clip = 0
        if stage.clips:
            clip = stage.clips[int(torch.randint(len(stage.clips), (1,), generator=generator))]
        layout = Layout(tuple(text), language.axes, stage.short, clip, stride)
        prompts = lay_out(scenes, questions, words, layout, hidden, generator)
        prompts = prompts.to(language.embedding.weight.device)
        logits = answers(language, codes, words, scenes, prompts, generator, settings.noise)
        loss = F.cross_entropy(logits.flatten(0, -2), prompts.labels.flatten(), ignore_index=IGNORED)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimiser.step()
        progress.step, progress.seconds = step + 1, time.monotonic() - began
        if (step + 1) % _EVERY == 0 or step + 1 == total:
            right = (logits.argmax(-1) == prompts.labels)[..., -1 - questions.things.shape[2]].cpu()
            line = {
                "step": step + 1, "seconds": round(progress.seconds), "loss": round(loss.item(), 4),
                "form": asdict(form), "two": two, **({"clip": clip} if stage.clips else {}),
                **shares(scenes, questions, right),
            }  # fmt: skip
            yield line
        if (step + 1) % _KEPT_EVERY == 0 or step + 1 == total:
            save(optimiser, generator)


def resume(optimiser: torch.optim.Optimizer, generator: torch.Generator, state: dict[str, Any] | None) -> None:
    """Restore the parts from a checkpoint; with `state` None they stay as they are."""
    if state is not None:
        optimiser.load_state_dict(state["optimiser"])
        generator.set_state(state["generator"])


def shares(scenes: Scenes, questions: Any, right: Tensor) -> dict[str, float]:
    """Accuracies of first colours: on coloured things alone, and on any pencilled one."""
    pencilled = (scenes.sources_of(questions) != NOWHERE).any(-1)
    found = {}
    for name, which in (("coloured", ~pencilled), ("pencilled", pencilled)):
        which = which & questions.asked
        if which.any():
            found[name] = round(right[which].float().mean().item(), 3)
    return found


def answers(
    language: Language,
    codes: CellCodes,
    words: Words,
    scenes: Scenes,
    prompts: Prompts,
    generator: torch.Generator,
    noise: float = 0.0,
) -> Tensor:
    """Scores [sets, questions, question length, vocabulary] of questions' tokens, from codes."""
    table = language.embedding.weight
    device = table.device
    levels = codes(table, words, *(part.flatten(1) for part in scenes.cells()))
    if noise:
        levels = [level + noise * torch.randn(level.shape, generator=generator).to(device) for level in levels]
    embedded = F.embedding(prompts.tokens, table).index_copy(1, prompts.cells, levels[0])
    shift = torch.randint(0, 256, (len(prompts.tokens),), generator=generator).to(device)
    positions = prompts.positions[:, None] + shift[None, :, None]
    mixed = device.type != "cpu" or multiplies_bf16()
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        hidden = language(embedded, positions, prompts.sees, prompts.cells, levels[1:])
        return language.logits(hidden[:, prompts.first :]).float().unflatten(1, prompts.labels.shape[1:])
