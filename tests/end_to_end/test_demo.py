"""The demo asks the bundled model, and says so where an answer is wrong."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from client import Service
from rich.console import Console

from serving.cli.demo_pages import Pages, Story
from serving.cli.demo_rag import Rag

pytestmark = pytest.mark.service

SEED = 7


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200, file=io.StringIO())


def test_the_demo_asks_what_the_model_answers_from_reused_pages(bundled: Service, console: Console):
    assert Pages(SEED).converse(console, bundled.url, bundled.model)
    said = console.export_text()
    assert said.count(", right\n") == 2
    assert "wrong: it is" not in said
    assert ", 0 vision tokens encoded" in said


def test_the_demo_of_retrieval_finds_the_pages_and_links_them(bundled: Service, console: Console):
    assert Rag(SEED).converse(console, bundled.url, bundled.model)
    said = console.export_text()
    assert said.count("alder.pdf page 1") == 2
    assert said.count(", right\n") == 2


def test_the_demo_fails_where_an_answer_is_not_what_the_pages_say(
    bundled: Service, console: Console, monkeypatch: pytest.MonkeyPatch
):
    drawn = Story.drawn
    monkeypatch.setattr(Story, "drawn", lambda seed: replace(drawn(seed), answers=["plaid", drawn(seed).answers[1]]))
    assert not Pages(SEED + 2).converse(console, bundled.url, bundled.model)
    assert "wrong: it is plaid" in console.export_text()
