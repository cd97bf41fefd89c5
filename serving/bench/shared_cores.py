"""What engines that share processors take from each other while OpenMP's threads wait.

A prefill engine that links a prompt and a decode engine that takes a step, each in a process of its own with as many
threads as there are cores, alone and at the same time.

| arm        | between the parallel regions of a forward                                                |
|------------|-------------------------------------------------------------------------------------------|
| `waiting`  | threads wait without a processor, as our roles set them up (`replica_process.SPIN`)        |
| `spinning` | threads look for the next one for milliseconds, as OpenMP does by default                  |
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.ttft import CHECKPOINT
from serving.replica_process import SPIN, enter

QUICK_CHECKPOINT = "qwen2_5_vl-tiny"
CONTEXT = 820  # tokens of the prompt: three pages of 256 and words
COMPUTED = {"link": 35, "decode": 1}  # tokens of a forward
_SPINNING = "300000"  # libgomp's own, where it has no more threads than processors
_READY_SECONDS = 300.0


def run(quick: bool, console: Console) -> Outcome:
    """Measure both engines in both arms, in turns."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.3) if quick else (CHECKPOINT, 9, 3.0)
    spins = {"waiting": SPIN[1], "spinning": _SPINNING}
    cases = [f"{name} {how}" for name in COMPUTED for how in ("alone", "beside the other")]
    found: dict[str, dict[str, list[float]]] = {arm: {case: [] for case in cases} for arm in spins}
    with ExitStack() as stack:
        engines = {
            arm: {name: stack.enter_context(_engine(name, checkpoint, spin)) for name in COMPUTED}
            for arm, spin in spins.items()
        }
        for turn in range(turns):
            for arm in list(spins)[:: 1 if turn % 2 == 0 else -1]:
                for name, engine in engines[arm].items():
                    found[arm][f"{name} alone"].append(_together({name: engine}, seconds)[name])
                for name, ms in _together(engines[arm], seconds).items():
                    found[arm][f"{name} beside the other"].append(ms)
            console.print(f"  turn {turn + 1} of {turns}")
    arms = [
        Arm("waiting", "a forward, OpenMP's threads as our roles set them up", found["waiting"]),
        Arm("spinning", "a forward, OpenMP's threads as they are by default", found["spinning"]),
    ]
    ours, default = arms
    figures = {
        f"{case.replace(' ', '_')}_over_spinning": ours.median_ms(case) / default.median_ms(case) for case in cases
    }
    workload = {"model": checkpoint, "context": CONTEXT, "computed": COMPUTED, "turns": turns, "seconds": seconds}
    return Outcome({**workload, "spins": spins}, arms, figures)


def _together(engines: Mapping[str, Connection], seconds: float) -> dict[str, float]:
    """Milliseconds of a forward of each of the engines, all at the same time."""
    for pipe in engines.values():
        pipe.send(seconds)
    return {name: pipe.recv() for name, pipe in engines.items()}


@contextmanager
def _engine(name: str, checkpoint: str, spins: str) -> Iterator[Connection]:
    """An engine in a process of its own: it takes seconds, and gives milliseconds of a forward."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get(SPIN[0])
    os.environ[SPIN[0]] = spins  # OpenMP reads it when it is loaded
    try:
        process = context.Process(target=_serve, args=(theirs, name, checkpoint), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here
    finally:
        os.environ.pop(SPIN[0])
        if before is not None:
            os.environ[SPIN[0]] = before
    try:
        if not ours.poll(_READY_SECONDS):
            raise TimeoutError(f"the {name} engine did not start")
        ours.recv()
        yield ours
    finally:
        process.kill()


def _serve(pipe: Connection, name: str, checkpoint: str) -> None:
    from serving.config import DecodeRoleSettings, PrefillRoleSettings

    enter(PrefillRoleSettings() if name == "link" else DecodeRoleSettings())
    from infra.vllm_env import vllm_environment

    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    work = _forward(checkpoint, COMPUTED[name])
    pipe.send("ready")
    while True:
        seconds, count, began = pipe.recv(), 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            work()
            count += 1
        pipe.send(spent / count * 1e3)


def _forward(checkpoint: str, computed: int) -> Any:
    """A forward over the last tokens of a prompt whose others are computed already."""
    import torch

    from prefill_workers.engine import EngineSpec, PrefillEngine
    from prefill_workers.sequence import LinkSequence, Run

    engine = PrefillEngine(EngineSpec(str(checkpoint_path(checkpoint)), hand_off=False, max_model_len=2048))
    index = torch.arange(CONTEXT)
    positions = index.expand(3, -1) if engine.uses_mrope else index
    blocks = range(1, 2 + CONTEXT // engine.block_size)
    sequence = LinkSequence(torch.zeros(CONTEXT, dtype=torch.int32), positions, blocks)

    def forward(tokens: int) -> None:
        with torch.inference_mode():
            engine.forward([(sequence, [Run(CONTEXT - tokens, CONTEXT)])])

    forward(CONTEXT)
    return lambda: forward(computed)


BENCHMARK = Benchmark(
    "shared-cores",
    "A link's and a decode step's forward on the same cores: OpenMP's threads wait, or spin as they do by default.",
    run,
    {},
)
