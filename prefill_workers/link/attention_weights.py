"""Weights of a sum's parts by the first layer's attention (see `compose`), on an engine.

Queries and keys of the first layer are the same in any context: no layer runs, and no token attends to anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from prefill_workers.engine.batch import Attending
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.compose import attention_weights
from prefill_workers.link.plan import ChunkPlan, ChunkState, LinkPlan
from prefill_workers.sequence import LinkSequence, Run, forwards


def weighed_by_attention(
    engine: PrefillEngine, work: Sequence[tuple[LinkPlan, Sequence[Run]]], budget: int
) -> tuple[dict[ChunkPlan, Tensor], int]:
    """Weights of the parts of every chunk that is to be composed.

    Returns the weights [pairs, tokens] by chunk, and how many forwards that took.

    Arguments as for `Linker.select`. The first layer's KV of the runs is stored meanwhile.
    """
    plans, taken = {plan.sequence: plan for plan, _ in work}, 0
    shares: dict[ChunkPlan, list[Tensor]] = defaultdict(list)
    for part in forwards([(plan.sequence, runs) for plan, runs in work], budget):
        asked = list(_asked(part, plans))
        told = engine.attend_first(part, [attending for _, attending in asked])
        for (chunk, _), share in zip(asked, told, strict=True):
            shares[chunk].append(share)
        taken += 1
    return {chunk: attention_weights(torch.cat(parts, -1)) for chunk, parts in shares.items()}, taken


def _asked(
    part: Sequence[tuple[LinkSequence, Sequence[Run]]], plans: Mapping[LinkSequence, LinkPlan]
) -> Iterator[tuple[ChunkPlan, Attending]]:
    """Tokens of one forward that are to be weighed by their attention, with their chunk."""
    done = 0
    for sequence, runs in part:
        chunks = plans[sequence].chunks
        others = tuple(Run(chunk.span.start, chunk.span.stop) for chunk in chunks)
        for run in runs:
            for i, chunk in enumerate(chunks):
                start, stop = max(run.start, chunk.span.start), min(run.stop, chunk.span.stop)
                if chunk.state is ChunkState.TO_WEIGH and start < stop:
                    tokens = Run(done + start - run.start, done + stop - run.start)
                    yield chunk, Attending(tokens, start, sequence.blocks, others[:i])
            done += len(run)
