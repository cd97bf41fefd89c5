"""Load-bearing chunks: next-token loss without a chunk, or without its conditioning.

The disposability test of kamera.md App. E, asked for by `orbit.load_bearing`, in idle time. Each row is a sequence in
which the chunks are given as they were linked, but for one, and all text behind the first chunk is computed over them:

| row       | the chunk in question                                                              |
|-----------|------------------------------------------------------------------------------------|
| as linked | as it was linked; what the others are compared with                                |
| patch off | its canonical KV, relocated to where it stands                                     |
| left out  | not there; what stands behind it is relocated by R(δ), as survivors of a window are |

Of rows that fit the scratch blocks together one forward computes all, in pieces like other idle work. The link's blocks
are held until the first piece has read them.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infra.groups import within
from kvstore.library import Library
from prefill_workers.background.brought import brought
from prefill_workers.block_pool import BlockPool
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.fidelity.monitor import compare
from prefill_workers.link.place_kv import PlacedChunk, write_chunks
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import uses_library
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.scratch import Pieces, ResumableTask, Scratch, aside
from prefill_workers.protocol import ChunkLoss, LoadBearing, LoadBearingState, Loss
from prefill_workers.sequence import LinkSequence, Run, complement, split_work

logger = logging.getLogger(__name__)

_MOST_WAITING = 16  # each holds a sequence's blocks
_MOST_KNOWN = 1024  # answers whose measurement is remembered

Name = tuple[str, str]  # tenant, request id


@dataclass(eq=False)
class _Check:
    plan: LinkPlan
    lease: str | None  # whose blocks it holds; None: no more

    @property
    def name(self) -> Name:
        return self.plan.request.tenant, self.plan.request.request_id


@dataclass(frozen=True, eq=False)
class Row:
    """Prompt with one chunk changed: tokens, positions, and the KV that is given."""

    token_ids: Tensor  # [n] int32
    positions: Tensor  # [n] or [3, n] int64
    given: Sequence[PlacedChunk]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def runs(self) -> list[Run]:
        """Tokens that are not given."""
        return complement([one.run for one in self.given], len(self))

    def sequence(self, blocks: Sequence[int]) -> LinkSequence:
        """The row as the engine takes it; what is computed of it is text."""
        return LinkSequence(self.token_ids, self.positions, blocks)


class LoadBearingChecks:
    """Measurements that wait or are under way, and those made.

    Belongs to the prefill loop's thread, but for `get`.

    Args:
        scratch: where its sequences lie. Between `step`s of one that `is_running` it is the measurement's own.
    """

    def __init__(
        self, engine: PrefillEngine, library: Library, harvester: Harvester, pool: BlockPool, scratch: Scratch
    ) -> None:
        self._engine, self._library, self._harvester = engine, library, harvester
        self._pool, self._scratch = pool, scratch
        self._queue: deque[_Check] = deque()
        self._task: tuple[_Check, ResumableTask[tuple[ChunkLoss, ...]]] | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[Name, LoadBearing] = OrderedDict()  # asked for last at the end
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="load-bearing-ask")

    def __len__(self) -> int:
        """Measurements left."""
        return len(self._queue) + (self._task is not None)

    @property
    def is_running(self) -> bool:
        """True if a measurement uses the scratch blocks."""
        return self._task is not None

    def get(self, tenant: str, request_id: str) -> LoadBearing | None:
        """Measurement of a tenant's request; None: it did not ask, or long ago.

        From any thread.
        """
        with self._lock:
            return self._known.get((tenant, request_id))

    def offer(self, plan: LinkPlan, lease: str) -> None:
        """Take up a finished link that asked for it, and hold its blocks."""
        if not plan.request.load_bearing:
            return
        check = _Check(plan, lease)
        self._note(check, LoadBearing(plan.request.request_id))
        spans = [chunk.span for chunk in plan.chunks]
        if not spans:
            self._skip(check, "the prompt has no images or documents")
        elif spans[-1].stop == len(plan.sequence):
            self._skip(check, "no text stands behind the last chunk")
        elif len(plan.sequence) > self._scratch.tokens:
            self._skip(check, f"the prompt is longer than {self._scratch.tokens} tokens, all that idle time has")
        elif len(self._queue) >= _MOST_WAITING:
            self._skip(check, "too many answers wait to be measured")
        else:
            self._pool.hold(lease)
            self._queue.append(check)

    def step(self) -> None:
        """Do the next piece: at most one forward."""
        if self._task is None:
            check = self._queue.popleft()
            self._task = check, ResumableTask(self._measure(check))
        check, task = self._task
        over = True
        try:
            over = task.go_on()
            if over:
                measured = LoadBearingState.MEASURED
                self._note(check, LoadBearing(check.name[1], measured, chunks=task.result))
        except Exception as error:
            logger.warning("request %.100r: its load-bearing chunks could not be told: %s", check.name[1], error)
            self._skip(check, "it could not be computed")
        finally:
            if over:
                self._let_go(check)
                self._task = None

    def make_room(self) -> bool:
        """Give up measurements until a block comes free that somebody waits for.

        Returns whether any did.
        """
        before = self._pool.free
        for check in list(self._queue):
            if check.lease is None or not self._pool.comes_free(check.lease):
                continue
            self._queue.remove(check)
            self._let_go(check)
            self._skip(check, "a request needed its KV blocks")
            if self._pool.free > before:
                return True
        return False

    def drop(self, leases: Collection[str]) -> None:
        """Give up the measurements whose blocks are gone because their leases have ended."""
        for check in [check for check in self._queue if check.lease in leases]:
            self._queue.remove(check)
            self._skip(check, "its KV blocks' lease ended")

    def forget(self, content: str, tenant: str) -> None:
        """Measure nothing more of links that brought a deleted content."""
        for check in [check for check in self._queue if brought(check.plan.request, content, tenant)]:
            self._queue.remove(check)
            self._let_go(check)
            self._skip(check, "a chunk of it was deleted")
        if self._task is not None and brought(self._task[0].plan.request, content, tenant):
            self._skip(self._task[0], "a chunk of it was deleted")
            self._task = None  # its first piece has let go of the blocks

    # -- inside -------------------------------------------------------------------------------------------------------

    def _note(self, check: _Check, found: LoadBearing) -> None:
        with self._lock:
            self._known[check.name] = found
            self._known.move_to_end(check.name)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _skip(self, check: _Check, reason: str) -> None:
        self._note(check, LoadBearing(check.name[1], LoadBearingState.SKIPPED, reason))

    def _let_go(self, check: _Check) -> None:
        if check.lease is not None:
            self._pool.unhold(check.lease)
            check.lease = None

    def _measure(self, check: _Check) -> Pieces[tuple[ChunkLoss, ...]]:
        """Losses of all chunks of a link. The first piece reads its blocks, and lets go of them."""
        plan = check.plan
        try:
            kv = self._engine.read_kv(plan.sequence.blocks, 0, plan.chunks[-1].span.stop)
        finally:
            self._let_go(check)
        yield
        rows = [as_linked(plan, kv)]
        canonicals: list[Tensor | None] = []
        for i, chunk in enumerate(plan.chunks):
            canonicals.append((yield from self._canonical(plan, chunk)))
            if (canonical := canonicals[-1]) is not None:
                rows.append(with_patch_off(plan, kv, i, canonical))
        rows += [left_out(plan, kv, i) for i in range(len(plan.chunks))]
        logits: list[Tensor] = []
        for group in within(len(self._scratch.blocks), rows, self._blocks):
            logits += yield from self._logits(group)
        as_it_was, *others = logits
        losses = iter([_loss(as_it_was, other) for other in others])
        off = [None if canonical is None else next(losses) for canonical in canonicals]
        return tuple(
            ChunkLoss(len(chunk.span), chunk.outcome.operating_point, patch_off, next(losses))
            for chunk, patch_off in zip(plan.chunks, off, strict=True)
        )

    def _canonical(self, plan: LinkPlan, chunk: ChunkPlan) -> Pieces[Tensor | None]:
        """KV(B|∅) of a chunk [layers, tokens, features], stored or computed; None without its embeddings."""
        layout = self._engine.layout
        if uses_library(plan.request.mode):
            record = yield from aside(self._asking, self._library.get_canonical, chunk.keys.canonical, chunk.keys.owner)
            if record is not None and record.layout == layout and record.kv.shape[1] == len(chunk.span):
                return record.kv
        if chunk.is_missing_embeddings:
            return None
        lone = self._harvester.lone(plan, chunk, self._scratch.blocks)
        yield from self._scratch.compute(self._engine, lone)
        yield  # the next piece may be a forward, too
        return self._engine.read_kv(self._scratch.blocks, 0, len(lone))

    def _blocks(self, row: Row) -> int:
        return -(-len(row) // self._scratch.block_size)

    def _logits(self, group: Sequence[Row]) -> Pieces[list[Tensor]]:
        """Next-token logits [vocabulary] fp32 behind each row of a group."""
        work: list[tuple[LinkSequence, list[Run]]] = []
        used = 0
        for row in group:
            blocks = self._scratch.blocks[used : used + self._blocks(row)]
            used += len(blocks)
            for one in row.given:  # a piece each: a window's KV may be gigabytes
                write_chunks(self._engine, blocks, [one])
                yield
            work.append((row.sequence(blocks), row.runs))
        sequences, found = [sequence for sequence, _ in work], dict[int, Tensor]()
        while work:
            left = sum(len(run) for _, runs in work for run in runs)
            now, work = split_work(work, self._scratch.piece(left))
            ends = [i for i, (sequence, runs) in enumerate(now) if runs[-1].stop == len(sequence)]
            logits = self._engine.forward(now, ends=ends)
            found |= zip((id(now[i][0]) for i in ends), () if logits is None else logits, strict=True)
            yield
        return [found[id(sequence)] for sequence in sequences]


def as_linked(plan: LinkPlan, kv: Tensor) -> Row:
    """The prompt whose chunks are as they were linked.

    `kv`: of the prompt up to its last chunk's end, [layers, tokens, features].
    """
    whole, first = plan.sequence, plan.chunks[0].span.start
    head = [PlacedChunk(kv[:, :first], None, 0, Run(0, first))] if first else []
    spans = [Run(chunk.span.start, chunk.span.stop) for chunk in plan.chunks]
    given = [PlacedChunk(kv[:, run.start : run.stop], None, 0, run) for run in spans]
    return Row(whole.token_ids, whole.positions, [*head, *given])


def with_patch_off(plan: LinkPlan, kv: Tensor, index: int, canonical: Tensor) -> Row:
    """The prompt with a chunk's canonical KV in its place."""
    row, chunk = as_linked(plan, kv), plan.chunks[index]
    run = Run(chunk.span.start, chunk.span.stop)
    off = PlacedChunk(canonical, None, chunk.start_position, run)
    return replace(row, given=[off if one.run == run else one for one in row.given])


def left_out(plan: LinkPlan, kv: Tensor, index: int) -> Row:
    """The prompt without a chunk: what stood behind it follows what stood before it."""
    row, span = as_linked(plan, kv), plan.chunks[index].span
    first = row.positions.reshape(-1, len(row))[0]
    shift = int(first[span.stop] - first[span.start])
    given = [
        one
        if one.run.stop <= span.start
        else one._replace(position=-shift, run=Run(one.run.start - len(span), one.run.stop - len(span)))
        for one in row.given
        if one.run.start != span.start
    ]
    before, behind = slice(span.start), slice(span.stop, None)
    return Row(
        torch.cat([row.token_ids[before], row.token_ids[behind]]),
        torch.cat([row.positions[..., before], row.positions[..., behind] - shift], -1),
        given,
    )


def _loss(as_linked: Tensor, changed: Tensor) -> Loss:
    """Loss by the next-token logits [vocabulary]. Raises RuntimeError if the link's make no distribution."""
    found = compare(as_linked[None], changed[None])
    return Loss(found.kl, not found.agrees)
