"""The demo: three pictures, two questions, and what the second one did not have to pay for again."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw
from ray import serve
from rich.console import Console
from rich.table import Table

from infra.checkpoints import checkpoint_path
from serving.config import OrbitServeConfig
from serving.launch import APPLICATION, StartUpError, application

CHECKPOINT = "qwen2_5_vl-tiny"
_ROOT = Path(".orbitserve")


@dataclass(frozen=True)
class Answer:
    """A streamed answer and what the server said about it."""

    text: str
    ttft_ms: float  # measured by this client
    orbit: dict[str, Any]


def demo_config(port: int, root: Path = _ROOT) -> OrbitServeConfig:
    """The embedded defaults: bundled checkpoint, one replica a role, library on local disk."""
    return OrbitServeConfig.model_validate(
        {
            "model": {"path": checkpoint_path(CHECKPOINT), "dtype": "float32", "max_model_len": 8192},
            "http": {"port": port},
            "library": {"directory": root / "demo" / "library"},
            "files_url": str(root / "demo" / "files"),
        }
    )


def run_demo(console: Console, port: int, keep: bool = False) -> bool:
    """Run the whole demo; returns whether the second request reused what the first had computed."""
    began = time.monotonic()
    config = demo_config(port)
    console.print(f"starting OrbitServe on port {port}: one replica of every role, bundled model {CHECKPOINT}")
    try:
        with application(config, console) as url:
            console.print(f"ready after {time.monotonic() - began:.0f} s\n")
            good = _converse(console, url, config.model.served_name)
            _how_to_go_on(console, url, config.model.served_name)
            if keep:
                console.print("\nserving on; interrupt (Ctrl-C) to stop")
                while True:
                    time.sleep(1)
    except StartUpError as error:
        console.print(f"[red]error:[/red] {error}\nrun `make doctor` to find out why")
        return False
    except KeyboardInterrupt:
        return True
    return good


def _converse(console: Console, url: str, model: str) -> bool:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stamp = time.time_ns()  # new pictures in every run: the first request must not profit from the last demo
    files = [
        client.files.create(file=(f"picture-{i + 1}.png", picture(i, stamp)), purpose="vision").id for i in range(3)
    ]
    console.print(f"uploaded three pictures: {', '.join(files)}\n")
    _ask(client, model, [_inline_part(picture(9, stamp)), "warm-up"], mode="off")

    one, two, three = (_picture_part(file) for file in files)
    first = _ask(client, model, ["Here are three pages.", one, two, three, "What changes from page to page?"])
    _show(console, "first request: pages 1-2-3", first)
    wait_until_formed()
    second = _ask(client, model, [three, "was last; before it came", one, "and", two, "Which one has the most shapes?"])
    _show(console, "second request: pages 3-1-2, other text around them", second)

    reused = all(chunk["operating_point"] == "patched" for chunk in second.orbit["chunks"])
    faster = first.ttft_ms / second.ttft_ms
    console.print(
        f"time to first token: {first.ttft_ms:.0f} ms, then {second.ttft_ms:.0f} ms: "
        f"[bold]{faster:.1f} times sooner[/bold]; {second.orbit['tokens_reused']} of {second.orbit['prompt_tokens']} "
        "prompt tokens linked from the library, "
        f"{second.orbit['vision_tokens_encoded']} vision tokens encoded"
    )
    if not reused:
        console.print("[red]the second request did not reuse every page[/red]")
    return reused


def wait_until_formed() -> None:
    """Wait until the prefill worker and the patch compiler have stored what they learnt so far."""
    serve.get_deployment_handle("PrefillWorker", APPLICATION).flush.remote().result(timeout_s=120)
    serve.get_deployment_handle("PatchCompiler", APPLICATION).flush.remote().result(timeout_s=120)


def picture(number: int, seed: int, size: int = 448) -> bytes:
    """A page of coloured shapes as PNG bytes."""
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    for i in range(4 + number):
        x, y = 30 + (i * 97 + number * 53) % (size - 120), 30 + (i * 61 + number * 89) % (size - 120)
        colour = ("crimson", "royalblue", "seagreen", "orange", "purple")[(i + number) % 5]
        (draw.ellipse if (i + number) % 2 else draw.rectangle)((x, y, x + 80, y + 80), fill=colour)
    draw.text((8, size - 20), f"page {number + 1}, printed at {seed}", fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


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


def _show(console: Console, title: str, answer: Answer) -> None:
    orbit = answer.orbit
    console.print(f"[bold]{title}[/bold]")
    console.print(f"  answer: {answer.text!r} (an untrained model: the words mean nothing)", markup=False)
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
