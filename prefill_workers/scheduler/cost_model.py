"""Forward cost model of a prefill worker: measured at start, learnt from every forward.

It decides what goes into one forward together (`ForwardCost.joins`), in what pieces background work is done, and how
long a forward waits for layers that are loading.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autoscale.curves import USUAL, ForwardCost
from prefill_workers.sequence import LinkSequence, Run

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.link.layerwise_load import LayerwiseLoad

logger = logging.getLogger(__name__)

_SLACK_SECONDS = 0.1  # how late the layers of one forward may be in all, besides what the forward itself takes
_PIECE_SECONDS = 0.1  # of a background forward: what a link that arrives meanwhile waits for
_PIECE_OF_REST = 0.02  # and after a longer rest such a share of it: whole chunks cost less than their pieces
_LONGEST_PIECE_SECONDS = 0.5
_PIECE_FIXED = 4.0  # times the fixed part: shorter pieces would be mostly that
_LONG_ENOUGH = 4.0  # times the shortest forward: one that shows what a token takes
_MEASURED_TOKENS = 4096
_MOST_FIXED = 2048.0  # tokens: where the longest forward does not tell, on a model that is very small
_TURNS = 4


class ForwardCostModel:
    """The cost of a forward as learnt from earlier ones, and decisions by it.

    Args:
        fixed: the fixed part, in tokens.
        seconds_per_token: None: not known before the first forward.
    """

    def __init__(self, fixed: float = USUAL.fixed_tokens, seconds_per_token: float | None = None) -> None:
        self._cost = ForwardCost(fixed, seconds_per_token)

    @property
    def cost(self) -> ForwardCost:
        """The cost as known now."""
        return self._cost

    def learn(self, tokens: int, seconds: float) -> None:
        """Take up a forward over so many tokens that took this long, without waiting for layers."""
        now, before = seconds / (tokens + self._cost.fixed_tokens), self._cost.seconds_per_token
        self._cost = replace(self._cost, seconds_per_token=now if before is None else (now + before) / 2)

    def seconds(self, tokens: int) -> float:
        """Seconds that a forward over so many tokens is expected to take; 0 before the first."""
        return self._cost.seconds(tokens)

    def joins(self, tokens: int, others: int, behind: int) -> bool:
        """See `ForwardCost.joins`."""
        return self._cost.joins(tokens, others, behind)

    def piece(self, left: int, rested: float = 0.0) -> int:
        """Tokens of the next background forward.

        Of those `left`, after `rested` seconds without a request.

        A tenth of a second, more after a rest of five; or four times the fixed part where that is longer. All pieces
        are of about one length, and there is none for less than the fixed part.
        """
        fixed, per_token = self._cost.fixed_tokens, self._cost.seconds_per_token
        most = int(_PIECE_FIXED * fixed)
        if per_token is not None:
            seconds = min(max(_PIECE_SECONDS, _PIECE_OF_REST * rested), _LONGEST_PIECE_SECONDS)
            most = max(most, int(seconds / per_token))
        return math.ceil(left / max(1, math.ceil((left - fixed) / most)))

    def keeps_ahead(self, arriving: Sequence[LayerwiseLoad], tokens: int) -> bool:
        """True if all layers arrive about when a forward over so many tokens, begun now, needs them."""
        if self._cost.seconds_per_token is None:
            return False
        return max(chunk.seconds_left for chunk in arriving) <= self.seconds(tokens)

    def deadline(self, tokens: int) -> float:
        """Monotonic time at which a forward that begins now stops waiting for layers."""
        return time.monotonic() + 2 * self.seconds(tokens) + _SLACK_SECONDS


@torch.inference_mode()
def measure_forward_cost(engine: PrefillEngine) -> ForwardCostModel:
    """Measure the forward cost of an idle engine, whose KV this overwrites.

    By the shortest forward, and by one that is long enough to take several times as long.
    """

    def seconds(tokens: int) -> float:
        index = torch.arange(tokens)
        positions = index.expand(3, -1) if engine.uses_mrope else index
        blocks = range(1, 2 + (tokens - 1) // engine.block_size)
        sequence = LinkSequence(torch.zeros(tokens, dtype=torch.int32), positions, blocks)
        taken = []
        for _ in range(_TURNS):
            began = time.perf_counter()
            engine.forward([(sequence, [Run(0, tokens)])])
            taken.append(time.perf_counter() - began)
        return min(taken)  # others start beside this engine, and the first forward of a length sets up kernels

    shortest, tokens = seconds(1), 64
    pool = (engine.num_blocks - 1) * engine.block_size
    most = min(_MEASURED_TOKENS, engine.spec.max_batch_tokens, engine.max_model_len, pool)
    while (longer := seconds(min(tokens, most))) < _LONG_ENOUGH * shortest and tokens < most:
        tokens *= 2
    per_token = max((longer - shortest) / max(min(tokens, most) - 1, 1), shortest / _MOST_FIXED)
    logger.info("a forward takes %.3g ms, and %.3g ms more for every further token", 1e3 * shortest, 1e3 * per_token)
    return ForwardCostModel(max(shortest / per_token - 1, 1.0), per_token)
