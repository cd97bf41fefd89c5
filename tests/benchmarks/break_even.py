"""Break-even: how often pages must recur until canonical KV and patches have paid off.

Processor seconds of the whole worker, all of its threads: encoding, forwards, each answer's first token, what is formed
and written in the background, loads.

| arm     | what is counted                                                                     |
|---------|-------------------------------------------------------------------------------------|
| `off`   | a request of which nothing is stored or looked up                                   |
| `exact` | a request whose images' embeddings are stored: every token is computed               |
| `first` | the first request over new pages in mode `auto`, and all that is formed behind it    |
| `again` | the same pages asked about again: linked from memory                                 |

Nothing is compiled ahead beside it: that is a bet on requests which this benchmark does not send. A table says what
the first request's seconds went into: the answer, canonical KV (and reading what was computed in context), patches.

`reuses` = (first - off) / (off - again), the largest of all cases; `reuses_exact` the same against `exact`.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.engine_process import in_prefill_process
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.bench.worker import Prompt, Worker, prompt_over, worker
from serving.loadtest.images import noise

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

CASES = {"1 x 256": (1, 256), "1 x 1024": (1, 1024), "3 x 256": (3, 256)}  # pages x tokens
PARTS = ("request", "canonical KV", "patches")  # of `first`
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
    parts = {case: {name: statistics.median(samples[name][case]) for name in PARTS} for case in cases}
    reuses = {without: {case: _reuses(samples, without, case) for case in cases} for without in ("off", "exact")}
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "pages x tokens": list(cases),
        "turns": turns,
        "compile_share": 0,
    }
    figures = {"reuses": max(reuses["off"].values()), "reuses_exact": max(reuses["exact"].values())}
    tables = {"reuses until it has paid": reuses, "processor ms of the first request, by what for": parts}
    return Outcome(workload, arms, figures, tables)


def _measure(cases: Mapping[str, tuple[int, int]], turns: int) -> dict[str, dict[str, list[float]]]:
    """Arm or part of `first` → case → processor milliseconds, by an engine in this process."""
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    engine = PrefillEngine(
        EngineSpec(model=str(checkpoint_path(CHECKPOINT)), dtype=measured_dtype(), max_model_len=4096, hand_off=False)
    )
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in (*_DESCRIPTIONS, *PARTS)}
    try:
        arms = _Arms(engine)
        for case, (pages, tokens) in cases.items():
            prompt = prompt_over(engine, [noise(tokens, number) for number in range(pages)])
            if {len(chunk) for chunk in prompt.request.chunks} != {tokens + _DELIMITERS}:
                raise RuntimeError(f"{case}: the pages have {[len(chunk) for chunk in prompt.request.chunks]} tokens")
            in_turns(arms.over(prompt), 1)  # warm
            arms.parts.clear()
            for name, times in (in_turns(arms.over(prompt), turns) | arms.parts).items():
                samples[name][case] = times
            print(f"  {case} done", flush=True)
    finally:
        engine.shutdown()
    return samples


class _Arms:
    """The arms' requests, each to a worker of its own.

    Attributes:
        parts: what every `first` request since has gone into: part → processor milliseconds.
    """

    def __init__(self, engine: PrefillEngine) -> None:
        from prefill_workers.scheduler.cost_model import measure_forward_cost

        self._engine = engine
        self._cost_model = measure_forward_cost(engine)  # as a service does before it takes requests
        self.parts: dict[str, list[float]] = {}

    def over(self, prompt: Prompt) -> dict[str, Callable[[], float]]:
        """Each arm's request over these pages: what it costs in processor milliseconds."""
        return {
            "off": lambda: self._request(prompt, "off", "encoded"),
            "exact": lambda: self._request(prompt, "exact", "recomputed", taught=True),
            "first": lambda: self._request(prompt, "auto", "encoded"),
            "again": lambda: self._request(prompt, "auto", "patched", taught=True),
        }

    def _request(self, prompt: Prompt, mode: str, expected: str, taught: bool = False) -> float:
        """A request in this mode to a worker with an empty library, or one that has seen it once."""
        from kvstore.library import Library
        from kvstore.records.patch_form import PatchForm
        from kvstore.settings import LibrarySettings
        from prefill_workers.patches.patch_compiler import PatchCompiler, PatchJob
        from prefill_workers.scheduler.cost_model import ForwardCostModel
        from prefill_workers.settings import CompileLimits

        form, factoring = PatchForm(), 0.0
        with (
            tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as directory,
            Library(LibrarySettings(directory=Path(directory)), self._engine.fingerprint) as library,
        ):
            compiler = PatchCompiler(library, form)

            def compile_patch(job: PatchJob) -> None:
                nonlocal factoring
                factoring += processor_ms(lambda: compiler.compile(job))

            cost = self._cost_model.cost
            options: dict[str, Any] = {
                "compiles": CompileLimits(share=0),
                "cost_model": ForwardCostModel(cost.fixed_tokens, cost.seconds_per_token),
            }
            with worker(self._engine, library, form, compile_patch, **options) as opened:
                if taught:
                    _link(opened, prompt, "auto", "encoded")
                    opened.settle()
                request = processor_ms(lambda: _link(opened, prompt, mode, expected))
                behind = processor_ms(opened.settle)
        if mode == "auto" and not taught:
            spent = dict(zip(PARTS, (request, behind - factoring, factoring), strict=True))
            for name, milliseconds in spent.items():
                self.parts.setdefault(name, []).append(milliseconds)
        return request + behind


def _link(opened: Worker, prompt: Prompt, mode: str, expected: str) -> None:
    """Link a prompt.

    Raises:
        RuntimeError: the pages were linked in another way than expected.
    """
    points = {str(chunk.operating_point) for chunk in opened.link(prompt.in_mode(mode)).chunks}
    if points != {expected}:
        raise RuntimeError(f"mode {mode}: pages were {points}, not {expected}")


def processor_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processors that all threads of this process spend while `work` runs."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def _reuses(samples: dict[str, dict[str, list[float]]], without: str, case: str) -> float:
    """Requests beyond the first until reuse has cost no more than `without` it; inf: never."""
    cost, first, again = (Arm(name, "", samples[name]).median_ms(case) for name in (without, "first", "again"))
    unstored = Arm("off", "", samples["off"]).median_ms(case)
    return (first - unstored) / (cost - again) if cost > again else float("inf")


BENCHMARK = Benchmark(
    "break-even",
    "How often pages must come back until their canonical KV and patches have paid: processor seconds of a worker.",
    run,
    {"reuses": ("<=", 2)},
)
