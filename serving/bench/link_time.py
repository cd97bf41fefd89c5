"""Time a link saves a prefill worker: from prepared pixels to the first token.

No service is around the worker, and one prompt at a time is in it.

| arm       | what is timed                                                                        |
|-----------|---------------------------------------------------------------------------------------|
| `off`     | nothing is looked up: every image is encoded, every token computed                    |
| `exact`   | the images' embeddings come from the library's memory, every token is computed        |
| `patched` | the pages are linked: canonical KV and patches come from the library's memory         |
| `limit`   | a forward over the tokens that linking computes, behind finished KV; all else is free |

A table says what a linked prompt's milliseconds go into. On a machine with a GPU the model has the shape of
Qwen2.5-VL-7B, on others that of `ttft`.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.engine_process import in_prefill_process
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns
from serving.bench.models import GPU_POOL_GIB, load_format, measured_dtype, measured_model, on_gpu
from serving.bench.worker import Prompt, Worker, prompt_over, worker
from serving.loadtest.images import noise

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

CASES = {"1 x 256": (1, 256), "1 x 1024": (1, 1024), "4 x 1024": (4, 1024)}  # pages x tokens
GPU_QUICK = {"2 x 1024": (2, 1024), "8 x 1024": (8, 1024)}
_DEVICE_BYTES = 1 << 30  # of KV that a GPU keeps of chunks, as by default in a service
CONTEXT = 16384
_POINTS = {"off": "encoded", "exact": "recomputed", "patched": "patched"}
_DESCRIPTIONS = {
    "off": "every image encoded, every token computed",
    "exact": "embeddings from the library, every token computed",
    "patched": "canonical KV and patches from the library",
    "limit": "a forward over the tokens that linking computes, behind finished KV",
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure all arms on pages of every number and size."""
    model = measured_model()
    if on_gpu():
        cases = GPU_QUICK if quick else CASES | GPU_QUICK
    else:
        cases = {"1 x 256": CASES["1 x 256"]} if quick else CASES
    turns = 2 if quick else 9
    console.print("measuring in a process like a prefill worker's")
    samples, stages = in_prefill_process(_measure, model, cases, turns)
    arms = [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()]
    measured = {"model": model, "dtype": measured_dtype()}
    workload = {**measured, "pages x tokens": list(cases), "turns": turns, "in_flight": 1}
    return Outcome(workload, arms, _figures(list(cases), {arm.name: arm for arm in arms}), {"stages, ms": stages})


def _measure(
    model: str, cases: Mapping[str, tuple[int, int]], turns: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Arm → case → milliseconds, and case → stage → median milliseconds of `patched`.

    By an engine in this process.
    """
    from kvstore.library import Library
    from kvstore.records.patch_form import PatchForm
    from kvstore.settings import LibrarySettings
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.self_check import require_self_check
    from prefill_workers.engine.spec import EngineSpec
    from prefill_workers.patches.patch_compiler import PatchCompiler
    from prefill_workers.scheduler.cost_model import measure_forward_cost
    from prefill_workers.settings import CompileLimits

    checkpoint = checkpoint_path(model)
    engine = PrefillEngine(
        EngineSpec(
            model=str(checkpoint), dtype=measured_dtype(), load_format=load_format(checkpoint), max_model_len=CONTEXT,
            hand_off=False, kv_cache_gib=GPU_POOL_GIB, device_bytes=_DEVICE_BYTES if on_gpu() else 0,
        )
    )  # fmt: skip
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    stages: dict[str, dict[str, float]] = {}
    form = PatchForm()
    try:
        require_self_check(engine)
        cost_model = measure_forward_cost(engine)
        for case, (pages, tokens) in cases.items():
            prompt = prompt_over(engine, [noise(tokens, number) for number in range(pages)])
            with Library(LibrarySettings(directory=None, memory_bytes=16 << 30), engine.fingerprint) as library:
                compiler = PatchCompiler(library, form)
                options: dict[str, Any] = {"compiles": CompileLimits(share=0), "cost_model": cost_model}
                with worker(engine, library, form, compiler.compile, **options) as opened:
                    arms = _Arms(opened, prompt)
                    in_turns(arms.timed, 1)  # warm
                    arms.stages.clear()
                    for name, times in in_turns(arms.timed, turns).items():
                        samples[name][case] = times
                    stages[case] = {name: statistics.median(times) for name, times in arms.stages.items()}
            print(f"  {case} done", flush=True)
    finally:
        engine.shutdown()
    return samples, stages


class _Arms:
    """The arms over one prompt, whose pages the worker has learnt.

    Attributes:
        timed: arm → what runs it and says its milliseconds.
        stages: of `patched`, milliseconds of every link so far, by what they went into.
    """

    def __init__(self, opened: Worker, prompt: Prompt) -> None:
        self._worker = opened
        self.stages: dict[str, list[float]] = {}
        opened.link(prompt.in_mode("auto"))
        opened.settle()
        self.timed: dict[str, Callable[[], float]] = {
            "off": lambda: self._link(prompt, "off"),
            "exact": lambda: self._link(prompt, "exact"),
            "patched": lambda: self._link(prompt, "patched"),
            "limit": lambda: _limit_ms(opened.engine, prompt),
        }

    def _link(self, prompt: Prompt, arm: str) -> float:
        asked, results = prompt.in_mode("auto" if arm == "patched" else arm), []
        taken = clock_ms(lambda: results.append(self._worker.link(asked)))
        points = {str(chunk.operating_point) for chunk in results[0].chunks}
        if points != {_POINTS[arm]}:
            raise RuntimeError(f"{arm}: pages were {points}, not {_POINTS[arm]}")
        if arm == "patched":
            for name, milliseconds in results[0].stages_ms.items():
                self.stages.setdefault(name, []).append(milliseconds)
        self._worker.settle()
        return taken


def _limit_ms(engine: PrefillEngine, prompt: Prompt) -> float:
    """Milliseconds until the next token, from text runs around pages with finished KV."""
    import torch

    from prefill_workers.sequence import LinkSequence, Run, complement

    ids = torch.tensor(prompt.request.token_ids, dtype=torch.int32)
    index = torch.arange(len(ids))
    blocks = range(1, 2 + len(ids) // engine.block_size)
    sequence = LinkSequence(ids, index.expand(3, -1) if engine.uses_mrope else index, blocks)
    runs = complement([Run(chunk.start, chunk.stop) for chunk in prompt.request.chunks], len(ids))

    def work() -> None:
        logits = engine.forward([(sequence, runs)], ends=[0])
        assert logits is not None
        logits.argmax(-1)

    return clock_ms(work)


def _figures(cases: list[str], arms: Mapping[str, Arm]) -> dict[str, float]:
    figures = {}
    for case in cases:
        off, exact, patched, limit = (arms[name].median_ms(case) for name in ("off", "exact", "patched", "limit"))
        figures[f"exact_over_patched {case}"] = exact / patched
        figures[f"off_over_patched {case}"] = off / patched
        figures[f"limit_over_patched {case}"] = limit / patched
    return figures


BENCHMARK = Benchmark(
    "link-time",
    "Time from a prepared prompt to its first token in one prefill worker: computed, linked, and the limit.",
    run,
    {},
)
