"""What the fidelity tables say offline is what the service answers: some items, asked over HTTP in three modes."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
from client import Service, inline, user

from infra.reference import DEFAULT_MODEL, weights
from infra.reference.families import FAMILIES
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Split, draw_items
from kvstore.patch import PatchKind
from kvstore.patch_form import PatchForm
from serving.bench.fidelity.arms import PageKV, Repaired
from serving.bench.fidelity.items import SEED, items
from serving.bench.fidelity.reader import Reader
from serving.bench.fidelity.study import Gathered, Study

pytestmark = pytest.mark.service

RANK, ITEMS, FORM = 16, 6, Form(3, 8, 6)
CELL = FAMILIES[DEFAULT_MODEL].cell


@pytest.fixture
def service(only_service: Callable[..., Service]) -> Service:
    model = {"path": weights(DEFAULT_MODEL), "dtype": "float32", "max_model_len": 2048}
    return only_service("reference model", "float32", model=model, patch={"rank": RANK})


def asked() -> list[list[dict[str, Any]]]:
    """The items' messages; the same pages and questions as `items` draws."""
    scenes, questions = draw_items(Split.multi, ITEMS, FORM, torch.Generator().manual_seed(SEED))
    found = []
    for index in range(ITEMS):
        parts: list[Any] = []
        for page in range(FORM.pages):
            buffer = io.BytesIO()
            page_picture(scenes, index, page, CELL).save(buffer, "PNG")
            parts.append(inline(buffer.getvalue()))
        found.append(user(*parts))
    assert questions.asked.all()
    return found


def top(answer: dict[str, Any]) -> dict[str, float]:
    first = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token"]: entry["logprob"] for entry in first["top_logprobs"]}


class Offline(NamedTuple):
    """What the arms give offline: log-probabilities [items, vocabulary] of the answer's token, by mode."""

    logprobs: dict[str, torch.Tensor]
    questions: list[str]
    answers: list[str]
    wanted: list[int]
    numbers: dict[str, int]  # token ids by text


def offline() -> Offline:
    """Measured in a process of its own: ending this engine takes away what others in its process stand on."""
    reader = Reader(weights(DEFAULT_MODEL))
    try:
        with torch.inference_mode():
            study = Study(reader, CELL)
            drawn = list(items(reader, CELL, Split.multi, ITEMS, FORM))
            gathered = study.gather(drawn)
            logprobs = {
                "exact": torch.stack([one.exact.answers[0] for one in gathered]),
                "full-reuse": answers(study, gathered, lambda page: Repaired(page.canonical)),
                "auto": answers(study, gathered, lambda page: patched(study, page)),
            }
            texts = (reader.text(number) for number in range(logprobs["exact"].shape[1]))
            return Offline(
                {mode: values.clone() for mode, values in logprobs.items()},
                [item.question for item in drawn],
                [item.answer for item in drawn],
                [one.prompt.answer[0] for one in gathered],
                {text: number for number, text in enumerate(texts)},
            )
    finally:
        reader.close()


def patched(study: Study, page: PageKV) -> Repaired:
    """A page with the patch that the service forms of it."""
    return study.arms.patched(page, PatchForm(RANK).form(page.delta, study.arms.layout, PatchKind.own))


def answers(study: Study, gathered: list[Gathered], arm: Callable[..., Repaired]) -> torch.Tensor:
    linked = [[arm(page).kv for page in one.pages] for one in gathered]
    return torch.stack([read.answers[0] for read in study.reader.over([one.prompt for one in gathered], linked)])


def test_the_service_answers_as_the_offline_arms(service: Service):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        expected = pool.submit(offline).result()
    wrong = 0
    for index, messages in enumerate(asked()):
        messages[0]["content"].append({"type": "text", "text": expected.questions[index]})
        for mode in ("exact", "full-reuse", "auto"):
            answer = service.chat(messages, mode=mode, logprobs=True, top_logprobs=5, max_tokens=4)
            service.settle()
            points = {chunk["operating_point"] for chunk in answer["orbit"]["chunks"]}
            assert points <= {"exact": {"encoded"}, "full-reuse": {"relocated"}, "auto": {"patched"}}[mode]
            row = expected.logprobs[mode][index]
            for token, logprob in top(answer).items():
                assert logprob == pytest.approx(float(row[expected.numbers[token]]), abs=2e-3), (mode, token)
            text, right = answer["choices"][0]["message"]["content"], expected.answers[index]
            assert (text == right) == (int(row.argmax()) == expected.wanted[index])
            wrong += mode == "full-reuse" and text != right
            assert mode == "full-reuse" or text == right
    assert wrong > 0, "blind reuse lost nothing: these items say nothing"
