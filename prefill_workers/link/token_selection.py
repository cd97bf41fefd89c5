"""Selection of the tokens of a chunk with stored KV that are recomputed. Pure functions.

| mode         | tokens                                                             | source                  |
|--------------|--------------------------------------------------------------------|-------------------------|
| mpic-K       | the first K: they took themselves for the start of the prompt      | mpic.md §4.2, Insight 3 |
| cacheblend-R | the R per cent whose KV in context is farthest from what is stored | CacheBlend, §4          |

How far, CacheBlend (doi:10.1145/3689031.3696098) reads off an early layer. Here it is the second: in the first a
token's KV depends on nothing but the token and its position. What was selected becomes runs of the request's one
forward, beside the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.operator.apply import deficit_at
from kvstore.operator.layout import Layout
from prefill_workers.modes import Mode
from prefill_workers.sequence import Run

MEASURED_LAYER = 1  # the first whose KV depends on context


def selected_by_place(mode: Mode, start: int, stop: int) -> tuple[Run, ...]:
    """Runs that a mode selects of the chunk at `start` up to `stop`, by place alone."""
    count = mode.selected(stop - start)
    return (Run(start, start + count),) if count else ()


def selected_by_deviation(mode: Mode, deviation: Tensor, start: int) -> tuple[Run, ...]:
    """Runs that a mode selects by the tokens' `deviation` [tokens].

    `start` is the chunk's first token. Of tokens that deviate equally the earlier go first.
    """
    chosen = deviation.argsort(descending=True, stable=True)[: mode.selected(len(deviation))]
    return runs_of(torch.zeros(len(deviation), dtype=torch.bool).index_fill(0, chosen, True), start)


def deviations(in_context: Tensor, stored: Tensor, position: int, layout: Layout) -> Tensor:
    """Distance of each token's KV from the stored one: [tokens] fp32.

    The L2 norm over the features of one layer.

    Args:
        in_context: KV [1, tokens, features] of a chunk whose first token is at `position`.
        stored: canonical KV [1, tokens, features] of the same layer.
    """
    return measured_deficit(in_context, stored, position, layout)[0].norm(dim=-1)


def measured_deficit(in_context: Tensor, stored: Tensor, position: int, layout: Layout) -> Tensor:
    """Deficit Δ of one layer, [1, tokens, features] fp32; arguments as for `deviations`."""
    return deficit_at(in_context, stored, position, layout.of_one_layer)


def runs_of(mask: Tensor, start: int) -> tuple[Run, ...]:
    """Runs of the tokens that a mask [tokens] bool marks, neighbours in one.

    The mask's first token is token `start`.
    """
    outside = torch.zeros(1, dtype=torch.int32)
    edges = torch.diff(mask.int(), prepend=outside, append=outside)
    begins, ends = (torch.nonzero(edges == edge).flatten() + start for edge in (1, -1))
    return tuple(Run(a, b) for a, b in zip(begins.tolist(), ends.tolist(), strict=True))
