"""That a training step keeps to the device of its parameters, seen without a GPU.

Tensors that have a device but no values (fake tensors) refuse an operation over two devices, as a GPU does. The device
is one that is made up; it stays in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infra.reference import training
from infra.reference.families import FAMILIES
from infra.reference.making import Making
from infra.reference.pictures import grid_picture
from infra.reference.prompts import Layout, lay_out
from infra.reference.scenes import Form, Style, draw_questions, draw_scenes
from infra.reference.vision import random_cells

FORM = Form(3, 12, 12)
ELSEWHERE = "elsewhere"


class Elsewhere:
    """Moves tensors there, of which only shapes arrive."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        return FakeTensor(self.mode, tensor.detach().to("meta"), torch.device(ELSEWHERE, 0))

    def module(self, module: nn.Module) -> None:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                part._parameters[name] = None if parameter is None else nn.Parameter(self.tensor(parameter))
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else self.tensor(buffer)

    def fields(self, holder: Any) -> Any:
        """A dataclass with its tensors there."""
        return replace(holder, **{k: self.tensor(v) for k, v in vars(holder).items() if isinstance(v, Tensor)})


def make_up_a_device() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(ELSEWHERE)
    training.torch.autocast = lambda *_, **__: nullcontext()  # it has no mixed precision


def devices_of_a_language_step(family: str, work: Path) -> set[str]:
    """The devices of a training step's scores and gradients."""
    made, elsewhere = Making.begin(family, work), Elsewhere()
    generator = torch.Generator().manual_seed(1)
    scenes = draw_scenes(2, FORM, Style(), generator)
    layout, nothing = Layout((3, 0, 2), made.language.axes), torch.zeros(2, dtype=torch.bool)
    prompts = lay_out(scenes, draw_questions(scenes, 3, False, 0.7, generator), made.words, layout, nothing, generator)
    for module in (made.model, made.codes):
        elsewhere.module(module)
    prompts = elsewhere.fields(prompts)
    parameters = [*made.language_parameters(), *made.codes.parameters()]
    with elsewhere.mode:
        scores = training.answers(made.language, made.codes, made.words, scenes, prompts, generator, 0.1)
        nn.functional.cross_entropy(scores.flatten(0, -2), prompts.labels.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
    return {str(tensor.device) for tensor in (scores, *(p.grad for p in parameters if p.grad is not None))}


def devices_of_a_tower_step(family: str, work: Path) -> set[str]:
    """The devices of what a tower writes, of what it is to write, and of its gradients."""
    made, elsewhere = Making.begin(family, work), Elsewhere()
    things, colours, sources = random_cells(FORM.cells, torch.Generator().manual_seed(1))
    picture = grid_picture(things, colours, sources, FORM.columns, made.kind.cell)
    for module in (made.model, made.codes):
        elsewhere.module(module)
    parameters = list(made.kind.tower_module(made.model).parameters())
    processor = made.kind.recipe.image_processor()

    class Processed(dict):
        def to(self, device: torch.device) -> Processed:
            return Processed({name: elsewhere.tensor(value) for name, value in self.items()})

    tower = made.kind.tower(made.model, lambda **asked: Processed(processor(**asked)))
    with elsewhere.mode:
        wanted = made.codes(made.language.embedding.weight.detach(), made.words, things, colours, sources)
        written = tower([picture])
        torch.stack([(a - b).square().mean() for a, b in zip(written, wanted, strict=True)]).sum().backward()
    return {str(tensor.device) for tensor in (*written, *wanted, *(p.grad for p in parameters if p.grad is not None))}


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process that has the device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=make_up_a_device) as pool:
        yield pool


@pytest.mark.parametrize(
    ("step", "family"),
    [
        *((devices_of_a_language_step, family) for family in FAMILIES if family != "qwen3_vl"),
        (devices_of_a_tower_step, "llava"),
    ],  # the others ask their tensors for values on the way
)
def test_a_training_step_keeps_to_its_device(apart: ProcessPoolExecutor, step: Any, family: str, tmp_path: Path):
    assert apart.submit(step, family, tmp_path).result() == {f"{ELSEWHERE}:0"}
