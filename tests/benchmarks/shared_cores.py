"""Slow-down of engines that share processors while OpenMP's threads wait.

A prefill engine that links a prompt and a decode engine that takes a step, each in a process of its own, alone and at
the same time.

| arm        | between the parallel regions of a forward its threads                                       |
|------------|----------------------------------------------------------------------------------------------|
| `ours`     | look for the next one for half a millisecond, or sleep if others compute (`infra.cpu.openmp`)     |
| `waiting`  | sleep                                                                                        |
| `spinning` | look for the next one for 13 ms, as they do by default                                        |
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from rich.console import Console

from infra.cpu import openmp
from serving.bench.engine_process import engine_process, forward_ms
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.models import CHECKPOINT
from serving.replicas.process import SPIN
from tests.benchmarks.load_arms import QUICK_CHECKPOINT

CONTEXT = 820  # tokens of the prompt: three pages of 256 and words
COMPUTED = {"link": 35, "decode": 1}  # tokens of a forward
_ROLES: dict[str, Literal["prefill", "decode"]] = {"link": "prefill", "decode": "decode"}
_ARMS = {
    "ours": ("a forward, OpenMP's threads as our roles set them up", dict([SPIN])),
    "waiting": ("a forward, threads that sleep between regions", {SPIN[0]: "100"}),
    "spinning": ("a forward, threads as they are by default", {SPIN[0]: "300000", openmp.CONSIDER: "0"}),
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure both engines in both arms, in turns."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.3) if quick else (CHECKPOINT, 9, 3.0)
    cases = [f"{name} {how}" for name in COMPUTED for how in ("alone", "beside the other")]
    found: dict[str, dict[str, list[float]]] = {arm: {case: [] for case in cases} for arm in _ARMS}
    with ExitStack() as stack:
        engines = {
            arm: {
                name: (stack.enter_context(engine_process(role, checkpoint, CONTEXT, environment)), COMPUTED[name])
                for name, role in _ROLES.items()
            }
            for arm, (_, environment) in _ARMS.items()
        }
        for turn in range(turns):
            for arm in list(_ARMS)[:: 1 if turn % 2 == 0 else -1]:
                for name, engine in engines[arm].items():
                    found[arm][f"{name} alone"].append(forward_ms({name: engine}, seconds)[name])
                for name, ms in forward_ms(engines[arm], seconds).items():
                    found[arm][f"{name} beside the other"].append(ms)
            console.print(f"  turn {turn + 1} of {turns}")
    arms = [Arm(name, description, found[name]) for name, (description, _) in _ARMS.items()]
    figures = {
        f"{case.replace(' ', '_')}_over_{other.name}": arms[0].median_ms(case) / other.median_ms(case)
        for other in arms[1:]
        for case in cases
    }
    workload = {"model": checkpoint, "context": CONTEXT, "computed": COMPUTED, "turns": turns, "seconds": seconds}
    return Outcome({**workload, "environment": {name: given for name, (_, given) in _ARMS.items()}}, arms, figures)


BENCHMARK = Benchmark(
    "shared-cores",
    "A link's and a decode step's forward on the same cores: our threads, threads that sleep, and OpenMP's default.",
    run,
    {},
)
