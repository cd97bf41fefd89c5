"""The demos: questions about three files in two orders, and what the later ones reused."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstore.private_files import make_private_folder
from serving.config import OrbitServeConfig
from serving.deploy.handles import driver_handle
from serving.deploy.launch import APPLICATION, StartUpError, application

_ROOT = Path(".orbitserve") / "demo"


@dataclass(frozen=True)
class Answer:
    """A streamed answer and what the server said about it."""

    text: str
    ttft_ms: float  # measured by this client
    orbit: dict[str, Any]


class Demo(ABC):
    """A model, and a conversation about three files."""

    title: str  # of the model
    how_to_go_on: str  # commands for a server that runs; with {url} and {model}

    @abstractmethod
    def model(self) -> dict[str, Any]:
        """Get the model that is served: the configuration's `model`.

        Raises:
            ModelUnavailable: it cannot be had.
        """

    @abstractmethod
    def converse(self, console: Console, url: str, model: str) -> bool:
        """Ask a service of this process. True if all files were reused and the answers are right."""


def demo_config(model: dict[str, Any], port: int, root: Path) -> OrbitServeConfig:
    """The embedded defaults: one replica a role, library on local disk."""
    return OrbitServeConfig.model_validate(
        {
            "model": model,
            "http": {"port": port},
            "library": {"directory": root / "library"},
            "files_url": str(root / "files"),
        }
    )


def run_demo(demo: Demo, console: Console, port: int, keep: bool = False) -> bool:
    """Run a demo; returns whether every file was reused and the answers are right.

    What it stores lives as long as it runs: the next one's first request must not profit.

    Raises:
        ModelUnavailable: see `Demo.model`.
    """
    model, began = demo.model(), time.monotonic()
    make_private_folder(_ROOT)
    with TemporaryDirectory(dir=_ROOT, ignore_cleanup_errors=True) as root:
        config = demo_config(model, port, Path(root).absolute())
        console.print(f"starting OrbitServe on port {port}: one replica of every role, {demo.title}")
        try:
            with application(config, console) as url:
                console.print(f"ready after {time.monotonic() - began:.0f} s\n")
                good = demo.converse(console, url, config.model.served_name)
                say = demo.how_to_go_on.format(url=url, model=config.model.served_name)
                console.print(say, markup=False, highlight=False)
                if keep:
                    console.print("\nserving on; interrupt (Ctrl-C) to stop")
                    threading.Event().wait()
        except StartUpError as error:
            console.print(f"[red]error:[/red] {escape(str(error))}\nrun `make doctor` to find out why")
            return False
        except KeyboardInterrupt:
            return True
    return good


def open_client(url: str) -> OpenAI:
    """The official client, past proxies."""
    return OpenAI(base_url=f"{url}/v1", api_key="none", http_client=DefaultHttpxClient(trust_env=False))


def file_part(file_id: str) -> dict[str, Any]:
    """An uploaded file in a message."""
    return {"type": "file", "file": {"file_id": file_id}}


def ask(client: OpenAI, model: str, parts: list[Any], mode: str = "auto") -> Answer:
    """The greedy answer to one user turn of texts and other parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return answered(client, model, content, {"mode": mode})


def answered(client: OpenAI, model: str, content: Any, orbit_options: dict[str, Any]) -> Answer:
    """The greedy answer to one user turn, streamed."""
    began = time.perf_counter()
    stream: Any = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"orbit": orbit_options},
    )
    text, ttft = "", 0.0
    orbit: dict[str, Any] = {}
    for event in stream:
        ttft = ttft or (time.perf_counter() - began) * 1e3
        if event.choices:
            text += event.choices[0].delta.content or ""
        orbit = getattr(event, "orbit", None) or orbit
    return Answer(text, ttft, orbit)


def wait_until_formed() -> None:
    """Wait until the prefill worker and the patch compiler have stored what they learnt so far."""
    driver_handle("PrefillWorker", APPLICATION).flush.remote().result(timeout_s=300)
    driver_handle("PatchCompiler", APPLICATION).flush.remote().result(timeout_s=300)


def show(console: Console, title: str, question: str, answer: Answer, wanted: str, right: bool) -> bool:
    """Print an answer and how it came to be; returns `right`."""
    verdict = "[green]right[/green]" if right else f"[red]wrong: it is {wanted}[/red]"
    console.print(f"[bold]{title}[/bold]")
    console.print(f"  {question}", markup=False)
    console.print(f"  answer: {escape(repr(answer.text))}, {verdict}")
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


def compare(console: Console, first: Answer, second: Answer) -> bool:
    """Print what the second request saved; returns whether it reused every file."""
    console.print(
        f"time to first token: {first.ttft_ms:.0f} ms, then {second.ttft_ms:.0f} ms: "
        f"[bold]{first.ttft_ms / second.ttft_ms:.1f} times sooner[/bold]; {second.orbit['tokens_reused']} of "
        f"{second.orbit['prompt_tokens']} prompt tokens linked from the library, "
        f"{second.orbit['vision_tokens_encoded']} vision tokens encoded"
    )
    reused = all(chunk["operating_point"] in ("patched", "composed", "prefix") for chunk in second.orbit["chunks"])
    if not reused:
        console.print("[red]the second request did not reuse every file[/red]")
    return reused
