"""Time to first token of a new question about an image that was asked about before.

The prompt begins with the image.

| arm   | what answers                                              |
|-------|-----------------------------------------------------------|
| vllm  | vLLM's OpenAI server with prefix caching                   |
| exact | ours, mode `exact`: the prompt begins with known blocks    |
| off   | ours, mode `off`: every token is computed                  |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import httpx
from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.loadtest.images import Timed, image_url, timed_chat
from tests.benchmarks.servers import Server, ours, vllm_alone

_DESCRIPTIONS = {
    "vllm": "vLLM's OpenAI server with prefix caching",
    "exact": "OrbitServe, mode exact",
    "off": "OrbitServe, mode off",
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure all arms, every size of image."""
    sizes, turns = ([256], 3) if quick else ([256, 1024, 2048], 15)
    checkpoint, numbers = checkpoint_path(CHECKPOINT), itertools.count()
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    computed: dict[str, dict[str, float]] = {}
    with vllm_alone(checkpoint) as alone, ours(checkpoint, console, quick) as service, httpx.Client(timeout=300) as web:
        alone.settle()
        servers = {"vllm": (alone, None), "exact": (service, "exact"), "off": (service, "off")}
        for size in sizes:
            image, tokens = image_url(size), dict[str, list[int]]()

            def ask(arm: str, image: str = image, tokens: dict[str, list[int]] = tokens) -> float:
                server, mode = servers[arm]
                timed = _ask(web, server, mode, image, f"question {next(numbers):06d}, what is it?")
                if server is service:
                    service.settle()  # or the other arm would be asked beside what it learns
                tokens.setdefault(arm, []).append(timed.computed_tokens)
                return timed.ttft_ms

            arms: dict[str, Callable[[], float]] = {name: lambda name=name: ask(name) for name in servers}
            in_turns(arms, 2)  # the first question, and one more to warm up
            tokens.clear()
            for name, times in in_turns(arms, turns).items():
                samples[name][str(size)] = times
            computed[str(size)] = {name: sum(counts) / len(counts) for name, counts in tokens.items()}
            console.print(f"  {size} image tokens done")
    arms = {name: Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()}
    last = str(sizes[-1])
    figures = {
        "ttft_over_vllm": arms["exact"].median_ms(last) / arms["vllm"].median_ms(last),
        "tokens_over_vllm": computed[last]["exact"] / computed[last]["vllm"],
        "off_over_exact": arms["off"].median_ms(last) / arms["exact"].median_ms(last),
    }
    workload = {"model": CHECKPOINT, "dtype": measured_dtype(), "image_tokens": sizes, "turns": turns, "in_flight": 1}
    return Outcome(workload, [*arms.values()], figures, {"tokens computed": computed}, axis="tokens of the image")


def _ask(web: httpx.Client, server: Server, mode: str | None, image: str, question: str) -> Timed:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
    fields = {} if mode is None else {"orbit": {"mode": mode}}
    return timed_chat(web, server.url, server.model, [{"role": "user", "content": parts}], **fields)


BENCHMARK = Benchmark(
    "image-first",
    "Time to first token of a new question about an image at the prompt's beginning: vLLM's prefix caching, and ours.",
    run,
    {"ttft_over_vllm": ("<=", 1.25)},
)
