"""Engines in processes of their own, to compare process set-ups.

Every one holds a prompt whose last tokens it computes again and again for as long as it is told to.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal

from infra.checkpoints import checkpoint_path
from serving.replicas.process import SPIN, enter

_READY_SECONDS = 300.0


@contextmanager
def engine_process(
    role: Literal["prefill", "decode"], checkpoint: str, context: int, environment: Mapping[str, str]
) -> Iterator[Connection]:
    """An engine in a process like one of that role's, with this in its environment besides.

    It takes how many of a prompt's last tokens a forward computes, and for how many seconds; and gives milliseconds of
    a forward. `context`: tokens of the prompt.
    """
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    with _inherited(environment):
        process = spawning.Process(target=_serve, args=(theirs, role, checkpoint, context), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here
    try:
        if not ours.poll(_READY_SECONDS):
            raise TimeoutError(f"the {role} engine did not start")
        ours.recv()
        yield ours
    finally:
        process.kill()


def in_prefill_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `work` in a process of its own, set up like a prefill worker's.

    Raises:
        BrokenProcessPool: the process died.
    """
    spawning = multiprocessing.get_context("spawn")
    with _inherited(dict([SPIN])), ProcessPoolExecutor(1, spawning, _enter, ("prefill",)) as process:
        return process.submit(work, *arguments).result()


def forward_ms(engines: Mapping[str, tuple[Connection, int]], seconds: float) -> dict[str, float]:
    """Forward milliseconds of engines that run at the same time, each with its token count."""
    for pipe, tokens in engines.values():
        pipe.send((tokens, seconds))
    return {name: pipe.recv() for name, (pipe, _) in engines.items()}


@contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """Environment of processes started in the block; OpenMP reads its own when loaded."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _enter(role: Literal["prefill", "decode"]) -> None:
    from infra.vllm_env import vllm_environment
    from serving.settings import DecodeRoleSettings, PrefillRoleSettings

    enter(PrefillRoleSettings() if role == "prefill" else DecodeRoleSettings())
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))


def _serve(pipe: Connection, role: Literal["prefill", "decode"], checkpoint: str, context: int) -> None:
    _enter(role)
    forward = _forward(checkpoint, context)
    pipe.send("ready")
    while True:
        tokens, seconds = pipe.recv()
        count, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            forward(tokens)
            count += 1
        pipe.send(spent / count * 1e3)


def _forward(checkpoint: str, context: int) -> Any:
    """A forward over the last tokens of a prompt whose others are computed already."""
    import torch

    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec
    from prefill_workers.sequence import LinkSequence, Run

    engine = PrefillEngine(EngineSpec(str(checkpoint_path(checkpoint)), hand_off=False, max_model_len=2048))
    index = torch.arange(context)
    positions = index.expand(3, -1) if engine.uses_mrope else index
    blocks = range(1, 2 + context // engine.block_size)
    sequence = LinkSequence(torch.zeros(context, dtype=torch.int32), positions, blocks)

    def forward(tokens: int) -> None:
        with torch.inference_mode():
            engine.forward([(sequence, [Run(context - tokens, context)])])

    forward(context)
    return forward
