"""From a family's name to its checkpoint: train the language model, teach the tower its codes, write the folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infra.reference.families import FAMILIES
from infra.reference.prompts import Words
from infra.reference.training import STAGES, Codes, Progress, Settings, train

_EMBEDDING_SCALE = 0.5


def train_language(family: str, work: Path) -> Iterator[dict[str, Any]]:
    """Train the family's language model in `work`, from where it was stopped; yields the curve."""
    kind = FAMILIES[family]
    settings = Settings()
    torch.manual_seed(settings.seed)
    tokens = kind.recipe.tokenizer()
    model = kind.recipe.model(tokens)
    language = kind.language(model)
    draw(language.named_parameters())
    codes = Codes(kind.recipe.hidden, kind.levels)
    words = Words(tokens, kind.image, kind.cell_token)
    parameters = [*trained(language), *codes.parameters()]
    file = work / f"{family}.language.pt"
    state = torch.load(file, weights_only=False) if file.exists() else None
    progress = Progress()
    if state:
        language.load_state_dict(state["language"])
        codes.load_state_dict(state["codes"])
        progress = Progress(**state["progress"])
        print(f"going on from step {progress.step}", flush=True)

    def save(optimiser: torch.optim.Optimizer, generator: torch.Generator) -> None:
        work.mkdir(parents=True, exist_ok=True)
        parts = {
            "language": language.state_dict(), "codes": codes.state_dict(), "progress": asdict(progress),
            "optimiser": optimiser.state_dict(), "generator": generator.get_state(),
        }  # fmt: skip
        torch.save(parts, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)

    yield from train(language, codes, words, parameters, STAGES, settings, progress, save, state)


def trained(language: Any) -> list[nn.Parameter]:
    """The parameters of the language model and its head, without those of the tower."""
    return [*language.text.parameters(), *language.model.lm_head.parameters()]


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
