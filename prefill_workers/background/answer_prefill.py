"""KV of answers for their chats' next turns: read from decode engines, or computed.

A decode engine generates the answer. The worker that linked the prompt brings its KV to behind the prompt's blocks,
where the next turn finds it like any beginning (`block_index`):

| when                   | what                                                                                |
|------------------------|-------------------------------------------------------------------------------------|
| a link has finished    | its request is remembered under its lease; of the last links                         |
| its answer has ended   | the ingress sends the token ids as they were generated, and what the decode engine   |
|                        | offers of its KV: that is read (`answer_pull`)                                       |
| the engine is idle     | of what could not be read, a piece at a time: find what is known, compute on from    |
|                        | there, name the blocks                                                               |
| a client sends it back | digests match up to the first tokens that are others, such as of a reasoning left out |

Nothing is held between two pieces: a link that comes meanwhile takes blocks as it likes, and what is computed by then
serves. How the KV of the prompt was made goes with the new blocks, so that exact and approximate chains never mix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from prefill_workers.background.answer import Answer
from prefill_workers.background.answer_pull import AnswerPulls
from prefill_workers.background.brought import brought
from prefill_workers.block_index import Forms
from prefill_workers.block_pool import BlockPool, PoolExhausted
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.sampling import are_finite
from prefill_workers.link.plan import LinkPlan
from prefill_workers.link.prefix_hits import PrefixHits, forms_of
from prefill_workers.protocol import LinkRequest
from prefill_workers.sequence import LinkSequence, Run

_MOST_LINKS = 256  # whose answers may still come
_MOST_WAITING = 64


@dataclass(frozen=True)
class AnswerStats:
    """Counters of answers whose KV is kept.

    `tokens`: computed; `pulled`: tokens read from decode engines. `given_up`: answers by reason: `queue` (others came
    later), `evicted` (what stands before them is not there any more), `blocks` (the pool has no room) or `not finite`
    (logits).
    """

    waiting: int = 0
    tokens: int = 0
    pulled: int = 0
    given_up: Mapping[str, int] = field(default_factory=dict)


class AnswerPrefill:
    """Answers whose KV is read or computed. Belongs to the prefill loop's thread.

    Args:
        hits: what finds prompts' blocks.
        piece: of how many tokens are left, those that the next forward may compute; it may change.
    """

    def __init__(self, engine: PrefillEngine, pool: BlockPool, hits: PrefixHits, piece: Callable[[int], int]) -> None:
        self._engine, self._pool, self._hits, self._piece = engine, pool, hits, piece
        self._linked: OrderedDict[str, tuple[LinkRequest, int, Forms]] = OrderedDict()  # requests and frames, by lease
        self._waiting: OrderedDict[int, Answer] = OrderedDict()
        self._numbers = count()
        self._pulls = AnswerPulls(engine, pool, hits)
        self._tokens, self._given_up = 0, Counter[str]()

    def __len__(self) -> int:
        """Answers left to be computed."""
        return len(self._waiting)

    @property
    def pulling(self) -> int:
        """Answers that are being read, for `poll` to end."""
        return len(self._pulls)

    def stats(self) -> AnswerStats:
        """Counters, from any thread."""
        return AnswerStats(len(self._waiting), self._tokens, self._pulls.tokens, dict(self._given_up))

    @staticmethod
    def is_kept(plan: LinkPlan) -> bool:
        """True if the answer behind a link may be kept: if the whole prompt is."""
        session = plan.session
        return plan.chain is not None and (session is None or session.shareable_tokens >= len(plan.sequence))

    def remember(self, plan: LinkPlan, lease: str) -> None:
        """Remember a finished link until its answer comes, if the whole prompt is kept."""
        if not self.is_kept(plan):
            return
        self._linked[lease] = plan.request, plan.frame, forms_of(plan)
        if len(self._linked) > _MOST_LINKS:
            self._linked.popitem(last=False)

    def add(
        self,
        lease: str,
        token_ids: Sequence[int],
        offer: Mapping[str, Any] | None = None,
        ended: Future[bool] | None = None,
    ) -> None:
        """Take up the answer behind a link; not behind another worker's, nor one of long ago.

        Args:
            offer: by which its KV can be read from a decode engine (`kv_transfer_params`).
            ended: see `AnswerPulls.begin`.
        """
        ended, linked = ended or Future(), self._linked.pop(lease, None)
        if linked is None:
            ended.set_result(False)
            return
        request, frame, forms = linked
        both = replace(request, token_ids=[*request.token_ids, *token_ids])
        answer = Answer(both, len(request.token_ids), frame, forms, self._pool.block_size)
        if offer is None:
            ended.set_result(False)
            self._queue(answer)
        elif not self._pulls.begin(answer, offer, ended):
            self._queue(answer)

    def poll(self) -> None:
        """End pulls whose KV has come; what failed is computed."""
        for answer in self._pulls.poll():
            self._queue(answer)

    def give_up_pulls(self) -> None:
        """Let nobody wait for pulls: the loop ends."""
        self._pulls.give_up()

    def _queue(self, answer: Answer) -> None:
        self._waiting[next(self._numbers)] = answer
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)
            self._given_up["queue"] += 1

    def forget(self, content: str, tenant: str) -> None:
        """Drop links and answers behind a deleted content."""
        for lease in [lease for lease, (request, *_) in self._linked.items() if brought(request, content, tenant)]:
            del self._linked[lease]
        for number in [number for number, answer in self._waiting.items() if brought(answer.request, content, tenant)]:
            del self._waiting[number]

    def step(self) -> None:
        """Do the next piece: at most one forward.

        Answers take turns; one whose piece fails is dropped.
        """
        number, answer = next(iter(self._waiting.items()))
        over = True
        try:
            over = self._compute(answer)
        finally:  # only now: until then it counts as work to be done
            if over:
                del self._waiting[number]
            else:
                self._waiting.move_to_end(number)

    def _compute(self, answer: Answer) -> bool:
        """Compute the next piece of an answer. True if nothing is left, or it is given up."""
        epoch, whole = self._hits.epoch, answer.tokens
        match = self._hits.match(answer.request, answer.chain, answer.frame, whole)
        if match.tokens < answer.known:
            return self._give_up("evicted")
        if match.tokens >= whole:  # also if the next turn came first
            return True
        stop = self._stop(match.tokens, whole)
        try:
            lease = self._pool.allocate(stop, readers=0, match=match)
        except PoolExhausted:
            return self._give_up("blocks")
        try:
            self._hits.copy(match, lease.blocks)
            index = torch.arange(stop)  # behind a prompt, positions are indices (`sequence.LinkSequence`)
            positions = index.expand(3, -1) if self._engine.uses_mrope else index
            tokens = torch.tensor(answer.request.token_ids[:stop], dtype=torch.int32)
            sequence = LinkSequence(tokens, positions, lease.blocks)
            logits = self._engine.forward([(sequence, [Run(match.tokens, stop)])], ends=[0])
            assert logits is not None
            if not all(are_finite(logits)):
                return self._give_up("not finite")
            self._tokens += stop - match.tokens
            computed = None if stop == whole else stop
            self._hits.index.add(lease.blocks, answer.chain, match.forms, match, answer.frame, epoch, computed)
        finally:
            self._pool.abandon(lease.id)
        return stop == whole

    def _stop(self, start: int, whole: int) -> int:
        """End of the next piece: a block's, of which only whole ones can be gone on from, or the answer's."""
        size, stop = self._pool.block_size, start + self._piece(whole - start)
        return whole if stop >= whole else min(whole, max(stop // size, start // size + 1) * size)

    def _give_up(self, reason: str) -> bool:
        self._given_up[reason] += 1
        return True
