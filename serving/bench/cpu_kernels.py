"""What a forward takes with vLLM's fused CPU kernels and without them (`infra.cpu_kernels`).

Two prefill engines in processes of their own, one of which leaves norms and rotary embeddings to torch as vLLM does,
take turns: a forward over the last tokens of a prompt, and over all of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection

from rich.console import Console

from infra.cpu_kernels import SWITCH
from serving.bench.engine_process import engine_process, forward_ms
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.load_arms import QUICK_CHECKPOINT
from serving.bench.ttft import CHECKPOINT

CONTEXT = 1600  # tokens of the prompt
COMPUTED = (1, 40, 256, 1600)  # of them, by a forward


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms in turns."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.2) if quick else (CHECKPOINT, 9, 2.0)
    found: dict[str, dict[str, list[float]]] = {"fused": {}, "torch": {}}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(engine_process("prefill", checkpoint, CONTEXT, {SWITCH: on}))
            for name, on in (("fused", "1"), ("torch", "0"))
        }
        for tokens in COMPUTED:
            measured = {name: partial(_forward_ms, engine, tokens, seconds) for name, engine in engines.items()}
            for name, times in in_turns(measured, turns).items():
                found[name][str(tokens)] = times
            console.print(f"  {tokens} tokens done")
    arms = [
        Arm("fused", "a forward of so many tokens, vLLM's fused kernels", found["fused"]),
        Arm("torch", "the same, norms and rotary embeddings by torch", found["torch"]),
    ]
    fused, plain = arms
    figures = {f"time_{tokens}": fused.median_ms(str(tokens)) / plain.median_ms(str(tokens)) for tokens in COMPUTED}
    workload = {"model": checkpoint, "context": CONTEXT, "computed": COMPUTED, "turns": turns, "seconds": seconds}
    return Outcome(workload, arms, figures, axis="tokens computed")


def _forward_ms(engine: Connection, tokens: int, seconds: float) -> float:
    return forward_ms({"alone": (engine, tokens)}, seconds)["alone"]


BENCHMARK = Benchmark(
    "cpu-kernels",
    "A forward on a CPU with vLLM's fused kernels, which it leaves unused there, against one without.",
    run,
    {},
)
