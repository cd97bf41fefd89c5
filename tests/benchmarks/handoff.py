"""The hand-off of linked KV to a decode worker over NIXL: milliseconds against bytes.

A response's `decode` stage is the hand-off, the decode engine's first step and the way of its output back. The first
token is with the client before: what the hand-off delays is the second. Without the step, over prompts of several
lengths, a straight line through its medians gives milliseconds per MiB and what a hand-off costs whatever its size.

By that line, what an answer's KV would take on the way back from the decode engine, beside computing its tokens behind
the prompt, which a prefill worker does in idle time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import string
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import torch
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import SHAPES, TEXT_TOKENS, Timed, around, image_url, timed_chat
from tests.benchmarks.servers import Server, ours

_ANSWER_TOKENS = 128


def run(quick: bool, console: Console) -> Outcome:
    """Measure linked requests of every size, in turns."""
    sizes = [256, 1024] if quick else list(SHAPES)
    turns = 4 if quick else 15
    checkpoint = checkpoint_path(CHECKPOINT)
    numbers = itertools.count(1)
    decode: dict[str, list[float]] = {str(size): [] for size in sizes}
    ttft: dict[str, list[float]] = {str(size): [] for size in sizes}
    with ours(checkpoint, console, quick) as service, httpx.Client(timeout=300) as client:
        images = {size: image_url(size) for size in sizes}

        def ask(size: int, max_tokens: int = 2) -> Timed:
            messages = around(images[size], next(numbers))
            return timed_chat(client, service.url, service.model, messages, max_tokens=max_tokens, ignore_eos=True)

        for size in sizes:
            ask(size)
        service.settle()
        for size in sizes:
            ask(size)
        step = _decode_step_ms(lambda tokens: ask(sizes[-1], tokens), 2 if quick else 5)
        computing = _computing_ms(client, service, 2 if quick else 7)
        for turn in range(turns):
            for size in sizes if turn % 2 == 0 else reversed(sizes):
                timed = ask(size)
                decode[str(size)].append(max(0.0, timed.orbit["stages_ms"]["decode"] - step))
                ttft[str(size)].append(timed.ttft_ms)
    per_token = _kv_bytes_per_token(checkpoint)
    mib = {str(size): (size + 2 + TEXT_TOKENS) * per_token / 2**20 for size in sizes}
    arms = [
        Arm("handoff", "stage `decode` without its step, by image tokens", decode),
        Arm("ttft", "time to first token of the same requests", ttft),
    ]
    medians = [arms[0].median_ms(str(size)) for size in sizes]
    slope, intercept = statistics.linear_regression([mib[str(size)] for size in sizes], medians)
    last = str(sizes[-1])
    pulling = intercept + slope * _ANSWER_TOKENS * per_token / 2**20
    figures = {
        "ms_per_mib": slope,
        "fixed_ms": intercept,
        "answer_pulled_ms": pulling,
        "answer_computed_ms": computing,
        "over_ttft": arms[0].median_ms(last) / arms[1].median_ms(last),
        "decode_step_ms": step,
    }
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "image_tokens": sizes,
        "answer_tokens": _ANSWER_TOKENS,
        "mib": mib,
        "turns": turns,
        "embedded": quick,
    }
    return Outcome(workload, arms, figures, axis="tokens of the image")


def _decode_step_ms(ask: Callable[[int], object], turns: int) -> float:
    """Milliseconds a further token takes: answers of 34 tokens against answers of 2."""
    few: list[float] = []
    many: list[float] = []
    for _ in range(turns):
        for tokens, times in ((2, few), (34, many)):
            began = time.perf_counter()
            ask(tokens)
            times.append((time.perf_counter() - began) * 1e3)
    return (statistics.median(many) - statistics.median(few)) / 32


def _computing_ms(client: httpx.Client, service: Server, turns: int) -> float:
    """Milliseconds that the tokens of an answer add to a forward: of prompts that are so much longer than others."""
    letters = np.random.default_rng(0)
    times: dict[int, list[float]] = {_ANSWER_TOKENS: [], 2 * _ANSWER_TOKENS: []}
    for _ in range(turns):
        for tokens, taken in times.items():
            words = "".join(letters.choice([*string.ascii_lowercase], tokens))  # a token each, with this tokenizer
            messages = [{"role": "user", "content": words}]
            timed = timed_chat(client, service.url, service.model, messages, max_tokens=1, orbit={"mode": "off"})
            taken.append(timed.orbit["stages_ms"]["forward"])
    shorter, longer = map(statistics.median, times.values())
    return longer - shorter


def _kv_bytes_per_token(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    size = getattr(torch, measured_dtype()).itemsize
    return int(2 * size * text["num_hidden_layers"] * text["num_key_value_heads"] * head)  # keys and values


BENCHMARK = Benchmark(
    "handoff",
    "NIXL hand-off of linked KV: milliseconds per MiB, fixed cost, and what it is of the time to first token.",
    run,
    {},
)
