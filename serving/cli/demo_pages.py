"""The demo of pictures: three pages that refer to one another.

The bundled model is small, but it was trained to read such pages (`infra.reference`): its answers are checked.
"""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from infra.reference import DEFAULT_MODEL, weights
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Scenes, Split, draw_items
from infra.reference.vocabulary import COLOURS, THINGS, question
from serving.cli.demo import Answer, Demo, ask, compare, file_part, open_client, show, wait_until_formed

PAGES = Form(pages=3, things=12, copies=12)


@dataclass(frozen=True)
class Story:
    """Three pages and two questions about the last one, which an earlier page answers."""

    pictures: list[bytes]
    questions: list[str]
    answers: list[str]
    hints: list[str]

    @classmethod
    def drawn(cls, seed: int) -> Story:
        """A new one for every seed."""
        generator = torch.Generator().manual_seed(seed % (1 << 62))
        while True:
            scenes, _ = draw_items(Split.multi, 1, PAGES, generator)
            asked = _referring(scenes)
            if len(asked) >= 2:
                break
        names, colours = tuple(THINGS), tuple(COLOURS)
        pictures = []
        for page in range(PAGES.pages):
            buffer = io.BytesIO()
            page_picture(scenes, 0, page, 28).save(buffer, "PNG")
            pictures.append(buffer.getvalue())
        two = asked[:2]
        return cls(
            pictures,
            [question([names[thing]]) for thing, _, _ in two],
            [colours[colour] for _, colour, _ in two],
            [f"page 3 shows the {names[thing]} in pencil beside {names[beside]}" for thing, _, beside in two],
        )


def _referring(scenes: Scenes) -> list[tuple[int, int, int]]:
    """Things of the last page that are drawn in pencil: (thing, its colour, the thing beside it)."""
    last = (part[0, -1].tolist() for part in (scenes.things, scenes.colours, scenes.sources))
    return [(thing, colour, beside) for thing, colour, beside in zip(*last, strict=True) if beside >= 0]


class Pages(Demo):
    """The bundled model on pages drawn anew in every run, or from an earlier run's seed."""

    title = f"bundled model {DEFAULT_MODEL}"
    how_to_go_on = """
your own picture, while a server runs (`make demo KEEP=1`, or `make serve MODEL=path/to/checkpoint`):
  curl {url}/v1/files -F purpose=vision -F file=@picture.png
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{model}", "messages": [
    {{"role": "user", "content": [{{"type": "file", "file": {{"file_id": "file-..."}}}},
                                {{"type": "text", "text": "What is this?"}}]}}]}}'"""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = time.time_ns() if seed is None else seed

    def model(self) -> dict[str, Any]:
        return {"path": weights(DEFAULT_MODEL), "dtype": "float32", "max_model_len": 4096}

    def converse(self, console: Console, url: str, model: str) -> bool:
        client, seed = open_client(url), self._seed
        # new pages in every run: the first request must not profit from the last demo
        story, warming = Story.drawn(seed), Story.drawn(seed + 1)
        files = [
            client.files.create(file=(f"page-{i + 1}.png", picture), purpose="vision").id
            for i, picture in enumerate(story.pictures)
        ]
        console.print(f"uploaded three pages: {', '.join(files)}\n")
        ask(client, model, [*map(_inline_part, warming.pictures), warming.questions[0]], mode="off")

        one, two, three = map(file_part, files)
        first = ask(client, model, [one, two, three, story.questions[0]])
        right = _show(console, "first request: pages 1-2-3", first, story, 0)
        wait_until_formed()
        again = ["Page", two, "Page", one, "Page", three, story.questions[1]]
        second = ask(client, model, again)
        right &= _show(console, "second request: pages 2-1-3, other text around them", second, story, 1)
        if second.text != story.answers[1]:  # is it the reuse, or the model, which is right 99 times of 100?
            exact = ask(client, model, again, mode="off")
            verdict = f"the same with every token computed (mode off): {exact.text!r}; again with --seed {seed}\n"
            console.print(verdict, markup=False)
        blind = ask(client, model, [two, one, three, story.questions[1]], mode="full-reuse")
        verdict = _blindly(blind.text, story.answers[1])
        console.print(f"[bold]the same without patches[/bold] (mode full-reuse): {verdict}\n")
        return compare(console, first, second) and right


def _blindly(text: str, wanted: str) -> str:
    """Verdict on the answer to a prompt that was linked without patches."""
    if text == wanted:
        return f"{text!r}, right by chance: what page 3 takes from the others is lost all the same."
    return f"{text!r}, wrong. What page 3 takes from the others is lost, and nothing says so."


def _inline_part(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _show(console: Console, title: str, answer: Answer, story: Story, asked: int) -> bool:
    wanted = story.answers[asked]
    question = f"{story.questions[asked]} ({story.hints[asked]})"
    return show(console, title, question, answer, wanted, right=answer.text == wanted)
