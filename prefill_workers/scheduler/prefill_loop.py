"""The prefill loop: one thread that drives the engine.

Each turn it frees what decode engines have read, admits waiting links while blocks last, encodes a handful of images,
if there is no vision encoder that does, and runs the one forward that the scheduler puts together (see `scheduler`).
When there is no link it works off the harvest and the checks of earlier ones (see `background.idle_work`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infra.cpu import openmp
from prefill_workers.background.activity import Activity
from prefill_workers.background.idle_work import IdleWork
from prefill_workers.block_pool import BlockPool, PoolExhausted
from prefill_workers.compaction.plan import compaction_plan
from prefill_workers.engine.image_batches import Pixels
from prefill_workers.host_blocks import HostBlocks, HostStats
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import LinkPlan
from prefill_workers.modes import uses_library
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.scratch import Scratch
from prefill_workers.prefix_digests import prefix_chain
from prefill_workers.protocol import (
    CompactionRefused,
    LeaseState,
    LinkRequest,
    LinkResult,
    LoadBearing,
    Overloaded,
    PromptTooLarge,
)
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.encode_queue import EncodeQueue
from prefill_workers.scheduler.link_job import LinkJob
from prefill_workers.scheduler.link_runner import LinkRunner
from prefill_workers.scheduler.load_budget import KVLoadBudget
from prefill_workers.scheduler.loop_stats import LoopStats
from prefill_workers.scheduler.scheduler import Scheduler
from prefill_workers.sequence import LinkSequence, Run
from prefill_workers.settings import LoopLimits

logger = logging.getLogger(__name__)

_STOP_SECONDS = 30.0  # that running links have to end
_POLL_SECONDS = 0.002  # between looks for NIXL notifications while a lease is out


class PrefillLoop:
    """The engine's thread, which all calls of the engine come from.

    Args:
        harvester: keeps what finished links have computed.
        owner: of the leases; see `protocol.lease_owner`.
        cost_model: what forwards take; None: it is learnt from them.
        load_budget: what links wait for before they are submitted, which counts as waiting here; None: for nothing.
        crowded: whether the patch compiler has enough to do: then nothing is compiled ahead.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        linker: Linker,
        harvester: Harvester,
        limits: LoopLimits,
        *,
        owner: str,
        cost_model: ForwardCostModel | None = None,
        load_budget: KVLoadBudget | None = None,
        crowded: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        engine, prefixes = linker.engine, linker.prefixes
        self._engine, self._linker, self._limits = engine, linker, limits
        self._activity = Activity(limits.patience_seconds)
        last, size = engine.num_blocks, engine.block_size
        longest = -(-engine.max_model_len // size)
        spare_blocks = min(longest, (last - 1) // 4)
        index = None if prefixes is None else prefixes.index
        self._pool = BlockPool(range(1, last - spare_blocks), size, limits.lease_seconds, owner, clock, index)
        cost_model = cost_model or ForwardCostModel()
        streams_layers = engine.accepts_layerwise_kv
        self._scheduler = Scheduler(linker, self._pool, cost_model, limits.budget, streams_layers=streams_layers)
        self._load_budget = load_budget or KVLoadBudget(0, 0)  # for which nobody waits
        self._encode_queue = EncodeQueue(engine)
        scratch = Scratch(range(last - spare_blocks, last), size, self._piece)
        caches = linker.forgets.group(self.call)
        self._host: HostBlocks | None = None
        if limits.host_bytes and prefixes is not None and not engine.has_quantised_kv:
            self._host = caches.register(HostBlocks(engine, self._pool, prefixes, limits.host_bytes))
        idle_work = IdleWork(
            linker,
            harvester,
            self._pool,
            scratch,
            caches,
            limits.compiles,
            self._activity,
            clock=clock,
            crowded=crowded,
            keeps_answers=limits.keeps_answers,
            reads_answers=limits.reads_answers,
        )
        self._background = caches.register(idle_work)
        self._runner = LinkRunner(
            engine, linker, self._scheduler, self._pool, idle_work, self._activity, learns=limits.learns
        )
        self._idle_tokens = 0
        self._abandoned: deque[str] = deque()
        self._renewed: deque[str] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._expired = 0
        self._thread = threading.Thread(target=self._run, name="prefill-loop", daemon=True)

    # -- called from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.

        From here on no other may touch the engine, the calling thread neither.
        """
        openmp.release()  # the threads that took part in building the engine and measuring its pace
        self._thread.start()

    def submit(self, plan: LinkPlan) -> Future[LinkResult]:
        """Queue a plan. Cancelling the future drops the link and frees its blocks.

        The future raises PixelsNeeded when stored KV could not be loaded after all and must be computed instead, and
        NonFiniteLogits when what was linked or computed is not sound.

        Raises:
            Overloaded: too many links wait already.
            PromptTooLarge: the pool could never hold the prompt.
            CompactionRefused: the model's KV cannot be reduced.
        """
        job = LinkJob(plan, Future(), time.perf_counter(), may_stream=not plan.request.mode.is_selective)
        job.compaction = compaction_plan(plan.request, self._engine.block_size)
        if job.compaction is not None and self._engine.not_compactable is not None:
            raise CompactionRefused(f"kv_budget: {self._engine.not_compactable}")
        needed = self._pool.blocks_for(job.room)
        if needed + self._pool.blocks_for(job.compacted_room) > self._pool.total:
            job.compaction = None  # there is room for the whole KV, but not for a second one beside it
        if needed > self._pool.total:
            raise PromptTooLarge(f"the prompt needs {needed} KV blocks, the prefill worker has {self._pool.total}")
        with self._wake:
            self._refuse_beyond(len(self._scheduler.waiting))
            self._scheduler.add(job)
            self._wake.notify()
        for chunk in plan.chunks:
            if (lookup := chunk.lookup) is not None:  # the loop's thread may have taken up its end
                lookup.when_done(self._notify)
        return job.done

    def refuse_if_full(self) -> None:
        """Raise Overloaded where `submit` would.

        So that no plan begins to load what is refused later.
        """
        with self._wake:
            self._refuse_beyond(len(self._scheduler.waiting) + self._load_budget.waiting)

    def encode(self, items: Sequence[Pixels]) -> Future[list[Tensor]]:
        """Encode images between two forwards: embeddings [tokens, hidden] of each.

        A cancelled future's are not computed.

        Raises:
            Overloaded: too many calls wait already.
        """
        with self._wake:
            self._refuse_beyond(len(self._encode_queue))
            self._wake.notify()
            return self._encode_queue.add(items)

    def _refuse_beyond(self, waiting: int) -> None:
        if self._stopping:
            raise Overloaded("the prefill worker is shutting down")
        if waiting >= self._limits.max_queue:
            raise Overloaded(f"{waiting} requests wait already")

    def expect(self) -> None:
        """Leave the machine to a request that is on its way here, whose images may be encoded now."""
        self._activity.expect()

    def hasten(self, seconds: float = 1.0) -> None:
        """Harvest without waiting for a quiet time, for so long: a caller waits for it."""
        self._background.hasten(time.perf_counter() + seconds)
        self._notify()

    def renew(self, lease: str) -> LeaseState:
        """Renew a lease whose blocks are still to be pulled; returns its state as far as known."""
        with self._wake:
            self._renewed.append(lease)
            self._wake.notify()
        return self._pool.state(lease)

    def abandon(self, lease: str) -> None:
        """Free a lease's blocks: no decode engine will pull them."""
        with self._wake:
            self._abandoned.append(lease)
            self._wake.notify()

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function on the loop's thread, before its next turn.

        Raises:
            RuntimeError: the loop ends, or has ended.
        """
        done: Future[None] = Future()
        with self._wake:
            if self._stopping:
                raise RuntimeError("the prefill loop has ended")
            self._calls.append((function, done))
            self._wake.notify()
        return done

    def bring_back(self, request: LinkRequest) -> Future[None] | None:
        """Copy back what a prompt begins with and host memory has, before it is planned.

        None: it has nothing of it.

        Raises:
            RuntimeError: the loop ends, or has ended.
        """
        if self._host is None or not uses_library(request.mode):
            return None
        chain = prefix_chain(request.tenant, request.token_ids, request.chunks, self._pool.block_size)
        return self.call(partial(self._host.restore, request, chain)) if self._host.holds(chain) else None

    def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None = None) -> Future[bool]:
        """Read an answer's KV, or compute it in idle time, behind a link of late.

        Args:
            offer: of a decode engine, by which it can be read.

        Returns: True once the decode engine was told that it need not hold it any more; False if it was not.

        Raises:
            RuntimeError: the loop ends, or has ended.
        """
        ended: Future[bool] = Future()
        if not self._background.accepts_answers:
            ended.set_result(False)
            return ended

        def pass_on(called: Future[None]) -> None:
            if (error := called.exception()) is not None:
                with suppress(InvalidStateError):
                    ended.set_exception(error)

        self.call(partial(self._background.keep_answer, lease, token_ids, offer, ended)).add_done_callback(pass_on)
        return ended

    def load_bearing(self, tenant: str, request_id: str) -> LoadBearing | None:
        """Load-bearing chunks of a request that asked for them lately."""
        return self._background.load_bearing(tenant, request_id)

    def compute_one_token(self) -> Future[None]:
        """Run a forward over one token, as proof that the engine computes; nothing is kept of it.

        Raises:
            RuntimeError: the loop ends, or has ended.
        """
        return self.call(self._one_token)

    @property
    def progressed(self) -> float:
        """Time at which the engine last computed something (`time.monotonic`)."""
        return self._activity.progressed

    def cpu_seconds(self) -> float:
        """CPU time that the thread has spent; 0 where the system does not tell.

        By it a long forward on a CPU shows.
        """
        thread = self._thread.ident
        if thread is None or not self._thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread))

    def stats(self) -> LoopStats:
        """Counters and queue lengths, without stopping the loop."""
        scheduler = self._scheduler
        return LoopStats(
            waiting=len(scheduler.waiting) + self._load_budget.waiting,
            running=len(scheduler.running),
            harvest=len(self._background),
            blocks_free=self._pool.free,
            blocks_cached=self._pool.cached,
            blocks_total=self._pool.total,
            leases=self._pool.leases,
            forwards=scheduler.forwards,
            forwards_by_layer=scheduler.forwards_by_layer,
            forwards_partial=scheduler.forwards_partial,
            tokens_forwarded=scheduler.tokens,
            tokens_queued=scheduler.tokens_left + self._load_budget.tokens,
            fixed_tokens=scheduler.cost_model.cost.fixed_tokens,
            seconds_per_token=scheduler.cost_model.cost.seconds_per_token,
            leases_expired=self._expired,
            harvest_failures=self._background.failures,
            compiled=replace(
                self._background.compiled(),
                idle_tokens=self._idle_tokens,
                host=HostStats() if self._host is None else self._host.stats(),
            ),
        )

    @property
    def marks_version(self) -> int:
        """See `BlockIndex.marks`."""
        return 0 if self._linker.prefixes is None else self._linker.prefixes.index.marks_version

    def marks(self, limit: int) -> bytes:
        """Marks of the beginnings of prompts that its blocks hold; see `BlockIndex.marks`."""
        return b"" if self._linker.prefixes is None else self._linker.prefixes.index.marks(limit)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that finds room here."""
        return min(self._engine.max_model_len, self._pool.total * self._pool.block_size)

    @property
    def failing(self) -> int:
        """Failures of the engine since its last forward, of links or images, that went well."""
        return max(self._scheduler.failing, self._encode_queue.failing)

    def alive(self) -> bool:
        """True while the thread turns."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish running links, refuse waiting ones, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(_STOP_SECONDS)

    # -- the loop's thread --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except Exception as error:  # a defect: let nobody wait for ever, and let the health check see the thread end
            with self._wake:
                self._stopping = True
                self._scheduler.fail([*self._scheduler.running, *self._scheduler.waiting], error)
                self._encode_queue.refuse(error)
                self._refuse_calls()
                self._background.give_up_pulls()
            raise

    def _turn_until_stopped(self) -> None:
        gave_way = False
        while True:
            with self._wake:
                if not (self._has_work() or self._calls or self._abandoned or self._stopping):
                    # leases are read by a NIXL notification, which has no descriptor to wait on: poll while any is not
                    self._wake.wait(_POLL_SECONDS if self._pool.has_unread or self._background.is_pulling else 0.5)
                if self._stopping and not self._scheduler.running:
                    self._scheduler.refuse_waiting(Overloaded("the prefill worker is shutting down"))
                    self._encode_queue.refuse(Overloaded("the prefill worker is shutting down"))
                    self._refuse_calls()
                    return
            self._heed()
            self._background.poll_pulls()
            self._free_blocks()
            self._admit()
            if self._encode_queue and self._encode_queue.turn():
                self._activity.note_computed()
                self.expect()  # the link that they are for
            since = time.perf_counter() - self._activity.patience
            if not (gave_way and self._scheduler.running) and self._background.is_overdue(since):
                self._work_idly(self._background.step_beside_links)
                gave_way = True  # and then it is the links' turn
            elif self._scheduler.running:
                self._turn()
                gave_way = False
            elif self._scheduler.waiting:
                time.sleep(0.0005)  # no block is free: wait for a decode engine to read, without spinning
            elif self._gives_way():
                with self._wake:  # leave the machine to somebody's first token
                    if not self._scheduler.waiting:
                        self._wake.wait(_POLL_SECONDS)
            elif self._background.is_ready:
                self._work_idly(self._background.step)
            else:
                self._engine.free_ended()

    def _work_idly(self, step: Callable[[], None]) -> None:
        before = self._engine.tokens_forwarded
        step()
        self._idle_tokens += self._engine.tokens_forwarded - before
        self._activity.note_computed()

    def _one_token(self) -> None:
        try:
            lease = self._pool.allocate(1, readers=0)
        except PoolExhausted:  # of what was computed before; the loop turns
            return
        try:
            index = torch.arange(1)
            positions = index.expand(3, -1) if self._engine.uses_mrope else index
            sequence = LinkSequence(torch.zeros(1, dtype=torch.int32), positions, lease.blocks)
            self._engine.forward([(sequence, [Run(0, 1)])])
            self._engine.finish_writes()
        finally:
            self._pool.abandon(lease.id)
        self._activity.note_computed()

    def _has_work(self) -> bool:
        return self._scheduler.has_links or bool(self._encode_queue or self._background.is_ready)

    def _gives_way(self) -> bool:
        """True if background work should wait for a hand-off or a request, and no check is late."""
        activity, checks = self._activity, self._background.checks_since()
        since = time.perf_counter() - activity.patience
        if checks is not None and checks < since:
            return False
        return activity.last_expected > since or (self._pool.has_unread and activity.last_finished > since)

    def _piece(self, left: int) -> int:
        """Tokens of the next background forward, of those that are `left`."""
        rested = 0.0 if self._scheduler.has_links else time.perf_counter() - self._activity.last_request
        return min(self._scheduler.cost_model.piece(left, rested), self._limits.budget)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _heed(self) -> None:
        """Do what other threads have asked for since the last turn."""
        while self._calls:
            function, done = self._calls.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)
        while self._renewed:
            self._pool.renew(self._renewed.popleft())
        while self._abandoned:
            self._pool.abandon(self._abandoned.popleft())

    def _refuse_calls(self) -> None:
        for _, done in self._calls:
            if done.set_running_or_notify_cancel():
                done.set_exception(RuntimeError("the prefill loop has ended"))

    def _free_blocks(self) -> None:
        if not self._pool.leases:
            return
        read, wanted = self._engine.poll_handoffs(self._pool)
        for lease in read:
            self._pool.read(lease)
        for lease in [*wanted, *(lease.id for job in self._scheduler.running for lease in job.leases)]:
            self._pool.renew(lease)
        expired = self._pool.expire()
        if expired:
            self._background.drop([lease.id for lease in expired])
        unread = [lease.id for lease in expired if lease.readers]  # others waited for background work alone
        if unread:
            self._expired += len(unread)
            logger.warning("leases expired unread, blocks freed: %s", ", ".join(unread))

    def _admit(self) -> None:
        """Drop cancelled links and admit waiting ones; idle work makes room for them."""
        with self._wake:  # others add
            cancelled = self._scheduler.take_cancelled()
            self._encode_queue.drop_cancelled()
        for job in cancelled:
            job.plan.unpin()
        while not (self._stopping or self._scheduler.admit()):
            if not self._background.make_room():
                return  # blocks come free when decode engines have read theirs

    def _turn(self) -> None:
        """Run one forward of the links that are admitted, and end those that are done."""
        if not self._runner.turn():
            self._wait_for_loads()

    def _wait_for_loads(self) -> None:
        """Sleep until a load ends, if nothing can be computed before.

        Not long: leases have no event to wait for.
        """
        with self._wake:
            if self._scheduler.running and not self._scheduler.has_work:
                self._wake.wait(_POLL_SECONDS)
