"""Time to first token of a request that reuses one image segment behind changed text.

| arm      | what answers                                                                              |
|----------|-------------------------------------------------------------------------------------------|
| vllm     | `vllm serve` with prefix caching: the text before the image differs, so it misses          |
| compiled | the same, compiled as it is by default; only where there is a C++ compiler                 |
| exact    | ours, mode `exact`: every token computed, pixels not encoded again                         |
| patched  | ours, mode `auto`: the segment is linked, 32 text tokens are computed                      |
| limit    | an engine that computes those 32 tokens and takes the likeliest next; all else is free     |

All but `compiled` run eagerly and with the same kernels.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from rich.console import Console

from infra.checkpoints import checkpoint_path
from infra.vllm_env import vllm_environment
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns
from serving.bench.models import GPU_POOL_GIB, load_format, measured_dtype, measured_model, on_gpu
from serving.loadtest.images import SHAPES, TEXT_TOKENS, around, image_url, timed_chat
from tests.benchmarks.servers import GPU_PART, Server, ours, vllm_alone

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

_DESCRIPTIONS = {
    "vllm": "vLLM's OpenAI server with prefix caching; the text before the image changes every time",
    "compiled": "the same server, its model compiled",
    "exact": "OrbitServe, mode exact",
    "patched": "OrbitServe, mode auto, patch stored",
    "limit": "forward over the 32 text tokens behind finished KV and the likeliest next, called in-process",
}


class Limit:
    """Lower bound of any server: engine time of the tokens that must be computed in any case."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine

    def time_ms(self, image_tokens: int) -> float:
        """Milliseconds until the next token, from text runs around `image_tokens + 2` finished ones."""
        from prefill_workers.sequence import LinkSequence, Run

        start, length = TEXT_TOKENS // 2, TEXT_TOKENS + image_tokens + 2
        ids = torch.full((length,), 65, dtype=torch.int32)
        positions = torch.arange(length).expand(3, -1)
        sequence = LinkSequence(ids, positions, range(1, 2 + length // self._engine.block_size))
        runs = [Run(0, start), Run(start + image_tokens + 2, length)]

        def work() -> None:
            logits = self._engine.forward([(sequence, runs)], ends=[0])
            assert logits is not None
            logits.argmax(-1)

        return clock_ms(work)


@contextmanager
def limit_of(service: Server, checkpoint: Path) -> Iterator[Limit]:
    """The limit on an engine in this process: an embedded service's idle one, or a new one."""
    if service.engine is not None:
        yield Limit(service.engine)
        return
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    spec = EngineSpec(
        model=str(checkpoint), dtype=measured_dtype(), load_format=load_format(checkpoint), max_model_len=4096,
        hand_off=False, gpu_memory_utilization=GPU_PART, kv_cache_gib=GPU_POOL_GIB,
    )  # fmt: skip
    engine = PrefillEngine(spec)
    try:
        yield Limit(engine)
    finally:
        engine.shutdown()


def run(quick: bool, console: Console) -> Outcome:
    """Measure all arms, every size."""
    quick_sizes = [2048] if on_gpu() else [256, 512]
    sizes = quick_sizes if quick else list(SHAPES)
    turns = 2 if quick else 9
    model = measured_model()
    checkpoint = checkpoint_path(model)
    console.print("starting vLLM's server, ours, and an engine for the limit")
    with ExitStack() as stack:
        alone = {"vllm": stack.enter_context(vllm_alone(checkpoint))}
        service = stack.enter_context(ours(checkpoint, console, quick))
        limit = stack.enter_context(limit_of(service, checkpoint))
        if not quick and shutil.which("g++"):
            alone["compiled"] = stack.enter_context(vllm_alone(checkpoint, compiled=True))
        for server in alone.values():
            server.settle()
        samples = _measure(sizes, turns, alone, service, limit, console)
    arms = [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items() if name in samples]
    workload = {
        "model": model,
        "dtype": measured_dtype(),
        "image_tokens": sizes,
        "text_tokens": TEXT_TOKENS,
        "turns": turns,
        "in_flight": 1,
    }
    return Outcome(workload, arms, _figures(sizes, {arm.name: arm for arm in arms}), axis="tokens of the image")


def _measure(
    sizes: list[int], turns: int, alone: Mapping[str, Server], service: Server, limit: Limit, console: Console
) -> dict[str, dict[str, list[float]]]:
    numbers = itertools.count(1)
    samples: dict[str, dict[str, list[float]]] = {}
    with httpx.Client(timeout=300) as client:
        for size in sizes:
            for name, times in _measure_size(size, turns, alone, service, limit, client, numbers).items():
                samples.setdefault(name, {})[str(size)] = times
            console.print(f"  {size} image tokens done")
    return samples


def _measure_size(
    size: int,
    turns: int,
    alone: Mapping[str, Server],
    service: Server,
    limit: Limit,
    client: httpx.Client,
    numbers: Iterator[int],
) -> dict[str, list[float]]:
    image = image_url(size)

    def chat(server: Server, expected: str | None, **fields: Any) -> float:
        timed = timed_chat(client, server.url, server.model, around(image, next(numbers)), **fields)
        if timed.prompt_tokens != size + 2 + TEXT_TOKENS:
            raise RuntimeError(f"the prompt has {timed.prompt_tokens} tokens, not {size + 2 + TEXT_TOKENS}")
        points = [chunk["operating_point"] for chunk in timed.orbit.get("chunks", [])]
        if expected is not None and points != [expected]:
            raise RuntimeError(f"the image was {points}, not {expected}")
        return timed.ttft_ms

    chat(service, "encoded")  # first seen: encodes, and teaches the patch
    service.settle()
    arms: dict[str, Callable[[], float]] = {
        **{name: partial(chat, server, None) for name, server in alone.items()},
        "exact": lambda: chat(service, "recomputed", orbit={"mode": "exact"}),
        "patched": lambda: chat(service, "patched"),
        "limit": lambda: limit.time_ms(size),  # the turns before have ended: an embedded engine is idle
    }
    in_turns(arms, 1)  # warm
    return in_turns(arms, turns)


def _figures(sizes: list[int], arms: dict[str, Arm]) -> dict[str, float]:
    figures = {}
    for size in map(str, sizes):
        vllm, exact, patched, limit = (arms[name].median_ms(size) for name in ("vllm", "exact", "patched", "limit"))
        figures[f"patched_speedup_{size}"] = vllm / patched
        figures[f"exact_over_vllm_{size}"] = exact / vllm
        figures[f"limit_over_patched_{size}"] = limit / patched
        if "compiled" in arms:
            figures[f"compiled_over_patched_{size}"] = arms["compiled"].median_ms(size) / patched
    return figures


BENCHMARK = Benchmark(
    "ttft",
    "Time to first token with one reused image of 256 to 2048 tokens: vLLM alone, exact, patched, and the limit.",
    run,
    {
        "patched_speedup_1024": (">=", 8),
        "patched_speedup_2048": (">=", 16),
        "limit_over_patched_2048": (">=", 0.6),
        "exact_over_vllm_1024": ("<=", 1.25),
    },
)
