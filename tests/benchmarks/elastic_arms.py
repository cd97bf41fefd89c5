"""Arms of benchmark `elastic`: entries by policy, and what a model says behind them.

| arm       | entries that stay of a prompt, as many in each layer                                          |
|-----------|-----------------------------------------------------------------------------------------------|
| evict     | ours: first four, text behind the last image, what the last 32 tokens attend to most           |
| cover     | ours: the same text; of each image an equal share, tokens whose values differ most               |
| merge     | ours: all text, means within each image                                                       |
| paper     | eq. 1 to 3 as printed                                                                         |
| eq1       | the paper's anchors, the others left out                                                      |
| h2o       | half the last ones, and what all tokens attend to most                                        |
| local     | first four and last ones                                                                      |
| uniform   | evenly spread, first and last one among them                                                  |
| random    | drawn by chance, first and last one among them                                                |

All on the product's own engine: observed, compacted and gone on from as a request's KV is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from prefill_workers.compaction.plan import OBSERVERS, SINKS, CompactionPlan, compaction_plan
from prefill_workers.protocol import Compaction, CompactionPolicy, LinkRequest
from prefill_workers.sequence import LinkSequence, Run

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

OTHERS = ("paper", "eq1", "h2o", "local", "uniform", "random")
ARMS = ("evict", "cover", "merge", *OTHERS)
_LINK = "bench"


class Importance(NamedTuple):
    """Importance [layers, tokens] of tokens by the queries of the last ones, and of all."""

    last: Tensor
    every: Tensor


@dataclass(frozen=True)
class Held:
    """A prompt's entries in the pool, `kept` of them; the last one's position equals its index."""

    blocks: range
    kept: int


def arms_of(request: LinkRequest, budget: float, seen: Importance) -> Iterator[tuple[str, CompactionPlan, Tensor]]:
    """Plan and importance of each arm, but for those that would keep all entries."""

    def asked(policy: CompactionPolicy) -> CompactionPlan | None:
        return compaction_plan(replace(request, compaction=Compaction(budget, policy)), 1)

    ours = asked(CompactionPolicy.EVICT)
    if ours is None:
        return
    n, kept, layers = ours.tokens, ours.kept, len(seen.last)
    inner = replace(ours, reducible=(Run(1, n - 1),))
    order = torch.arange(n, dtype=torch.float32)
    spread = torch.zeros(n)
    spread[torch.linspace(0, n - 1, kept).round().long()] = 1.0
    chance = torch.rand(n, generator=torch.Generator().manual_seed(n))
    arms: dict[str, tuple[CompactionPlan | None, Tensor]] = {
        "evict": (ours, seen.last),
        "cover": (asked(CompactionPolicy.COVER), seen.last),
        "merge": (asked(CompactionPolicy.MERGE), seen.last),
        "paper": (asked(CompactionPolicy.PAPER), seen.every),
        "eq1": (inner, seen.every),
        "h2o": (replace(ours, reducible=(Run(0, n - kept // 2),)), seen.every),
        "local": (replace(ours, reducible=(Run(min(SINKS, n - 1), n - 1),)), order.expand(layers, -1)),
        "uniform": (inner, spread.expand(layers, -1)),
        "random": (inner, chance.expand(layers, -1)),
    }
    yield from ((arm, plan, scores) for arm, (plan, scores) in arms.items() if plan is not None)


def observe(engine: PrefillEngine, sequence: LinkSequence) -> Importance:
    """Compute a sequence's KV; importance of its tokens."""
    from prefill_workers.engine.batch import Observing

    n = len(sequence)
    first = max(0, n - OBSERVERS)
    observed = [
        Observing("last", Run(first, n), first, sequence.blocks),
        Observing("all", Run(0, n), 0, sequence.blocks),
    ]
    engine.forward([(sequence, [Run(0, n)])], observed=observed)
    last, every = engine.take_importance("last"), engine.take_importance("all")
    assert last is not None
    assert every is not None
    return Importance(last, every)


def compacted(
    engine: PrefillEngine, request: LinkRequest, budget: float, seen: Importance, whole: Held
) -> dict[str, Held]:
    """Compact a prompt by each arm that leaves something out.

    Each has as many blocks as the `whole` prompt, behind these.
    """
    found: dict[str, Held] = {}
    for arm, plan, scores in arms_of(request, budget, seen):
        start = whole.blocks.stop + len(found) * len(whole.blocks)
        found[arm] = Held(range(start, start + len(whole.blocks)), plan.kept)
        engine.give_importance(_LINK, scores)
        engine.compact(_LINK, whole.blocks, plan, found[arm].blocks)
    return found


def logprobs(engine: PrefillEngine, tokens: Tensor, held: Sequence[Held], again: int = 1) -> Sequence[Tensor]:
    """Log-probabilities [tokens, vocabulary] behind each of `tokens`, by held prompt.

    `tokens` stand behind its entries. The first `again` of them are the ids of its last entries, which are computed
    once more.
    """
    work = []
    for one in held:
        first = one.kept - again
        sequence = _sequence(engine, one, torch.cat([torch.zeros(first, dtype=torch.int32), tokens.int()]))
        work.append((sequence, [Run(i, i + 1) for i in range(first, len(sequence))]))
    return engine.logits(work).log_softmax(-1).split(len(tokens))


def greedy(engine: PrefillEngine, token: int, held: Sequence[Held], steps: int) -> list[list[int]]:
    """Greedy tokens, `steps` of them, behind each held prompt.

    Its last token, `token`, is computed once more.
    """
    sequences = [_sequence(engine, one, torch.zeros(one.kept + steps, dtype=torch.int32)) for one in held]
    for one, sequence in zip(held, sequences, strict=True):
        sequence.token_ids[one.kept - 1] = token
    for step in range(steps):
        ends = [one.kept + step for one in held]
        work = [(sequence, [Run(end - 1, end)]) for sequence, end in zip(sequences, ends, strict=True)]
        for sequence, end, row in zip(sequences, ends, engine.logits(work).argmax(-1).tolist(), strict=True):
            sequence.token_ids[end] = row
    return [sequence.token_ids[one.kept :].tolist() for one, sequence in zip(held, sequences, strict=True)]


def _sequence(engine: PrefillEngine, held: Held, token_ids: Tensor) -> LinkSequence:
    """Tokens at positions that equal their index, as a decode engine counts them."""
    at = torch.arange(len(token_ids))
    return LinkSequence(token_ids, at.expand(3, -1) if engine.uses_mrope else at, held.blocks)
