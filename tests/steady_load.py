"""Clients of a service that ask one after another, and what was wrong with the answers they got."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import httpx
import numpy as np
from PIL import Image

from serving.loadtest.images import data_url

WRITTEN, READ = 120, 2  # tokens of an answer
_SMALL, _LARGE = 168, 336  # pixels of a page's side: 36 and 144 tokens
_PAGES = 4  # that writers ask about
_CLIENT_SECONDS = 300.0


def page(number: int, side: int = _SMALL) -> dict[str, Any]:
    """Image part of a noisy page; the same number gives the same."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype="uint8")
    return {"type": "image_url", "image_url": {"url": data_url(Image.fromarray(pixels))}}


def user(*parts: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """One user turn of texts and images."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def failure(url: str, model: str, messages: Sequence[Mapping[str, Any]], tokens: int) -> str:
    """Fault of a streamed answer of so many tokens, in words; empty if there is none."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    address = f"{url}/v1/chat/completions"
    try:
        with httpx.stream("POST", address, json=body, timeout=_CLIENT_SECONDS, trust_env=False) as response:
            if response.status_code != 200:
                return f"{response.status_code}: {response.read()!r}"
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as error:
        return repr(error)
    if not lines or lines.pop() != "[DONE]":
        return f"cut: {lines[-1:]}"
    reason = None
    for line in lines:
        event = json.loads(line)
        if "error" in event:
            return line
        with suppress(LookupError):
            reason = event["choices"][0]["finish_reason"] or reason
    return "" if reason == "length" else f"ended by {reason}"


class SteadyLoad:
    """Clients in threads, until told to stop.

    Args:
        writers: ask for long answers about a few pages: work for decode.
        readers: ask for a word about a page that is new each time: work for prefill.

    Attributes:
        answers: by what was wrong with them; empty: nothing.
    """

    _new = count(10_000)  # pages; of all loads, so that none is known

    def __init__(self, url: str, model: str, writers: int, readers: int = 0) -> None:
        self._url, self._model, self._ended = url, model, threading.Event()
        self.answers: Counter[str] = Counter()
        asked = [(self._to_write(number), WRITTEN) for number in range(writers)]
        asked += [(self._to_read(), READ) for _ in range(readers)]
        self._threads = [threading.Thread(target=self._ask, args=one, daemon=True) for one in asked]
        for thread in self._threads:
            thread.start()

    def _to_write(self, number: int) -> Iterator[list[dict[str, Any]]]:
        return (user(f"Question {number}.{asked}: ", page(asked % _PAGES), "?") for asked in count())

    def _to_read(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield user("Look: ", page(next(self._new), _LARGE), "What is it?")

    def _ask(self, questions: Iterator[list[dict[str, Any]]], tokens: int) -> None:
        while not self._ended.is_set():
            self.answers[failure(self._url, self._model, next(questions), tokens)] += 1

    @property
    def answered(self) -> int:
        """Answers so far."""
        return sum(self.answers.copy().values())

    @property
    def failed(self) -> int:
        """Answers so far that were refused, cut, or ended by an error."""
        return self.answered - self.answers[""]

    def stop(self) -> Counter[str]:
        """Wait for the answers under way; returns all of them."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.answers

    def __enter__(self) -> SteadyLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
