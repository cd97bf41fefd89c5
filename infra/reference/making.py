"""Making of a family's checkpoint: train the language model, then the tower, then export.

What was made can be refined: its language model goes on, over what its tower writes, on splits that came later.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from infra.machine import processor
from infra.reference import digest
from infra.reference.card import Machine, average_card, card, curve_text, evaluated_card, refined_card
from infra.reference.families import FAMILIES, ReferenceFamily
from infra.reference.pictures import grid_picture, page_picture
from infra.reference.prompts import Layout, Words, lay_out
from infra.reference.scenes import ASKED, NOWHERE, Form, Scenes, Split, draw_items
from infra.reference.training import (
    CLIPS,
    COUNTING,
    REFINED,
    REFINING,
    STAGES,
    Codes,
    Progress,
    Settings,
    Stage,
    WrittenCodes,
    train,
)
from infra.reference.vision import FORMS, Tower, train_tower
from infra.reference.vocabulary import COLOURS, THINGS

CURVE, CARD = "training.json", "README.md"
MEASURED = "orbitserve.json"  # see `prefill_workers.model_card`
TOWER_STEPS = 1500
CPU = torch.device("cpu")
_EVALUATION_SEED = 1_000_003  # training draws from other seeds
_AT_ONCE = 25  # questions that are evaluated in one forward
_EMBEDDING_SCALE = 0.5


@dataclass
class Model:
    """A model in training and its saved state: `file`, from which `state` comes."""

    family: str
    kind: ReferenceFamily
    tokens: Any
    model: Any
    language: Any
    words: Words
    file: Path
    state: dict[str, Any] | None
    progress: Progress

    @classmethod
    def shipped(cls, family: str, folder: Path, file: Path, device: torch.device = CPU, **more: Any) -> Self:
        """The model in `folder`, for further training in `file`; `more`: of a subclass."""
        kind = FAMILIES[family]
        tokens = kind.recipe.tokenizer()
        model = kind.recipe.load(tokens, folder).to(device)
        return cls(
            family, kind, tokens, model, kind.language(model), Words(tokens, kind.image, kind.cell_token),
            file, None, Progress(curve=json.loads((folder / CURVE).read_text())), **more,
        )  # fmt: skip

    def keep(self, optimiser: torch.optim.Optimizer, generator: torch.Generator, **more: Any) -> None:
        """Write what a later call goes on from."""
        parts = {
            "model": self.model.state_dict(), "progress": asdict(self.progress),
            "optimiser": optimiser.state_dict(), "generator": generator.get_state(), **more,
        }  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save(parts, part)
        part.rename(self.file)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.language.embedding.weight.device

    def language_parameters(self) -> list[nn.Parameter]:
        """All parameters but the tower's."""
        tower = {id(parameter) for parameter in self.kind.tower_module(self.model).parameters()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in tower]

    def compile(self) -> None:
        """Compile the language model's layers at their first step (a minute or two)."""
        for layer in self.language.text.layers:
            layer.compile(dynamic=True)

    def tower(self) -> Tower:
        """Pictures to the codes of their cells."""
        return self.kind.tower(self.model, self.kind.recipe.image_processor())

    def export(self, folder: Path) -> None:
        """Write the checkpoint; the model's weights are then the rounded ones.

        What was measured of the weights that lay there does not hold for these: until they are measured, no patches of
        theirs are summed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        before, file = digest(folder), folder / MEASURED
        known = file.read_text() if file.exists() else None
        file.write_text(json.dumps({"compose_up_to": 0}))  # first: a call that is cut off claims nothing of the weights
        self.kind.recipe.save(self.model, self.tokens, folder)
        self.model.float()
        if digest(folder) == before:
            file.unlink() if known is None else file.write_text(known)

    def finish(self, folder: Path, count: int, text: Callable[[Mapping[str, float]], str]) -> Iterator[dict[str, Any]]:
        """Write the checkpoint, `judge` it, write the curve beside it."""
        self.export(folder)
        yield from self.judge(folder, count, text)
        (folder / CURVE).write_text(curve_text(self.progress.curve))

    def judge(self, folder: Path, count: int, text: Callable[[Mapping[str, float]], str]) -> Iterator[dict[str, Any]]:
        """Evaluate every split, write the card into `folder`; yields what there is to say.

        `text`: the card's, from the share of right answers by split.
        """
        scores: dict[str, float] = {}
        began = time.monotonic()
        for split in Split:
            scores[str(split)] = share = self.evaluate(split, count)
            yield {"split": str(split), "items": count, "right": share, "seconds": round(time.monotonic() - began)}
        (folder / CARD).write_text(text(scores))

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def evaluate(self, split: Split, count: int) -> float:
        """Accuracy on held-out questions of a split, from pictures, by full prefill."""
        generator = torch.Generator().manual_seed(_EVALUATION_SEED)
        scenes, questions = draw_items(split, count, self.kind.form(ASKED[split]), generator)
        layout = Layout((0,) * scenes.form.pages, self.language.axes)
        tower, right = self.tower(), 0
        for start in range(0, count, _AT_ONCE):
            rows = torch.arange(start, min(start + _AT_ONCE, count))
            part, asked = scenes.take(rows), questions.take(rows)
            prompts = lay_out(part, asked, self.words, layout, torch.zeros(len(rows), dtype=torch.bool), generator)
            levels = [level.unflatten(0, (len(rows), -1)) for level in tower(_pictures(part, self.kind.cell))]
            prompts = prompts.to(self.device)
            embedded = self.language.embedding(prompts.tokens).index_copy(1, prompts.cells, levels[0])
            positions = prompts.positions[:, None].expand(-1, len(rows), -1)
            hidden = self.language(embedded, positions, prompts.sees, prompts.cells, levels[1:])
            answered = self.language.logits(hidden[:, prompts.first :]).argmax(-1)
            names = asked.things.shape[2]
            wanted = prompts.labels[:, 0, -1 - names : -1]
            right += int((answered[:, -1 - names : -1] == wanted).all(-1).sum())
        return right / count


@dataclass
class Making(Model):
    """A model that is made from nothing. `taught`: where its tower's training stands."""

    codes: Codes
    taught: Progress

    @classmethod
    def begin(cls, family: str, work: Path, device: torch.device = CPU) -> Making:
        """The model as `work` has it, or one with weights drawn anew."""
        kind = FAMILIES[family]
        torch.manual_seed(Settings().seed)
        tokens = kind.recipe.tokenizer()
        model = kind.recipe.model(tokens)
        language = kind.language(model)
        draw(model.named_parameters())
        if kind.alike is not None:
            kind.alike(language)
        codes = Codes(kind.recipe.hidden, kind.levels).to(device)
        model.to(device)
        made = cls(
            family, kind, tokens, model, language, Words(tokens, kind.image, kind.cell_token), work / f"{family}.pt",
            None, Progress(), codes, Progress(),
        )  # fmt: skip
        if made.file.exists():
            state = torch.load(made.file, weights_only=False, map_location=CPU)
            model.load_state_dict(state["model"])
            made.codes.load_state_dict(state["codes"])
            if "taught" not in state:
                raise ValueError(f"{made.file} is of another version; remove it, and {family} is made anew")
            made.state, made.progress, made.taught = state, Progress(**state["progress"]), Progress(**state["taught"])
        return made

    def keep(self, optimiser: torch.optim.Optimizer, generator: torch.Generator, **more: Any) -> None:
        """Write what a later call goes on from."""
        super().keep(optimiser, generator, codes=self.codes.state_dict(), taught=asdict(self.taught), **more)

    def train_language(self) -> Iterator[dict[str, Any]]:
        """Train the language model from where it stands; yields the curve."""
        if self.progress.step == sum(stage.steps for stage in STAGES):
            return
        parameters = [*self.language_parameters(), *self.codes.parameters()]
        for line in train(
            self.language, self.codes, self.words, parameters, STAGES, Settings(), self.progress, self.keep, self.state
        ):
            self.progress.curve.append(line)
            yield line

    def train_tower(self) -> Iterator[dict[str, Any]]:
        """Teach the tower the trained language model's codes, resuming; yields the curve."""
        if self.taught.step == TOWER_STEPS:
            return
        embedding = self.language.embedding.weight.detach().float()
        parameters = list(self.kind.tower_module(self.model).parameters())
        forms = self.kind.forms or FORMS
        state = self.state if self.taught.step else None  # else what is there is the language model's
        for line in train_tower(
            self.tower(), parameters, self.codes, embedding, self.words, self.kind.cell, TOWER_STEPS, forms,
            self.taught, self.keep, state,
        ):  # fmt: skip
            self.progress.curve.append({"tower": True, **line})
            yield line


@dataclass
class Refining(Model):
    """Further training of a finished model's language model, embeddings and tower frozen.

    `round`: how often it will have been refined. `about`: "counting", colours counted across pages; "clips", pages that
    are seconds of clips; "": all else.
    """

    round: int
    about: str = ""

    @classmethod
    def begin(
        cls, family: str, folder: Path, work: Path, device: torch.device = CPU, again: bool = False,
        about: str = "",
    ) -> Refining:  # fmt: skip
        """The model as `work` has it, or as it lies in `folder`.

        Raises ValueError if what lies there was refined before, unless it is to be refined `again`, if the round was
        begun on other questions, or if it is about clips and the family's are not laid out.
        """
        if about == "clips" and not FAMILIES[family].stride:
            named = ", ".join(name for name, kind in FAMILIES.items() if kind.stride)
            raise ValueError(f"clips of {family} are not laid out for training; those of {named} are")
        rounds = _rounds(json.loads((folder / CURVE).read_text()))
        if rounds and not again:
            raise ValueError(f"{folder} was refined before; make it anew first, or refine it again")
        file = _refined(work, family, rounds + 1)
        found = cls.shipped(family, folder, file, device, round=rounds + 1, about=about)
        if file.exists():
            state = torch.load(file, weights_only=False, map_location=CPU)
            if state.get("about", about) != about:
                begun = f"with {_asked(state['about'])}" if state["about"] else f"without {_asked(about)}"
                raise ValueError(f"{file} was begun {begun}")
            found.model.load_state_dict(state["model"])
            found.state, found.progress = state, Progress(**state["progress"])
        return found

    def keep(self, optimiser: torch.optim.Optimizer, generator: torch.Generator, **more: Any) -> None:
        """Write what a later call goes on from."""
        super().keep(optimiser, generator, about=self.about, **more)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the training."""
        return {"": REFINING, "counting": COUNTING, "clips": CLIPS}[self.about]

    def train(self) -> Iterator[dict[str, Any]]:
        """Train the language model from where it stands; yields the curve."""
        if self.progress.step == sum(stage.steps for stage in self.stages):
            return
        table = self.language.embedding.weight
        parameters = [parameter for parameter in self.language_parameters() if parameter is not table]
        self.model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        codes = written_codes(self.tower(), self.kind)
        other_pages = REFINED.seed + self.round - 1  # than those of the rounds before
        settings = replace(REFINED, seed=other_pages)
        for line in train(
            self.language, codes, self.words, parameters, self.stages, settings, self.progress, self.keep, self.state,
            self.kind.stride,
        ):  # fmt: skip
            self.progress.curve.append({"refined": self.round, **line})
            yield line


@torch.no_grad()
def written_codes(tower: Tower, kind: ReferenceFamily) -> WrittenCodes:
    """A tower's codes of every thing in every colour and beside every other thing."""
    drawn = len(COLOURS) + len(THINGS)
    things = torch.arange(len(THINGS)).repeat_interleave(drawn)
    ways = torch.arange(drawn).repeat(len(THINGS))
    form = kind.form(Form(1, 12, 12))
    short = -len(things) % form.cells  # the last page is filled with the first cells
    things, ways = (torch.cat([part, part[:short]]) for part in (things, ways))
    sources = torch.where(ways < len(COLOURS), NOWHERE, ways - len(COLOURS))
    pages = zip(*(part.split(form.cells) for part in (things, ways % len(COLOURS), sources)), strict=True)
    pictures = [grid_picture(thing, colour, source, form.columns, kind.cell) for thing, colour, source in pages]
    cells = len(THINGS) * drawn
    return WrittenCodes([level[:cells].unflatten(0, (len(THINGS), drawn)) for level in tower(pictures)])


def _pictures(scenes: Scenes, cell: int) -> list[Any]:
    sets = range(len(scenes.things))
    return [page_picture(scenes, index, page, cell) for index in sets for page in range(scenes.form.pages)]


def make(
    family: str, work: Path, out: Path, count: int, device: torch.device = CPU, compiled: bool = False
) -> Iterator[dict[str, Any]]:
    """Train, export and evaluate a family's model, resuming from `work`; yields progress."""
    making = Making.begin(family, work, device)
    if compiled:
        making.compile()
    yield from making.train_language()
    yield from making.train_tower()
    parameters = sum(parameter.numel() for parameter in making.model.parameters())
    curve, machine = making.progress.curve, _machine(device, compiled)
    yield from making.finish(
        out / family, count, lambda scores: card(family, parameters, curve, machine, scores, count)
    )


def refine(
    family: str, work: Path, out: Path, count: int, device: torch.device = CPU, again: bool = False,
    about: str = "", compiled: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Train the model in `out` further, export and evaluate it, resuming from `work`.

    Yields what there is to say. Raises ValueError if the model was refined before, unless it is to be refined `again`,
    or if `Refining.begin` does.
    """
    refining = Refining.begin(family, out / family, work, device, again, about)
    if compiled:
        refining.compile()
    yield from refining.train()
    before = (out / family / CARD).read_text()
    command = " ".join(filter(None, (family, "--again" * (refining.round > 1), _asked(about))))
    curve, machine, rate = refining.progress.curve, _machine(device, compiled), REFINED.rate
    yield from refining.finish(
        out / family, count, lambda scores: refined_card(before, command, curve, machine, scores, count, rate)
    )


def average(
    family: str, rounds: Sequence[int], work: Path, out: Path, count: int, device: torch.device = CPU
) -> Iterator[dict[str, Any]]:
    """Average the weights that rounds of refining ended with into `out`, and evaluate them.

    Rounds that end at different strengths meet in between ("model soups", Wortsman et al. 2022). Yields what there is
    to say. Raises ValueError if `work` has not all of these rounds, or a later one that began from other weights.
    """
    files = [_refined(work, family, number) for number in rounds]
    if missing := [str(file) for file in files if not file.exists()]:
        raise ValueError(f"there is no round of refining in {', '.join(missing)}; refine {family} first")
    model = Model.shipped(family, out / family, work / f"{family}.pt", device)
    if (begun := _refined(work, family, _rounds(model.progress.curve) + 1)).exists():
        raise ValueError(f"{begun} was begun from other weights: finish that round first, or remove it")
    states = [torch.load(file, weights_only=False, map_location=CPU)["model"] for file in files]
    model.model.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    before = (out / family / CARD).read_text()
    yield from model.finish(out / family, count, lambda scores: average_card(before, family, rounds, scores, count))


def evaluate(family: str, work: Path, out: Path, count: int, device: torch.device = CPU) -> Iterator[dict[str, Any]]:
    """Evaluate the model in `out` and write the result into its card; yields progress."""
    folder = out / family
    model = Model.shipped(family, folder, work / f"{family}.pt", device)
    before = (folder / CARD).read_text()
    yield from model.judge(folder, count, lambda scores: evaluated_card(before, scores, count))


def _machine(device: torch.device, compiled: bool) -> Machine:
    more = " --compiled" * compiled
    if device.type == "cuda":
        return Machine(f"one {torch.cuda.get_device_name(device)}", f"--device {device}{more}")
    threads = torch.get_num_threads()
    return Machine(f"{threads} core{'s' * (threads > 1)} of {processor()}", f"--threads {threads}{more}")


def _asked(about: str) -> str:
    """The command's option for a round about something."""
    return about and f"--{about}"


def _rounds(curve: Sequence[Mapping[str, Any]]) -> int:
    """Number of refining rounds in a language model's curve."""
    return max((int(line.get("refined", 0)) for line in curve), default=0)


def _refined(work: Path, family: str, number: int) -> Path:
    """File of a round of a family's refining."""
    return work / f"{family}-refined-{number}.pt"


def draw(parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Draw initial weights: fan-in scaled, distinct embeddings, an undecided head."""
    for name, parameter in parameters:
        if parameter.dim() < 2:
            continue
        scale = 1 / math.sqrt(parameter[0].numel())
        if "embed_tokens" in name:
            scale = _EMBEDDING_SCALE
        elif "lm_head" in name:
            scale = 0.02
        nn.init.normal_(parameter, std=scale)
