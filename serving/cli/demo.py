"""The demo: three pages that refer to one another, questions about them, and what the later ones did not pay for again.

The bundled model is small, but it was trained to read such pages (`infra.reference`): its answers are checked.
"""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openai import DefaultHttpxClient, OpenAI
from ray import serve
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.reference import DEFAULT_MODEL, weights
from infra.reference.pictures import page_picture
from infra.reference.scenes import Form, Scenes, Split, draw_items
from infra.reference.vocabulary import COLOURS, THINGS, question
from serving.config import OrbitServeConfig
from serving.deploy.launch import APPLICATION, StartUpError, application

PAGES = Form(pages=3, things=12, copies=12)
_ROOT = Path(".orbitserve")


@dataclass(frozen=True)
class Answer:
    """A streamed answer and what the server said about it."""

    text: str
    ttft_ms: float  # measured by this client
    orbit: dict[str, Any]


def demo_config(port: int) -> OrbitServeConfig:
    """The embedded defaults: bundled checkpoint, one replica a role, library on local disk."""
    return OrbitServeConfig.model_validate(
        {
            "model": {"path": weights(DEFAULT_MODEL), "dtype": "float32", "max_model_len": 4096},
            "http": {"port": port},
            "library": {"directory": _ROOT / "demo" / "library"},
            "files_url": str(_ROOT / "demo" / "files"),
        }
    )


def run_demo(console: Console, port: int, keep: bool = False, seed: int | None = None) -> bool:
    """Run the whole demo; returns whether the second request reused every page and the answers are right."""
    began = time.monotonic()
    config = demo_config(port)
    console.print(f"starting OrbitServe on port {port}: one replica of every role, bundled model {DEFAULT_MODEL}")
    try:
        with application(config, console) as url:
            console.print(f"ready after {time.monotonic() - began:.0f} s\n")
            good = converse(console, url, config.model.served_name, time.time_ns() if seed is None else seed)
            _how_to_go_on(console, url, config.model.served_name)
            if keep:
                console.print("\nserving on; interrupt (Ctrl-C) to stop")
                while True:
                    time.sleep(1)
    except StartUpError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}\nrun `make doctor` to find out why")
        return False
    except KeyboardInterrupt:
        return True
    return good


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


def converse(console: Console, url: str, model: str, seed: int) -> bool:
    """Ask a service that this process started; returns whether it reused every page and its answers are right."""
    past_proxies = DefaultHttpxClient(trust_env=False)
    client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=past_proxies)
    # new pages in every run: the first request must not profit from the last demo
    story, warming = Story.drawn(seed), Story.drawn(seed + 1)
    files = [
        client.files.create(file=(f"page-{i + 1}.png", picture), purpose="vision").id
        for i, picture in enumerate(story.pictures)
    ]
    console.print(f"uploaded three pages: {', '.join(files)}\n")
    _ask(client, model, [*map(_inline_part, warming.pictures), warming.questions[0]], mode="off")

    one, two, three = (_picture_part(file) for file in files)
    first = _ask(client, model, [one, two, three, story.questions[0]])
    right = _show(console, "first request: pages 1-2-3", first, story, 0)
    wait_until_formed()
    second = _ask(client, model, ["Page", two, "Page", one, "Page", three, story.questions[1]])
    right &= _show(console, "second request: pages 2-1-3, other text around them", second, story, 1)
    if second.text != story.answers[1]:  # is it the reuse, or the model, which is right 99 times of 100?
        exact = _ask(client, model, ["Page", two, "Page", one, "Page", three, story.questions[1]], mode="off")
        verdict = f"the same with every token computed (mode off): {exact.text!r}; again with --seed {seed}\n"
        console.print(verdict, markup=False)
    blind = _ask(client, model, [two, one, three, story.questions[1]], mode="full-reuse")
    verdict = _blindly(blind.text, story.answers[1])
    console.print(f"[bold]the same without patches[/bold] (mode full-reuse): {verdict}\n")
    reused = all(chunk["operating_point"] in ("patched", "composed") for chunk in second.orbit["chunks"])
    console.print(
        f"time to first token: {first.ttft_ms:.0f} ms, then {second.ttft_ms:.0f} ms: "
        f"[bold]{first.ttft_ms / second.ttft_ms:.1f} times sooner[/bold]; {second.orbit['tokens_reused']} of "
        f"{second.orbit['prompt_tokens']} prompt tokens linked from the library, "
        f"{second.orbit['vision_tokens_encoded']} vision tokens encoded"
    )
    if not reused:
        console.print("[red]the second request did not reuse every page[/red]")
    return reused and right


def _blindly(text: str, wanted: str) -> str:
    """What a prompt linked without patches answered, and what that says."""
    if text == wanted:
        return f"{text!r}, right by chance: what page 3 takes from the others is lost all the same."
    return f"{text!r}, wrong. What page 3 takes from the others is lost, and nothing says so."


def wait_until_formed() -> None:
    """Wait until the prefill worker and the patch compiler have stored what they learnt so far."""
    serve.get_deployment_handle("PrefillWorker", APPLICATION).flush.remote().result(timeout_s=120)
    serve.get_deployment_handle("PatchCompiler", APPLICATION).flush.remote().result(timeout_s=120)


def _picture_part(file_id: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}}


def _inline_part(image: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _ask(client: OpenAI, model: str, parts: list[Any], mode: str = "auto") -> Answer:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    began = time.perf_counter()
    messages: Any = [{"role": "user", "content": content}]
    stream: Any = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"orbit": {"mode": mode}},
    )
    text, ttft = "", 0.0
    orbit: dict[str, Any] = {}
    for event in stream:
        ttft = ttft or (time.perf_counter() - began) * 1e3
        if event.choices:
            text += event.choices[0].delta.content or ""
        orbit = getattr(event, "orbit", None) or orbit
    return Answer(text, ttft, orbit)


def _show(console: Console, title: str, answer: Answer, story: Story, asked: int) -> bool:
    """Print an answer and how it came to be; returns whether it is right."""
    wanted = story.answers[asked]
    right = answer.text == wanted
    verdict = "[green]right[/green]" if right else f"[red]wrong: it is {wanted}[/red]"
    console.print(f"[bold]{title}[/bold]")
    console.print(f"  {story.questions[asked]} ({story.hints[asked]})", markup=False)
    console.print(f"  answer: {answer.text!r}, {verdict}")
    orbit = answer.orbit
    console.print(
        f"  TTFT {answer.ttft_ms:.0f} ms; tokens: {orbit['tokens_reused']} reused, "
        f"{orbit['tokens_computed']} computed, {orbit['vision_tokens_encoded']} encoded"
    )
    console.print("  stages in ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in orbit["stages_ms"].items()))
    table = Table("chunk", "tokens", "operating point", "why", box=None, padding=(0, 2))
    for chunk in orbit["chunks"]:
        table.add_row(str(chunk["index"] + 1), str(chunk["tokens"]), chunk["operating_point"], chunk["reason"])
    console.print(table)
    console.print()
    return right


def _how_to_go_on(console: Console, url: str, model: str) -> None:
    console.print(
        f"""
your own picture, while a server runs (`make demo KEEP=1`, or `make serve MODEL=path/to/checkpoint`):
  curl {url}/v1/files -F purpose=vision -F file=@picture.png
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{model}", "messages": [
    {{"role": "user", "content": [{{"type": "file", "file": {{"file_id": "file-..."}}}},
                                {{"type": "text", "text": "What is this?"}}]}}]}}'""",
        markup=False,
        highlight=False,
    )
