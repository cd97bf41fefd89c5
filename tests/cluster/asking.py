"""Questions with known answers, as clients of a cluster's service ask them."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving.cli.demo_pages import Story
from tests.cluster.cluster import Cluster

CLIENT_SECONDS = 180.0  # a client that waits longer was met with silence


@dataclass
class Said:
    """Outcome of one request."""

    status: int = 0
    text: str = ""
    error: str = ""  # its error event, or the body of an error
    retry_after: str | None = None
    orbit: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # until it had ended
    first_s: float | None = None  # until its first token
    finished: bool = False  # a stream with a finish reason and [DONE]


def pages(story: Story, order: Sequence[int] = (0, 1, 2)) -> list[dict[str, Any]]:
    """Image parts of a story's pages."""
    urls = (f"data:image/png;base64,{base64.b64encode(story.pictures[i]).decode()}" for i in order)
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def ask(
    cluster: Cluster,
    content: str | list[dict[str, Any]],
    *,
    mode: str = "auto",
    stream: bool = False,
    began: threading.Event | None = None,
    **fields: Any,
) -> Said:
    """Ask once; `began` is set by a stream's first token. No error of HTTP is raised but that nothing came."""
    body = {
        "model": "qwen2_5_vl",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 12,
        "orbit": {"mode": mode},
        "stream": stream,
        **fields,
    }
    said, at = Said(), time.monotonic()
    url = f"{cluster.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=CLIENT_SECONDS, trust_env=False) as response:
        said.status, said.retry_after = response.status_code, response.headers.get("retry-after")
        if not stream or response.status_code != 200:
            answer = response.read().decode()
            if response.status_code == 200:
                found = json.loads(answer)
                said.text, said.orbit = found["choices"][0]["message"]["content"], found["orbit"]
                said.finished = True
            else:
                said.error = answer
        else:
            _read(response, said, at, began)
    said.seconds = time.monotonic() - at
    return said


def _read(response: httpx.Response, said: Said, at: float, began: threading.Event | None) -> None:
    finish = False
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            said.finished = finish
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            said.error = line
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                said.text += text
                said.first_s = said.first_s or time.monotonic() - at
                if began is not None:
                    began.set()
            finish |= choice.get("finish_reason") is not None


def at_once(
    pool: ThreadPoolExecutor, count: int, cluster: Cluster, content: str | list[dict[str, Any]], **options: Any
) -> list[Future[Said]]:
    """As many of the same request at once."""
    return [pool.submit(ask, cluster, content, **options) for _ in range(count)]
