"""What engines that share processors take from each other while OpenMP's threads wait.

A prefill engine that links a prompt and a decode engine that takes a step, each in a process of its own with as many
threads as there are cores, alone and at the same time.

| arm        | between the parallel regions of a forward                                                |
|------------|-------------------------------------------------------------------------------------------|
| `waiting`  | threads wait without a processor, as our roles set them up (`replica_process.SPIN`)        |
| `spinning` | threads look for the next one for milliseconds, as OpenMP does by default                  |
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from rich.console import Console

from serving.bench.engine_process import engine_process, forward_ms
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.bench.load_arms import QUICK_CHECKPOINT
from serving.bench.ttft import CHECKPOINT
from serving.replica_process import SPIN

CONTEXT = 820  # tokens of the prompt: three pages of 256 and words
COMPUTED = {"link": 35, "decode": 1}  # tokens of a forward
_ROLES: dict[str, Literal["prefill", "decode"]] = {"link": "prefill", "decode": "decode"}
_SPINNING = "300000"  # libgomp's own, where it has no more threads than processors


def run(quick: bool, console: Console) -> Outcome:
    """Measure both engines in both arms, in turns."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.3) if quick else (CHECKPOINT, 9, 3.0)
    spins = {"waiting": SPIN[1], "spinning": _SPINNING}
    cases = [f"{name} {how}" for name in COMPUTED for how in ("alone", "beside the other")]
    found: dict[str, dict[str, list[float]]] = {arm: {case: [] for case in cases} for arm in spins}
    with ExitStack() as stack:
        engines = {
            arm: {
                name: (stack.enter_context(engine_process(role, checkpoint, CONTEXT, {SPIN[0]: spin})), COMPUTED[name])
                for name, role in _ROLES.items()
            }
            for arm, spin in spins.items()
        }
        for turn in range(turns):
            for arm in list(spins)[:: 1 if turn % 2 == 0 else -1]:
                for name, engine in engines[arm].items():
                    found[arm][f"{name} alone"].append(forward_ms({name: engine}, seconds)[name])
                for name, ms in forward_ms(engines[arm], seconds).items():
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


BENCHMARK = Benchmark(
    "shared-cores",
    "A link's and a decode step's forward on the same cores: OpenMP's threads wait, or spin as they do by default.",
    run,
    {},
)
