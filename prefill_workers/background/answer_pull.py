"""Pulls of answers' KV, from the decode engines that generated them.

    decode engine:   | prompt ........ | ... answer ...... |
                                       └── NIXL ───────────┐
    prefill worker:  | prompt, shared  | blocks of its own |

The blocks of a prompt that are full are there; what stands behind them, the rest of the prompt and the answer, is read
into new blocks, which are named once it is there. Nothing is computed, so that this waits for no idle time. It is the
KV that the next token was drawn from at each step: computed a token at a time, as vLLM's own prefix cache has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from infra.hand_back import is_held
from infra.vllm_env import BLOCK_SIZE
from prefill_workers.background.answer import Answer
from prefill_workers.block_index import PrefixMatch
from prefill_workers.block_pool import BlockPool, Lease, PoolExhausted
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.prefix_hits import PrefixHits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pull:
    """An answer of which the tokens up to `stop` are read; `match`: what was known of it at `epoch`."""

    answer: Answer
    match: PrefixMatch
    lease: Lease
    stop: int
    epoch: int
    offer: Mapping[str, Any]
    ended: Future[bool]


class AnswerPulls:
    """Pulls under way. Belongs to the prefill loop's thread.

    Args:
        hits: what finds prompts' blocks, and names the answers'.

    Attributes:
        tokens: read so far.
    """

    def __init__(self, engine: PrefillEngine, pool: BlockPool, hits: PrefixHits) -> None:
        self._engine, self._pool, self._hits = engine, pool, hits
        self._under_way: dict[str, _Pull] = {}  # by lease
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, answer: Answer, offer: Mapping[str, Any], ended: Future[bool]) -> bool:
        """Begin to read an answer's KV from a decode engine.

        False if it comes too late, is known, or finds no room.

        Args:
            ended: set in the end; to True if the decode engine was told that it need not hold the KV any more.
        """
        if not is_held(offer):
            ended.set_result(False)
            return False
        size, epoch = self._pool.block_size, self._hits.epoch
        match = self._hits.match(answer.request, answer.chain, answer.frame, answer.tokens)
        full = match.tokens // size
        # of the last token drawn there is no KV
        stop = min(answer.tokens, int(offer["remote_num_tokens"]), len(answer.request.token_ids) - 1)
        (offered,) = offer["remote_block_ids"]
        remote = list(offered[full : self._pool.blocks_for(stop)])
        fits = offer[BLOCK_SIZE] == size and len(remote) == self._pool.blocks_for(stop) - full
        shares = all(match.is_shared(i, size) for i in range(full))
        lease: Lease | None = None
        is_behind = match.forms == answer.forms  # else the blocks that are known are of another link
        if fits and shares and is_behind and answer.known <= match.tokens < stop:
            whole_blocks = replace(match, tokens=full * size, blocks=match.blocks[:full])
            with suppress(PoolExhausted):
                lease = self._pool.allocate(stop, readers=0, match=whole_blocks)
        try:
            if lease is None:
                ended.set_result(self._engine.pull_kv(f"refused-{offer['remote_request_id']}", (), offer))
                return False
            self._engine.pull_kv(lease.id, lease.blocks[full:], {**offer, "remote_block_ids": (remote,)})
        except Exception as error:
            logger.warning("an answer's KV cannot be read: %s", error)
            if lease is not None:
                self._pool.abandon(lease.id)
            ended.set_result(False)
            return False
        self._under_way[lease.id] = _Pull(answer, match, lease, stop, epoch, offer, ended)
        return True

    def give_up(self) -> None:
        """Let nobody wait for the pulls under way."""
        for pull in self._under_way.values():
            with suppress(InvalidStateError):
                pull.ended.set_result(False)

    def poll(self) -> Iterator[Answer]:
        """Name the blocks of pulls that have ended.

        Yields the answers of those that failed, or took too long.
        """
        for lease in self._under_way:
            self._pool.renew(lease)
        well, badly = self._engine.poll_pulls()
        for name in [*well, *badly]:
            if (pull := self._under_way.pop(name, None)) is None:  # refused
                continue
            answer, match = pull.answer, pull.match
            has_come = name in well and is_held(pull.offer)
            if has_come:
                until = None if pull.stop == answer.tokens else pull.stop
                blocks, chain, frame = pull.lease.blocks, answer.chain, answer.frame
                self._hits.index.add(blocks, chain, match.forms, match, frame, pull.epoch, until)
                self.tokens += pull.stop - match.tokens
            self._pool.abandon(name)
            with suppress(InvalidStateError):  # who waited has left
                pull.ended.set_result(name in well)
            if not has_come:
                yield answer
