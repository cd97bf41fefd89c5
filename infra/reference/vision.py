"""Training of a reference model's vision tower to write its language model's codes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from infra.reference.pictures import grid_picture
from infra.reference.prompts import Words
from infra.reference.scenes import NOWHERE, Form
from infra.reference.training import Codes, Progress, Save, resume
from infra.reference.vocabulary import COLOURS, THINGS

Tower = Callable[[Sequence[Image.Image]], list[Tensor]]
FORMS = (Form(3, 8), Form(3, 12), Form(6, 6), Form(3, 12, 4), Form(10, 4, 9), Form(3, 12, 12))
_CELLS = 768  # a step's, over as many pages of one form as hold them
_RATE = 1e-3
_EVERY = 100  # steps from one line of the curve, and one checkpoint, to the next


def train_tower(
    tower: Tower,
    parameters: list[nn.Parameter],
    codes: Codes,
    embedding: Tensor,
    words: Words,
    cell: int,
    steps: int,
    forms: Sequence[Form],
    progress: Progress,
    save: Save,
    state: dict[str, Any] | None = None,
) -> Iterator[dict[str, float]]:
    """Train a tower to write the codes of random pages' cells; yields curve lines.

    It goes on from `progress` and `state`, and `save` is called with what that needs, as `training.train` has it.
    `error` of a line is the root mean square error as a share of the codes' own size.
    """
    generator = torch.Generator().manual_seed(2)
    optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.01, betas=(0.9, 0.98))
    resume(optimiser, generator, state)
    began = time.monotonic() - progress.seconds
    for step in range(progress.step, steps):
        for group in optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        form = forms[int(torch.randint(len(forms), (1,), generator=generator))]
        pages = max(1, _CELLS // form.cells)
        things, colours, sources = random_cells(pages * form.cells, generator)
        shown = zip(*(part.split(form.cells) for part in (things, colours, sources)), strict=True)
        pictures = [grid_picture(thing, colour, source, form.columns, cell) for thing, colour, source in shown]
        wanted = [level.detach() for level in codes(embedding, words, things, colours, sources)]
        written = tower(pictures)
        loss = torch.stack([(a - b).square().mean() for a, b in zip(written, wanted, strict=True)]).sum()
        size = torch.stack([b.square().mean() for b in wanted]).sum()
        optimiser.zero_grad(set_to_none=True)
        (loss / size).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        progress.step, progress.seconds = step + 1, time.monotonic() - began
        if (step + 1) % _EVERY == 0 or step + 1 == steps:
            error = (loss / size).sqrt().item()
            yield {"step": step + 1, "seconds": round(progress.seconds), "error": round(error, 4)}
            save(optimiser, generator)


def random_cells(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Things, colours and sources of `count` cells, half of them pencilled."""
    things = torch.randint(len(THINGS), (count,), generator=generator)
    colours = torch.randint(len(COLOURS), (count,), generator=generator)
    sources = torch.randint(len(THINGS), (count,), generator=generator)
    pencilled = torch.rand(count, generator=generator) < 0.5
    return things, colours, torch.where(pencilled, sources, NOWHERE)


def qwen_tower(model: Any, processor: Any) -> Tower:
    """The tower of a Qwen-VL shaped model, its deepstack levels behind the first."""

    def tower(pictures: Sequence[Image.Image]) -> list[Tensor]:
        inputs = processor(images=list(pictures), return_tensors="pt").to(model.device)
        outputs = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        return [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]

    return tower


def kimi_tower(model: Any, processor: Any) -> Tower:
    """The tower of a Kimi-VL shaped model, for pictures of one size."""

    def tower(pictures: Sequence[Image.Image]) -> list[Tensor]:
        inputs = processor.preprocess(list(pictures))
        (grid,) = set(map(tuple, inputs["image_grid_hws"].tolist()))
        see, project = model["vision_tower"], model["multi_modal_projector"]
        patches = inputs["pixel_values"].to(next(project.parameters()).device).unflatten(0, (len(pictures), -1))
        return [project(see(patches, grid), grid).flatten(0, 1)]

    return tower


def llava_tower(model: Any, processor: Any) -> Tower:
    """The tower of a LLaVA shaped model."""

    def tower(pictures: Sequence[Image.Image]) -> list[Tensor]:
        inputs = processor(images=list(pictures), return_tensors="pt").to(model.device)
        features = model.model.get_image_features(pixel_values=inputs["pixel_values"])
        return [torch.cat(list(features.pooler_output))]

    return tower
