"""Scheduler of a prefill worker: admission of links to KV blocks, and batches of forwards.

| call        | effect                                                                                            |
|-------------|---------------------------------------------------------------------------------------------------|
| `add`       | a planned link joins `waiting`                                                                    |
| `admit`     | waiting links get blocks, first come first served, and join `running`                             |
| `schedule`  | running links place the stored KV that has come in and choose tokens; a forward is put together    |
| `update`    | what that forward computed is noted; returns the links that are done                              |
| `fail`      | links end with an error and give their blocks back                                                |

Running links are computed in the order in which they are due, each some times what it takes to compute after it came:
one that links nearly all does not wait for one that computes everything, nor that one for ever. Others join the forward
of the first where that saves more waiting than it causes (see `cost_model`). A long run goes on in the next forward.

A link computes while its later chunks still load (mpic.md §3.2): up to its frontier, the first token that waits for
one, and beyond it where layers come in faster than they are needed (see `link.layerwise_load`). Which tokens a link
chooses by deviation is found out by partial forwards before (`Linker.select`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from torch import Tensor

from prefill_workers.block_index import PrefixMatch
from prefill_workers.block_pool import BlockPool, PoolExhausted
from prefill_workers.engine.sampling import are_finite, draw
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import ChunkState
from prefill_workers.link.prefix_hits import coming
from prefill_workers.protocol import NonFiniteLogits, PixelsNeeded
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.link_job import FORWARD_TOKENS, LinkJob
from prefill_workers.sequence import LinkSequence, Run, split_runs

logger = logging.getLogger(__name__)

_STRETCH = 4.0  # times what a link takes to compute, until it is due
_LEADER = 1.5  # times what it is spared, that a link waits for another to compute


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """Batch of one forward: the runs of several links, and the loads that it writes by layer.

    `ending`: indices into `work` of the links whose prompts the forward ends: their logits are checked, and a first
    answer token is drawn from them where one is wanted. `deadline` is until when the forward waits for layers
    (monotonic seconds).
    """

    work: Sequence[tuple[LinkJob, list[Run]]]
    streams: Sequence[tuple[LinkJob, LayerwiseLoad]]
    ending: Sequence[int]
    tokens: int
    deadline: float

    @property
    def jobs(self) -> list[LinkJob]:
        """Links that are computed."""
        return [job for job, _ in self.work]

    @property
    def sequences(self) -> list[tuple[LinkSequence, list[Run]]]:
        """Sequences and their runs, as an engine takes them."""
        return [(job.plan.sequence, runs) for job, runs in self.work]

    @property
    def loads(self) -> list[LayerwiseLoad]:
        """Loads that are written meanwhile, as an engine takes them."""
        return [load for _, load in self.streams]


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """Outcome of a batch: logits [ending, vocabulary] and its seconds.

    `on_device`: as a device's events tell them. It computes on while its host waits for layers that come in.
    """

    logits: Tensor | None
    seconds: float
    on_device: bool = False


class Scheduler:
    """Waiting and running links of one engine. For the loop's thread, but for `add`.

    Args:
        pool: the KV blocks of running links; blocks of those that end without a result return to it.
        cost_model: what forwards take; every forward teaches it.
        budget: tokens of one forward at most.
        streams_layers: whether the engine writes chunks layer by layer while it computes.

    Attributes:
        waiting: links without blocks, first come first; `add` and `take_cancelled` need the loop's lock.
        running: links with blocks, in the order in which they were due when a forward was last scheduled.
        forwards, forwards_by_layer, forwards_partial, tokens: see `loop_stats.LoopStats`.
        failing: turns in which the engine failed, since the last forward that did not.
    """

    def __init__(
        self, linker: Linker, pool: BlockPool, cost_model: ForwardCostModel, budget: int, *, streams_layers: bool
    ) -> None:
        self.pool, self.cost_model = pool, cost_model
        self._linker, self._budget, self._streams_layers = linker, budget, streams_layers
        self.waiting: deque[LinkJob] = deque()
        self.running: list[LinkJob] = []
        self.forwards = self.forwards_by_layer = self.forwards_partial = self.tokens = 0
        self.failing = 0
        self._turn_failed = False  # the one that the latest `schedule` began

    @property
    def has_links(self) -> bool:
        """True while any link waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def has_work(self) -> bool:
        """True if `schedule` has something to do for a running link before a load ends."""
        return any(job.is_runnable or job.plan.needs_weighing or job.plan.has_ended_loads for job in self.running)

    @property
    def tokens_left(self) -> int:
        """Tokens that forwards have still to compute, for all links."""
        return sum(job.left for job in [*self.waiting, *self.running])

    # -- waiting ------------------------------------------------------------------------------------------------------

    def add(self, job: LinkJob) -> None:
        """Queue a link, under the loop's lock."""
        self.waiting.append(job)

    def take_cancelled(self) -> list[LinkJob]:
        """Remove and return cancelled waiting links, wherever they stand.

        Under the loop's lock.
        """
        cancelled = [job for job in self.waiting if job.done.cancelled()]
        for job in cancelled:
            self.waiting.remove(job)
        return cancelled

    def refuse_waiting(self, error: Exception) -> None:
        """Raise an error to the callers of all waiting links."""
        for job in self.waiting:
            with suppress(InvalidStateError):
                job.done.set_exception(error)

    def admit(self) -> bool:
        """Give waiting links blocks, in order, while these last.

        Those that a running link spares their beginning wait for it. False if some are left without for want of blocks.
        """
        for job in [*self.waiting]:
            try:
                blocks = self.pool.blocks_for(job.room) + self.pool.blocks_for(job.compacted_room)
                match = self._linker.match(job.plan, fits=partial(self.pool.fits, blocks * self.pool.block_size))
                if self._follows(job):
                    continue
                self._allocate(job, match)
            except PoolExhausted:
                return False
            except PixelsNeeded as needed:
                self.waiting.remove(job)
                self._end(job, needed)
                continue
            self.waiting.remove(job)
            assert job.lease is not None
            job.plan.sequence.blocks = job.lease.blocks
            job.plan.took("queue", time.perf_counter() - job.submitted)
            self.running.append(job)
        return True

    def _follows(self, job: LinkJob) -> bool:
        """True if a running link computes much of what the job would, and has little else left to do."""
        known = len(job.plan.prefix_hit)

        def spares(leader: LinkJob) -> bool:
            spared = coming(leader.plan, job.plan) - known
            return spared >= FORWARD_TOKENS and leader.left <= _LEADER * spared

        return any(map(spares, self.running))

    def _allocate(self, job: LinkJob, match: PrefixMatch) -> None:
        """Give a link all blocks that it will need, or none: links that wait for a second part would never end."""
        readers, second = job.plan.request.readers, job.compacted_room
        lease = self.pool.allocate(job.room, 0 if second else readers, match)
        if second:
            try:
                job.compacted = self.pool.allocate(second, readers)
            except PoolExhausted:
                self.pool.abandon(lease.id)
                raise
        job.lease = lease

    # -- running ------------------------------------------------------------------------------------------------------

    def schedule(self) -> ForwardBatch | None:
        """Place loaded KV, choose tokens, and batch the next forward; None if none is worth it."""
        self._turn_failed = False
        self.running = sorted(self.running, key=self._due)
        self.running = [job for job in self.running if self._advance(job)]
        self._select()
        return self._batch() if any(job.is_runnable for job in self.running) else None

    def update(self, batch: ForwardBatch | None, result: ForwardResult | None) -> list[LinkJob]:
        """Note the result of a batch; None if nothing was computed, or the forward failed.

        Returns: the links that are done. They run on, and hold their blocks, until they are removed.
        """
        if batch is not None and result is not None:
            self._note(batch, result)
        return [job for job in self.running if job.plan.is_placed and not job.pending]

    def remove(self, jobs: Collection[LinkJob]) -> None:
        """Drop links that have ended."""
        self.running = [job for job in self.running if job not in jobs]

    def fail(self, jobs: Collection[LinkJob], error: Exception) -> None:
        """End links because the engine failed. Several failures of one turn count as one."""
        self.failing += not self._turn_failed
        self._turn_failed = True
        for job in jobs:
            logger.error("link %.100r failed", job.plan.request.request_id, exc_info=error)
            self._end(job, error)
        self.remove(jobs)

    def free(self, job: LinkJob) -> None:
        """Free what a link holds that ends without a result, or whose result is not wanted."""
        job.plan.unpin()
        for lease in job.leases:
            self.pool.abandon(lease.id)

    def _end(self, job: LinkJob, error: Exception) -> None:
        """Free a link and raise an error to its caller."""
        self.free(job)
        with suppress(InvalidStateError):  # cancelled
            job.done.set_exception(error)

    def _end_prompt(self, job: LinkJob, logits: Tensor, *, is_sound: bool) -> None:
        """Draw a link's first token; a link whose logits are not finite ends with an error."""
        sampling = job.plan.request.sampling
        if not is_sound:
            if self._linker.prefixes is not None:
                self._linker.prefixes.distrust(job.plan)
            self._end(job, NonFiniteLogits(job.plan.stored, is_prefix_hit=bool(job.plan.prefix_hit)))
            self.remove([job])
        elif sampling is not None:
            job.first_token = draw(logits, sampling, job.plan.sequence.token_ids)

    def _due(self, job: LinkJob) -> float:
        """Time at which a link should have been computed (`time.perf_counter`).

        Later, if its chunks turn out not to load.
        """
        return job.submitted + _STRETCH * self.cost_model.seconds(job.computed_in_all)

    def _advance(self, job: LinkJob) -> bool:
        """Place a link's loaded KV and take up the runs that this allows. False if it ends."""
        if job.done.cancelled():
            self.free(job)
            return False
        try:
            spoiled = self._linker.advance(job.plan)
            if job.lease is not None:
                self.pool.end_copying(job.lease)
            if spoiled is not None:
                job.go_back_to(spoiled)
            job.compute_up_to(job.plan.frontier)
            if job.plan.is_loading and job.may_stream and self._streams_layers:
                self._stream(job)
        except PixelsNeeded as needed:
            self._end(job, needed)
            return False
        except Exception as error:
            self.fail([job], error)
            return False
        return True

    def _select(self) -> None:
        """Let links choose tokens by deviation, once all their KV is loaded and it is their turn.

        That is when a forward would take them as well: others' first tokens need not wait for theirs.
        """
        able, turn = [job for job in self.running if job.is_runnable or job.plan.needs_weighing], list[LinkJob]()
        for behind, job in zip(reversed(range(len(able))), able, strict=True):
            tokens = sum(map(len, job.runs_to_weigh)) if job.plan.needs_weighing else job.tokens
            if not turn or self.cost_model.joins(tokens, len(turn), behind):
                turn.append(job)
        ready = [job for job in turn if job.plan.needs_weighing]
        if not ready:
            return
        try:
            self.forwards_partial += self._linker.select([(job.plan, job.runs_to_weigh) for job in ready], self._budget)
        except Exception as error:
            self.fail(ready, error)
            return
        for job in ready:
            job.compute_up_to(job.plan.frontier)

    def _stream(self, job: LinkJob) -> None:
        """Let the next forward write loading chunks, if their layers keep ahead of it."""
        loads = self._linker.layerwise_loads(job.plan)
        if not loads:
            return
        whole = len(job.plan.sequence)
        tokens = job.tokens + sum(map(len, job.plan.runs_between(job.reached, whole)))
        earlier = takewhile(lambda other: other is not job, self.running)
        ahead = [other.tokens for other in earlier if other.is_runnable]
        this_turn = not ahead or self.cost_model.joins(tokens, len(ahead), 0)
        worth_it = tokens >= FORWARD_TOKENS and this_turn and sum(ahead) + tokens <= self._budget
        if worth_it and self.cost_model.keeps_ahead(loads, tokens):
            for load in loads:
                load.chunk.begin_stream(load)
            job.streams = loads
            job.compute_up_to(whole)

    def _batch(self) -> ForwardBatch:
        """Batch the runs of the link that is due first and of those that join it, up to the budget."""
        budget = self._budget
        work: list[tuple[LinkJob, list[Run]]] = []
        streams: list[tuple[LinkJob, LayerwiseLoad]] = []
        # those that are not worth a forward of their own yet may only join
        ready = sorted((job for job in self.running if job.pending), key=lambda job: not job.is_runnable)
        for behind, job in zip(reversed(range(len(ready))), ready, strict=True):
            # what a forward writes as it comes in must be in the forward that was chosen for it
            if work and not job.streams and not self.cost_model.joins(job.tokens, len(work), behind):
                continue
            now, job.pending = split_runs(job.pending, budget)
            if now:
                work.append((job, now))
                budget -= sum(len(run) for run in now)
                streams += [(job, load) for load in job.streams]
                job.streams = []
        ending = [i for i, (job, now) in enumerate(work) if job.ends_with(now)]
        tokens = self._budget - budget
        return ForwardBatch(work, streams, ending, tokens, self.cost_model.deadline(tokens))

    def _note(self, batch: ForwardBatch, result: ForwardResult) -> None:
        """Count a forward, learn its cost, and draw first tokens.

        Loads whose layers came too late are waited for as whole chunks.
        """
        self.failing = 0
        self.forwards += 1
        self.forwards_by_layer += bool(batch.streams)
        self.tokens += batch.tokens
        computing = result.seconds - (0.0 if result.on_device else sum(load.waited for load in batch.loads))
        if batch.tokens >= FORWARD_TOKENS and not (result.on_device and batch.loads):
            self.cost_model.learn(batch.tokens, computing)
        for job, runs in batch.work:
            job.plan.took("forward", result.seconds)
            job.plan.compute_ms += computing * 1e3 * sum(map(len, runs)) / batch.tokens
            if job.pending and self._linker.prefixes is not None:
                self._linker.prefixes.keep(job.plan, job.pending[0].start)
        for job, load in batch.streams:
            if load.is_late and load.chunk.state is ChunkState.STREAMING:  # else it has failed, and was computed
                load.chunk.drop_stream()
                job.may_stream = False
                job.go_back_to(load.chunk.span.start)
        if result.logits is not None:
            for i, scores, is_sound in zip(batch.ending, result.logits, are_finite(result.logits), strict=True):
                job = batch.work[i][0]
                if job.reached < len(job.plan.sequence):  # it goes back: a layer came too late for the forward
                    continue
                if not is_sound and job.drop_streams():  # what streamed in is named once its load has ended
                    continue
                self._end_prompt(job, scores, is_sound=is_sound)
