"""Time to first token of a text request behind a system prompt that came before.

| arm    | what answers                                                |
|--------|-------------------------------------------------------------|
| vllm   | vLLM's OpenAI server with prefix caching                     |
| cached | ours: blocks of the prefill worker's pool hold the prompt    |
| off    | ours, mode `off`: every token is computed                    |
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from infra.checkpoints import checkpoint_path
from prefill_workers.prefix_digests import GRAIN
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.models import CHECKPOINT
from serving.loadtest.images import Timed, timed_chat
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {
    "vllm": "vLLM's OpenAI server with prefix caching",
    "cached": "OrbitServe, mode auto",
    "off": "OrbitServe, mode off",
}
_UNKNOWN = 2 * GRAIN  # tokens of a prompt's beginning, at most: the template's last ones, and what is asked


def run(quick: bool, console: Console) -> Outcome:
    """Measure all arms, every length."""
    lengths, turns = ([256], 3) if quick else ([256, 1024, 3072], 15)
    checkpoint = checkpoint_path(CHECKPOINT)
    numbers = itertools.count()
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    with vllm_alone(checkpoint) as alone, ours(checkpoint, console, quick) as service, httpx.Client(timeout=300) as web:
        alone.settle()
        for length in lengths:
            for name, times in _measure(length, turns, alone, service, web, numbers).items():
                samples[name][str(length)] = times
            console.print(f"  {length} tokens done")
    arms = [Arm(name, _DESCRIPTIONS[name], samples[name]) for name in _DESCRIPTIONS]
    vllm, cached, off = arms
    figures = {f"cached_over_vllm_{n}": cached.median_ms(n) / vllm.median_ms(n) for n in map(str, lengths)}
    figures |= {f"off_over_cached_{n}": off.median_ms(n) / cached.median_ms(n) for n in map(str, lengths)}
    workload = {"model": CHECKPOINT, "system_tokens": lengths, "turns": turns, "in_flight": 1}
    return Outcome(workload, arms, figures, axis="tokens of the system prompt")


def _measure(
    length: int, turns: int, alone: Server, service: Server, web: httpx.Client, numbers: Iterator[int]
) -> dict[str, list[float]]:
    letters = np.random.default_rng(length).choice(list(string.ascii_lowercase), length)
    system = "".join(letters)  # the bundled tokenizers take one token each

    def ask(server: Server, **fields: Any) -> Timed:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"request {next(numbers):06d}"}]
        return timed_chat(web, server.url, server.model, messages, **fields)

    def cached() -> float:
        timed = ask(service)
        if timed.orbit["prefix_tokens_reused"] < length - _UNKNOWN:
            raise RuntimeError(f"of {timed.prompt_tokens} tokens {timed.orbit['prefix_tokens_reused']} were known")
        return timed.ttft_ms

    ask(service)
    arms = {
        "vllm": lambda: ask(alone).ttft_ms,
        "cached": cached,
        "off": lambda: ask(service, orbit={"mode": "off"}).ttft_ms,
    }
    in_turns(arms, 1)  # warm
    return in_turns(arms, turns)


BENCHMARK = Benchmark(
    "system-prompt",
    "Time to first token behind a system prompt of 256 to 3072 tokens seen before: vLLM's prefix caching, and ours.",
    run,
    {},
)
