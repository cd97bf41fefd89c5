"""How often pages must come back until canonical KV and patches have paid for their making.

Processor seconds of the whole worker, all of its threads: encoding, forwards, each answer's first token, what is formed
and written in the background, loads.

| arm     | what is counted                                                                     |
|---------|-------------------------------------------------------------------------------------|
| `off`   | a request of which nothing is stored or looked up                                   |
| `exact` | a request whose images' embeddings are stored: every token is computed               |
| `first` | the first request over new pages in mode `auto`, and all that is formed behind it    |
| `again` | the same pages asked about again: linked from memory                                 |

`reuses` = (first - off) / (off - again), the largest of all cases; `reuses_exact` the same against `exact`.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.engine_process import in_prefill_process
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.requests import noise
from serving.bench.ttft import CHECKPOINT
from serving.bench.worker import Prompt, Worker, prompt_over, worker

if TYPE_CHECKING:
    from prefill_workers.engine import PrefillEngine

CASES = {"1 x 256": (1, 256), "1 x 1024": (1, 1024), "3 x 256": (3, 256)}  # pages x tokens
_DELIMITERS = 2  # tokens around a page
_DESCRIPTIONS = {
    "off": "processor ms of a request of which nothing is stored or looked up",
    "exact": "processor ms of a request whose embeddings are stored",
    "first": "processor ms of the first request over new pages, and of all that is formed behind it",
    "again": "processor ms of a request that links the same pages",
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure all arms on pages of every size."""
    cases = dict(list(CASES.items())[:1]) if quick else CASES
    turns = 2 if quick else 5
    console.print("measuring in a process like a prefill worker's")
    samples = in_prefill_process(_measure, cases, turns)
    arms = [Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()]
    reuses = {without: {case: _reuses(samples, without, case) for case in cases} for without in ("off", "exact")}
    workload = {"model": CHECKPOINT, "dtype": "bfloat16", "pages x tokens": list(cases), "turns": turns}
    figures = {"reuses": max(reuses["off"].values()), "reuses_exact": max(reuses["exact"].values())}
    return Outcome(workload, arms, figures, {"reuses until it has paid": reuses})


def _measure(cases: Mapping[str, tuple[int, int]], turns: int) -> dict[str, dict[str, list[float]]]:
    """Arm → case → processor milliseconds, by an engine in this process."""
    from prefill_workers.engine import EngineSpec, PrefillEngine

    engine = PrefillEngine(EngineSpec(model=str(checkpoint_path(CHECKPOINT)), max_model_len=4096, hand_off=False))
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    try:
        for case, (pages, tokens) in cases.items():
            prompt = prompt_over(engine, [noise(tokens, number) for number in range(pages)])
            if {len(chunk) for chunk in prompt.request.chunks} != {tokens + _DELIMITERS}:
                raise RuntimeError(f"{case}: the pages have {[len(chunk) for chunk in prompt.request.chunks]} tokens")
            for name, times in _samples(engine, prompt, turns).items():
                samples[name][case] = times
            print(f"  {case} done", flush=True)
    finally:
        engine.shutdown()
    return samples


def _samples(engine: PrefillEngine, prompt: Prompt, turns: int) -> dict[str, list[float]]:
    from kvstore.library import Library
    from kvstore.patch_form import PatchForm
    from kvstore.settings import LibrarySettings
    from prefill_workers.patch_compiler import PatchCompiler
    from prefill_workers.settings import CompileLimits

    def measured(taught: bool, mode: str) -> float:
        """A request in this mode to a worker whose library is empty, or has learnt from one request before."""
        form = PatchForm()
        with (
            tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as directory,
            Library(LibrarySettings(directory=Path(directory)), engine.fingerprint) as library,
            worker(
                engine, library, form, PatchCompiler(library, form).compile, compiles=CompileLimits(share=0)
            ) as opened,
        ):
            if taught:
                _link(opened, prompt, "auto", "encoded")
            expected = {"off": "encoded", "exact": "recomputed", "auto": "patched" if taught else "encoded"}[mode]
            return processor_ms(lambda: _link(opened, prompt, mode, expected))

    arms = {
        "off": lambda: measured(taught=False, mode="off"),
        "exact": lambda: measured(taught=True, mode="exact"),
        "first": lambda: measured(taught=False, mode="auto"),
        "again": lambda: measured(taught=True, mode="auto"),
    }
    in_turns(arms, 1)  # warm
    return in_turns(arms, turns)


def _link(opened: Worker, prompt: Prompt, mode: str, expected: str) -> None:
    """Link, and wait for what is formed.

    Raises:
        RuntimeError: the pages were linked in another way than expected.
    """
    points = {str(chunk.operating_point) for chunk in opened.link(prompt.in_mode(mode)).chunks}
    if points != {expected}:
        raise RuntimeError(f"mode {mode}: pages were {points}, not {expected}")
    opened.settle()


def processor_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processors that all threads of this process spend while `work` runs."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def _reuses(samples: dict[str, dict[str, list[float]]], without: str, case: str) -> float:
    """After how many requests beyond the first one reuse has cost no more than `without` it; infinite: never."""
    cost, first, again = (Arm(name, "", samples[name]).median_ms(case) for name in (without, "first", "again"))
    unstored = Arm("off", "", samples["off"]).median_ms(case)
    return (first - unstored) / (cost - again) if cost > again else float("inf")


BENCHMARK = Benchmark(
    "break-even",
    "How often pages must come back until their canonical KV and patches have paid: processor seconds of a worker.",
    run,
    {"reuses": ("<=", 2)},
)
