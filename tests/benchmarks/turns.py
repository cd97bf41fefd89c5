"""Tokens computed and time to first token of a chat's turns.

All of the chat is sent back each time: eight turns, images in the first and the fourth, answers of 128 tokens, each
arm's its own. They are letters, which the bundled tokenizers take for the same tokens when they are sent back, as real
ones take words. vLLM has their KV from generating them. Ours reads it back from the decode worker
(`prefill.pull_answers`) between two turns, as while a user reads; what idle time computes is told beside what requests
wait for.

| arm   | what answers                                                                        |
|-------|-------------------------------------------------------------------------------------|
| vllm  | vLLM's OpenAI server with prefix caching                                             |
| exact | ours, mode `exact`; the second image moves the positions of all before it (M-RoPE)   |
"""

from __future__ import annotations

import string
import time
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
_WARM_UP = 2  # turns of a chat before
_READS_S = 1.0  # that a user reads, before idle work is waited for
_IDLE = {"exact, idle": "orbitserve_idle_tokens_total", "of these answers": "orbitserve_answer_tokens_total"}


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms, turn by turn."""
    size, chats = (256, 1) if quick else (1024, 1)
    checkpoint = checkpoint_path(CHECKPOINT)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    computed: dict[str, dict[str, list[int]]] = {name: {} for name in [*_DESCRIPTIONS, *_IDLE]}
    idle_ms: dict[str, list[float]] = {}
    with vllm_alone(checkpoint) as alone, ours(checkpoint, console, quick) as service, httpx.Client(timeout=300) as web:
        alone.settle()
        long = {"max_tokens": _ANSWERED, "ignore_eos": True, "allowed_token_ids": _letters(web, alone)}
        arms = {"vllm": (alone, long), "exact": (service, {**long, "orbit": {"mode": "exact"}})}
        for chat in range(chats + 1):
            words, said = np.random.default_rng(chat), {name: list[dict[str, Any]]() for name in arms}
            for turn in range(1, (_TURNS if chat else _WARM_UP) + 1):
                image = [_image(size, 100 * chat + turn)] if turn in _WITH_IMAGE else []
                asked = {"role": "user", "content": [*image, {"type": "text", "text": _question(words)}]}
                before = _counted(web, service)
                for name in [*arms] if (chat + turn) % 2 else reversed([*arms]):
                    server, fields = arms[name]
                    said[name].append(asked)
                    timed = timed_chat(web, server.url, server.model, said[name], **fields)
                    said[name].append({"role": "assistant", "content": timed.text})
                    if name == "exact":  # or the other arm would be asked beside what idle time is for
                        time.sleep(_READS_S)
                        began = time.perf_counter()
                        service.settle()
                        idle = (time.perf_counter() - began) * 1e3
                    if chat:
                        samples[name].setdefault(str(turn), []).append(timed.ttft_ms)
                        computed[name].setdefault(str(turn), []).append(timed.computed_tokens)
                if chat:
                    idle_ms.setdefault(str(turn), []).append(idle)
                    for name, count in _counted(web, service).items():
                        computed[name].setdefault(str(turn), []).append(count - before[name])
                    last = {name: round(times[str(turn)][-1]) for name, times in samples.items()}
                    console.print(f"  chat {chat} of {chats}, turn {turn}: {last} ms, idle work {idle:.0f} ms")
    vllm, exact = (Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items())
    later = [str(turn) for turn in range(2, _TURNS + 1)]
    tokens = {name: {turn: sum(counts) / chats for turn, counts in rows.items()} for name, rows in computed.items()}
    of_later = {name: sum(counts[turn] for turn in later) for name, counts in tokens.items()}
    figures = {
        "tokens_over_vllm": of_later["exact"] / of_later["vllm"],
        "idle_tokens_over_vllm": of_later["exact, idle"] / of_later["vllm"],
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
    tables = {
        "tokens computed": tokens,
        "idle ms": {"exact": {turn: float(np.median(times)) for turn, times in idle_ms.items()}},
    }
    return Outcome(workload, [vllm, exact], figures, tables, axis="turn")


def _counted(web: httpx.Client, server: Server) -> dict[str, int]:
    """Tokens that forwards have computed in idle time so far."""
    lines = web.get(f"{server.url}/metrics").raise_for_status().text.splitlines()
    found = [(line.split("{")[0], float(line.rsplit(" ", 1)[1])) for line in lines if not line.startswith("#")]
    return {name: int(sum(value for series, value in found if series == wanted)) for name, wanted in _IDLE.items()}


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
