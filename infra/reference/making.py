"""From a family's name to its checkpoint: train the language model, teach the tower its codes, write the folder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infra.machine import processor
from infra.reference.card import card, curve_text
from infra.reference.families import FAMILIES, ReferenceFamily
from infra.reference.pictures import page_picture
from infra.reference.prompts import Layout, Words, lay_out
from infra.reference.scenes import Form, Scenes, Split, draw_items
from infra.reference.training import STAGES, Codes, Progress, Settings, train
from infra.reference.vision import FORMS, Tower, train_tower

CURVE = "training.json"
MEASURED = "orbitserve.json"  # see `prefill_workers.measured`
TOWER_STEPS = 1500
EVALUATED = {split: Form(6, 6, 4) if split is Split.retrieval else Form(3, 8, 6) for split in Split}
_EVALUATION_SEED = 1_000_003  # training draws from other seeds
_EMBEDDING_SCALE = 0.5


@dataclass
class Making:
    """A model that is being made, and where its training is kept."""

    family: str
    kind: ReferenceFamily
    tokens: Any
    model: Any
    language: Any
    codes: Codes
    words: Words
    file: Path
    state: dict[str, Any] | None
    progress: Progress

    @classmethod
    def begin(cls, family: str, work: Path) -> Making:
        """The model as `work` has it, or one with weights drawn anew."""
        kind = FAMILIES[family]
        torch.manual_seed(Settings().seed)
        tokens = kind.recipe.tokenizer()
        model = kind.recipe.model(tokens)
        language = kind.language(model)
        draw(model.named_parameters())
        if kind.alike is not None:
            kind.alike(language)
        made = cls(
            family, kind, tokens, model, language, Codes(kind.recipe.hidden, kind.levels),
            Words(tokens, kind.image, kind.cell_token), work / f"{family}.pt", None, Progress(),
        )  # fmt: skip
        if made.file.exists():
            state = torch.load(made.file, weights_only=False)
            model.load_state_dict(state["model"])
            made.codes.load_state_dict(state["codes"])
            made.state, made.progress = state, Progress(**state["progress"])
        return made

    def keep(self, optimiser: torch.optim.Optimizer | None, generator: torch.Generator | None) -> None:
        """Write what a later call goes on from."""
        parts = {
            "model": self.model.state_dict(), "codes": self.codes.state_dict(), "progress": asdict(self.progress),
            "optimiser": optimiser and optimiser.state_dict(), "generator": generator and generator.get_state(),
        }  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save(parts, part)
        part.rename(self.file)

    def train_language(self) -> Iterator[dict[str, Any]]:
        """Train the language model from where it stands; yields the curve."""
        if self.progress.step == sum(stage.steps for stage in STAGES):
            return
        tower = {id(parameter) for parameter in self.kind.tower_module(self.model).parameters()}
        parameters = [parameter for parameter in self.model.parameters() if id(parameter) not in tower]
        parameters += self.codes.parameters()
        yield from train(
            self.language, self.codes, self.words, parameters, STAGES, Settings(), self.progress, self.keep, self.state
        )

    def train_tower(self) -> Iterator[dict[str, Any]]:
        """Teach the tower the codes of the trained language model; yields the curve."""
        embedding = self.language.embedding.weight.detach().float()
        parameters = list(self.kind.tower_module(self.model).parameters())
        forms = self.kind.forms or FORMS
        for line in train_tower(
            self.tower(), parameters, self.codes, embedding, self.words, self.kind.cell, TOWER_STEPS, forms
        ):
            self.progress.curve.append({"tower": True, **line})
            yield line
        self.keep(None, None)

    def tower(self) -> Tower:
        """Pictures to the codes of their cells."""
        return self.kind.tower(self.model, self.kind.recipe.image_processor())

    def export(self, folder: Path) -> None:
        """Write the checkpoint, and the training's curve beside it; the model's weights are then the rounded ones.

        What was measured of the weights that lay there goes: it does not hold for these.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.kind.recipe.save(self.model, self.tokens, folder)
        self.model.float()
        (folder / MEASURED).unlink(missing_ok=True)
        (folder / CURVE).write_text(curve_text(self.progress.curve))

    @torch.no_grad()
    def evaluate(self, split: Split, count: int, form: Form | None = None, batch: int = 25) -> float:
        """The share of held-out questions of a split whose answer is right, from pictures, by full prefill."""
        generator = torch.Generator().manual_seed(_EVALUATION_SEED)
        scenes, questions = draw_items(split, count, self.kind.form(form or EVALUATED[split]), generator)
        layout = Layout((0,) * scenes.form.pages, self.language.axes)
        tower, right = self.tower(), 0
        for start in range(0, count, batch):
            rows = torch.arange(start, min(start + batch, count))
            part, asked = scenes.take(rows), questions.take(rows)
            prompts = lay_out(part, asked, self.words, layout, torch.zeros(len(rows), dtype=torch.bool), generator)
            levels = [level.unflatten(0, (len(rows), -1)) for level in tower(_pictures(part, self.kind.cell))]
            embedded = self.language.embedding(prompts.tokens).index_copy(1, prompts.cells, levels[0])
            positions = prompts.positions[:, None].expand(-1, len(rows), -1)
            hidden = self.language(embedded, positions, prompts.sees, prompts.cells, levels[1:])
            answered = self.language.logits(hidden[:, prompts.first :]).argmax(-1)
            names = asked.things.shape[2]
            wanted = prompts.labels[:, 0, -1 - names : -1]
            right += int((answered[:, -1 - names : -1] == wanted).all(-1).sum())
        return right / count


def _pictures(scenes: Scenes, cell: int) -> list[Any]:
    sets = range(len(scenes.things))
    return [page_picture(scenes, index, page, cell) for index in sets for page in range(scenes.form.pages)]


def make(family: str, work: Path, out: Path, count: int) -> Iterator[dict[str, Any]]:
    """Train, export and evaluate a family's model, from where `work` stands; yields what there is to say."""
    making = Making.begin(family, work)
    yield from making.train_language()
    if not any("tower" in line for line in making.progress.curve):
        yield from making.train_tower()
    making.export(out / family)
    began, scores = time.monotonic(), {}
    for split in Split:
        scores[str(split)] = share = making.evaluate(split, count)
        yield {"split": str(split), "items": count, "right": share, "seconds": round(time.monotonic() - began)}
    parameters = sum(parameter.numel() for parameter in making.model.parameters())
    machine = {"cpu": processor(), "threads": torch.get_num_threads()}
    text = card(family, parameters, making.progress.curve, machine, scores, count)
    (out / family / "README.md").write_text(text)


def draw(parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Fan-in scaled weights, embeddings large enough to be told apart at once, a head that begins undecided."""
    for name, parameter in parameters:
        if parameter.dim() < 2:
            continue
        scale = 1 / math.sqrt(parameter[0].numel())
        if "embed_tokens" in name:
            scale = _EMBEDDING_SCALE
        elif "lm_head" in name:
            scale = 0.02
        nn.init.normal_(parameter, std=scale)
