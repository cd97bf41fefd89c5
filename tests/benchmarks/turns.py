"""Tokens computed and time to first token of a chat's turns.

All of the chat is sent back each time: eight turns, images in the first and the fourth, answers of 128 tokens. These
are vLLM's for both arms, so that they compute the same prompts; it has their KV from generating them, ours has not.
They are letters, which the bundled tokenizers take for the same tokens when they are sent back, as real ones take
words.

| arm   | what answers                                                                        |
|-------|-------------------------------------------------------------------------------------|
| vllm  | vLLM's OpenAI server with prefix caching                                             |
| exact | ours, mode `exact`; the second image moves the positions of all before it (M-RoPE)   |
"""

from __future__ import annotations

import string
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import image_url, timed_chat
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {"vllm": "vLLM's OpenAI server with prefix caching", "exact": "OrbitServe, mode exact"}
_TURNS, _WITH_IMAGE = 8, (1, 4)
_ASKED, _ANSWERED = 40, 128  # tokens; of a question letters, with the bundled tokenizers


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms, turn by turn."""
    size, chats = (256, 1) if quick else (1024, 5)
    checkpoint = checkpoint_path(CHECKPOINT)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    computed: dict[str, dict[str, list[int]]] = {name: {} for name in _DESCRIPTIONS}
    with vllm_alone(checkpoint) as alone, ours(checkpoint, console, quick) as service, httpx.Client(timeout=300) as web:
        alone.settle()
        long = {"max_tokens": _ANSWERED, "ignore_eos": True, "allowed_token_ids": _letters(web, alone)}
        arms = {"vllm": (alone, long), "exact": (service, {"orbit": {"mode": "exact"}})}
        for chat in range(chats + 1):
            words, messages = np.random.default_rng(chat), list[dict[str, Any]]()
            for turn in range(1, _TURNS + 1):
                image = [_image(size, 100 * chat + turn)] if turn in _WITH_IMAGE else []
                messages.append({"role": "user", "content": [*image, {"type": "text", "text": _question(words)}]})
                answers = dict[str, str]()
                for name in [*arms] if (chat + turn) % 2 else reversed([*arms]):
                    service.settle()
                    server, fields = arms[name]
                    timed = timed_chat(web, server.url, server.model, messages, **fields)
                    answers[name] = timed.text
                    if chat:  # the first one warms up
                        samples[name].setdefault(str(turn), []).append(timed.ttft_ms)
                        computed[name].setdefault(str(turn), []).append(timed.computed_tokens)
                messages.append({"role": "assistant", "content": answers["vllm"]})
            console.print(f"  chat {chat} of {chats} done")
    vllm, exact = (Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items())
    later = [str(turn) for turn in range(2, _TURNS + 1)]
    tokens = {name: {turn: sum(counts) / chats for turn, counts in rows.items()} for name, rows in computed.items()}
    figures = {
        "tokens_over_vllm": sum(tokens["exact"][turn] for turn in later) / sum(tokens["vllm"][turn] for turn in later),
        "ttft_over_vllm": float(np.median([exact.median_ms(turn) / vllm.median_ms(turn) for turn in later])),
    }
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "image_tokens": size,
        "turns": _TURNS,
        "with_image": list(_WITH_IMAGE),
        "question_tokens": _ASKED,
        "answer_tokens": _ANSWERED,
        "chats": chats,
        "in_flight": 1,
    }
    return Outcome(workload, [vllm, exact], figures, {"tokens computed": tokens}, axis="turn")


def _letters(web: httpx.Client, server: Server) -> list[int]:
    """Token ids of the letters."""
    body = {"model": server.model, "prompt": string.ascii_lowercase, "add_special_tokens": False}
    tokens: list[int] = web.post(f"{server.url}/tokenize", json=body).raise_for_status().json()["tokens"]
    return tokens


def _image(size: int, number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(size, number)}}


def _question(letters: np.random.Generator) -> str:
    return "".join(letters.choice([*string.ascii_lowercase], _ASKED))


BENCHMARK = Benchmark(
    "turns",
    "Tokens computed and time to first token of a chat's later turns: vLLM's prefix caching, and ours in mode exact.",
    run,
    {"tokens_over_vllm": ("<=", 1.05), "ttft_over_vllm": ("<=", 1.25)},
)
