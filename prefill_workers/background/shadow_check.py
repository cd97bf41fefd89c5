"""Shadow checks: exact recomputation of a share of the requests that reused KV.

Off the request path; see `prefill_workers.fidelity.monitor`.

| when                 | what                                                                                     |
|----------------------|------------------------------------------------------------------------------------------|
| a link has finished  | drawn? hold its blocks, start loading the embeddings of the chunks that it reused         |
| the engine is idle   | logits of the prompt's last tokens over the very blocks that were served; let them go     |
| the engine is idle   | an exact prefill in scratch blocks, a slice at a time; its logits of the same tokens      |
| then                 | KL and agreement of the two                                                              |

A link that comes meanwhile waits for one slice at most. What keeps a check from being made (embeddings that are gone,
blocks that somebody waits for) costs the check, never a request, and is counted by reason:

| reason     | the check was given up because                              |
|------------|-------------------------------------------------------------|
| embeddings | a reused chunk's embeddings are stored nowhere, or load too slowly |
| length     | the prompt does not fit the scratch blocks                  |
| queue      | too many checks wait already                                |
| blocks     | a link needed the blocks, or their lease ended              |
| failed     | a forward failed                                            |
| allowed    | an operator allowed its point again since its request was served |
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvstore.library import Library
from kvstore.records.record import EmbeddingRecord
from kvstore.tiers.loading import Loading
from prefill_workers.block_pool import BlockPool
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.fidelity.monitor import Fidelity, compare
from prefill_workers.link.plan import LinkPlan
from prefill_workers.modes import OperatingPoint
from prefill_workers.patches.scratch import Scratch
from prefill_workers.sequence import Embedded, LinkSequence, Run, split_runs

logger = logging.getLogger(__name__)

_MAX_CHECKS = 8  # that wait; each may hold a sequence's blocks and its embeddings


@dataclass(eq=False)
class _Check:
    plan: LinkPlan
    points: tuple[OperatingPoint, ...]
    loads: dict[int, Loading]  # embeddings, by chunk index
    tail: list[Run]  # the tokens that are compared, a run each
    lease: str | None  # whose blocks it holds; None: no more
    since: float = field(default_factory=time.perf_counter)
    served: Tensor | None = None  # [tail, vocabulary]
    exact: LinkSequence | None = None
    pending: list[Run] = field(default_factory=list)  # what the exact prefill has yet to compute before the tail


class ShadowChecks:
    """Checks that wait or are under way. Belongs to the prefill loop's thread.

    Args:
        scratch: where its sequences lie. Between `step`s, while `is_running`, it is the check's own.
    """

    def __init__(
        self, engine: PrefillEngine, library: Library, fidelity: Fidelity, pool: BlockPool, scratch: Scratch
    ) -> None:
        self._engine, self._library, self._fidelity = engine, library, fidelity
        self._pool, self._scratch = pool, scratch
        self._queue: deque[_Check] = deque()

    def __len__(self) -> int:
        """Checks left."""
        return len(self._queue)

    @property
    def is_running(self) -> bool:
        """True if a check uses the scratch blocks."""
        return bool(self._queue) and self._queue[0].exact is not None

    @property
    def is_ready(self) -> bool:
        """True if the next check's embeddings are there, or are waited for no longer."""
        if not self._queue:
            return False
        check = self._queue[0]
        waited = time.perf_counter() - check.since > self._library.settings.load_timeout_s
        return waited or all(load.done() for load in check.loads.values())

    def waits_since(self) -> float | None:
        """Time at which the oldest check with blocks was queued (`time.perf_counter`), or None."""
        return next((check.since for check in self._queue if check.lease is not None), None)

    def offer(self, plan: LinkPlan, lease: str) -> None:
        """Take up a finished link with the configured chance, and hold its blocks."""
        kept = () if plan.session is None else plan.session.approximate
        points = self._fidelity.draw([*(chunk.made_at for chunk in plan.chunks), *kept])
        if not points:
            return
        if len(plan.sequence) > self._scratch.tokens:
            self._fidelity.skip(points, "length")
        elif len(self._queue) >= _MAX_CHECKS:
            self._fidelity.skip(points, "queue")
        else:
            tail = compared(plan, self._fidelity.settings.tokens)
            try:
                check = _Check(plan, points, self._loads(plan), tail, lease)
            except Exception as error:
                self._give_up(points, error)
                return
            self._pool.hold(lease)
            self._queue.append(check)

    def step(self) -> None:
        """Do the next part of the first check: at most one forward over a slice."""
        check = self._queue[0]
        try:
            over = self._advance(check)
        except Exception as error:
            self._give_up(check.points, error)
            over = True
        if over:
            self._let_go(check)
            self._queue.popleft()

    def make_room(self) -> bool:
        """Give up checks until a block comes free that somebody waits for. Returns whether any did."""
        before = self._pool.free
        for check in list(self._queue):
            if check.lease is None or not self._pool.comes_free(check.lease):
                continue
            self._let_go(check)
            self._remove(check)
            if self._pool.free > before:
                return True
        return False

    def drop(self, leases: Collection[str]) -> None:
        """Give up the checks whose blocks are gone because their leases have ended."""
        for check in [check for check in self._queue if check.lease in leases]:
            self._remove(check)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _loads(self, plan: LinkPlan) -> dict[int, Loading]:
        """Start loading the embeddings that an exact prefill needs and the plan does not have."""
        loads = {}
        for i, chunk in enumerate(plan.chunks):
            if chunk.is_missing_embeddings:
                key = self._engine.embedding_key(chunk.span.content)
                loads[i] = self._library.load("embedding", key, chunk.keys.owner)
        return loads

    def _advance(self, check: _Check) -> bool:
        """The next part of a check; True when it is over."""
        if check.exact is None:
            embedded = _embedded(check)
            if embedded is None:
                self._fidelity.skip(check.points, "embeddings")
                return True
            whole = check.plan.sequence
            check.served = self._served(check, embedded)
            self._let_go(check)
            check.exact = LinkSequence(whole.token_ids, whole.positions, self._scratch.blocks, embedded)
            check.pending = split_runs([Run(0, len(whole))], check.tail[0].start)[0]
            return False
        now, check.pending = self._scratch.split(check.pending)
        if check.pending:
            self._engine.forward([(check.exact, now)])
            return False
        exact = self._engine.logits([(check.exact, [*now, *check.tail])])[-len(check.tail) :]
        assert check.served is not None
        self._fidelity.record(check.points, compare(exact, check.served), check.since)
        return True

    def _served(self, check: _Check, embedded: Sequence[Embedded]) -> Tensor:
        """Logits [tail, vocabulary] over the served KV.

        A forward writes the KV of what it computes. Decode engines may be reading the served blocks: those in which the
        tail lies are copied, the others are only attended to.
        """
        whole, size = check.plan.sequence, self._pool.block_size
        first = check.tail[0].start
        kept = first // size
        blocks = [*whole.blocks[:kept], *self._scratch.blocks[: len(whole.blocks) - kept]]
        if first % size:
            kv = self._engine.read_kv(whole.blocks, kept * size, first % size)
            self._engine.write_kv(kv, self._engine.slots(blocks, kept * size, first))
        copy = LinkSequence(whole.token_ids, whole.positions, blocks, embedded)
        return self._engine.logits([(copy, check.tail)])

    def _give_up(self, points: Sequence[OperatingPoint], error: Exception) -> None:
        self._fidelity.skip(points, "failed")
        logger.warning("a request's fidelity could not be checked: %s", error)

    def _remove(self, check: _Check) -> None:
        self._fidelity.skip(check.points, "blocks")
        self._queue.remove(check)

    def _let_go(self, check: _Check) -> None:
        if check.lease is not None:
            self._pool.unhold(check.lease)
            check.lease = None


def compared(plan: LinkPlan, tokens: int) -> list[Run]:
    """The tokens whose next-token distributions are compared, a run each.

    The prompt's last `tokens`, as far as they stand behind the last chunk and so were computed over everything reused;
    the last one in any case, because a decode engine computes it anew.
    """
    n = len(plan.sequence)
    behind = max((chunk.span.stop for chunk in plan.chunks), default=0)
    return [Run(token, token + 1) for token in range(min(max(behind, n - tokens), n - 1), n)]


def _embedded(check: _Check) -> tuple[Embedded, ...] | None:
    """Embeddings of all chunks, in prompt order; None if some are not to be had or do not fit."""
    embedded = []
    for i, chunk in enumerate(check.plan.chunks):
        embeddings, load = chunk.embeddings, check.loads.get(i)
        if load is not None:
            record = load.result() if load.done() else None
            if not isinstance(record, EmbeddingRecord) or len(record.embeddings) != chunk.span.embedded:
                return None
            embeddings = record.embeddings
        if embeddings is not None:
            embedded.append(Embedded(chunk.span.first, embeddings, chunk.span.is_embed))
    return tuple(embedded)
