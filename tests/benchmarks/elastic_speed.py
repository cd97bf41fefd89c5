"""Time of a decode step, and answers at once, at a budget (benchmark `elastic`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import torch
from rich.console import Console

from decode_workers.admission import Admission
from infra.checkpoints import checkpoint_path
from prefill_workers.compaction.plan import CompactionPlan, compaction_plan
from prefill_workers.protocol import Compaction, LinkRequest
from prefill_workers.sequence import LinkSequence, Run
from serving.bench.models import CHECKPOINT, measured_dtype

CONTEXT, BATCH, ANSWER = 8192, 8, 256  # tokens of a prompt, sequences, tokens of an answer
_BLOCKS, _BLOCK_SIZE = 1 << 18, 32  # so many that what is left beside whole sequences counts for nothing


def throughput(budget: float, turns: int, console: Console) -> dict[str, float]:
    """Milliseconds of a decode step of a batch over full contexts, and at the budget.

    By one thread's CPU time, the least of the turns: what others do on the machine counts little.
    """
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    spec = EngineSpec(
        model=str(checkpoint_path(CHECKPOINT)), dtype=measured_dtype(), max_model_len=CONTEXT + 128, hand_off=False
    )
    engine = PrefillEngine(spec)
    try:
        each = -(-CONTEXT // engine.block_size)

        def step(length: int) -> Callable[[], float]:
            at = torch.arange(length)
            positions = at.expand(3, -1) if engine.uses_mrope else at
            ids = torch.ones(length, dtype=torch.int32)
            work = [
                (LinkSequence(ids, positions, range(1 + i * each, 1 + (i + 1) * each)), [Run(length - 1, length)])
                for i in range(BATCH)
            ]

            def timed() -> float:
                began = time.process_time()
                engine.forward(work, ends=range(BATCH))
                return (time.process_time() - began) * 1e3

            return timed

        steps = {"full": step(CONTEXT), "budget": step(_plan(budget, engine.block_size).kept + 1)}
        for one in steps.values():
            one()  # unmeasured
        times = {name: min(one() for _ in range(turns)) for name, one in steps.items()}
    finally:
        engine.shutdown()
    console.print("  speed: done")
    return times


def concurrency(budget: float) -> float:
    """Answers admitted at once by a decode worker at the budget, over those with all KV."""
    full, kept = CONTEXT, _plan(budget, _BLOCK_SIZE).kept
    return admitted(kept + 1 + ANSWER) / admitted(full + 1 + ANSWER)


def admitted(tokens: int) -> int:
    """Sequences of up to so many tokens that are let in until the pool is full."""

    async def fill() -> int:
        admission = Admission(_BLOCKS, _BLOCK_SIZE)
        async with AsyncExitStack() as rooms:
            while admission.has_room(tokens):
                await rooms.enter_async_context(admission.admit(tokens, 1))
            return admission.running

    return asyncio.run(fill())


def _plan(budget: float, block_size: int) -> CompactionPlan:
    plan = compaction_plan(LinkRequest("bench", [0] * CONTEXT, compaction=Compaction(budget)), block_size)
    assert plan is not None
    return plan
