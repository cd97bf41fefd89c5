"""A pretrained language model of 30 layers, which answers in plain English from three text files."""

from __future__ import annotations

import io
from typing import Any

import pytest
from client import Service, user
from ray import serve
from rich.console import Console

from serving.cli.demo import file_part
from serving.cli.demo_texts import FIRST, NOTES, SECOND, Texts
from serving.deploy.launch import APPLICATION

pytestmark = pytest.mark.service


@pytest.fixture(scope="session")
def console() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def points(answer: dict[str, Any]) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


def words(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_the_demo_of_texts_answers_from_files_that_it_reuses(real: Service, console: Console):
    assert Texts().converse(console, real.url, real.model)
    said = console.export_text()
    assert said.count(", right\n") == 2
    assert "recomputed" in said, "the first request computes what comes after the first file"
    assert "VisionEncoder" not in serve.status().applications[APPLICATION].deployments


def test_answers_are_right_in_every_order_and_exact_is_off(real: Service):
    client = real.openai()
    files = [client.files.create(file=(name, text.encode()), purpose="user_data").id for name, text in NOTES.items()]
    one, two, three = map(file_part, files)
    linked = {}
    for question, pages in ((FIRST, (one, two, three)), (SECOND, (two, one, three))):
        messages = user(*pages, question.text)
        real.chat(messages)
        real.settle()
        answers = {mode: real.chat(messages, mode, max_tokens=24) for mode in ("auto", "exact", "off")}
        for mode, answer in answers.items():
            assert question.answer in words(answer), mode
        assert words(answers["exact"]) == words(answers["off"])
        assert points(answers["off"]) == ["recomputed"] * 3
        linked[question.text] = points(answers["auto"])
    assert all(set(each) <= {"patched", "composed"} for each in linked.values()), linked
