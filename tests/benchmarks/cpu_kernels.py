"""Forward times on a CPU with our kernels and without them.

See `infra.cpu.kernels` and `infra.cpu.latent`.

Two prefill engines in processes of their own, one of which computes as vLLM does, take turns: a forward over the last
tokens of a prompt, and over all of it. Of a model with M-RoPE, which the fused norms and rotary embeddings are for, and
of a small one with latent attention.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

from rich.console import Console

from infra.cpu.kernels import SWITCH
from serving.bench.engine_process import engine_process, forward_ms
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.models import CHECKPOINT
from tests.benchmarks.load_arms import QUICK_CHECKPOINT

CONTEXT = 1600  # tokens of the prompt
COMPUTED = (1, 40, 256, 1600)  # of them, by a forward
LATENT_CHECKPOINT = "deepseek_v2-tiny"


def run(quick: bool, console: Console) -> Outcome:
    """Measure both arms in turns, model by model."""
    checkpoint, turns, seconds = (QUICK_CHECKPOINT, 2, 0.2) if quick else (CHECKPOINT, 9, 2.0)
    ours, vllms, figures = _measured(checkpoint, "", turns, seconds, console)
    more = _measured(LATENT_CHECKPOINT, "latent_", turns, seconds, console)
    arms = [
        Arm("ours", "a forward of so many tokens, our kernels; `latent_`: with latent attention", ours | more[0]),
        Arm("vllm", "the same as vLLM computes it", vllms | more[1]),
    ]
    workload = {
        "models": [checkpoint, LATENT_CHECKPOINT], "context": CONTEXT, "computed": COMPUTED, "turns": turns,
        "seconds": seconds,
    }  # fmt: skip
    return Outcome(workload, arms, figures | more[2], axis="tokens computed")


def _measured(
    checkpoint: str, prefix: str, turns: int, seconds: float, console: Console
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    """Both arms' times by case, and what ours takes of the other's."""
    found: dict[str, dict[str, list[float]]] = {"1": {}, "0": {}}
    with ExitStack() as stack:
        engines = {
            on: stack.enter_context(engine_process("prefill", checkpoint, CONTEXT, {SWITCH: on})) for on in found
        }
        for tokens in COMPUTED:
            measured = {on: partial(_forward_ms, engine, tokens, seconds) for on, engine in engines.items()}
            for on, times in in_turns(measured, turns).items():
                found[on][f"{prefix}{tokens}"] = times
            console.print(f"  {checkpoint}: {tokens} tokens done")
    ours, vllms = found["1"], found["0"]
    return ours, vllms, {f"time_{case}": median(ours[case]) / median(vllms[case]) for case in ours}


def _forward_ms(engine: Connection, tokens: int, seconds: float) -> float:
    return forward_ms({"alone": (engine, tokens)}, seconds)["alone"]


BENCHMARK = Benchmark(
    "cpu-kernels",
    "A forward on a CPU with our kernels (fused ones that vLLM leaves unused there, latent attention) against vLLM's.",
    run,
    {},
)
