"""The prefill loop: one thread that drives the engine.

Each turn it frees what decode engines have read, admits waiting links while blocks last, places the chunks whose loads
have ended, and runs ONE forward, up to a token budget; a long run goes on in the next turn. Links are computed in the
order in which they are due, each some times what it takes to compute after it came: one that links nearly all does not
wait for one that computes everything, nor that one for ever. Others join the forward of the first where that saves more
waiting than it causes (see `pace`).

A link computes while its later chunks still load (mpic.md §3.2): up to its frontier, the first token that waits for
one, and beyond it where layers come in faster than they are needed (see `arriving`). Which tokens a link chooses by
deviation is found out by partial forwards before (`Linker.select`). When there is no link the loop works off the
harvest and the checks of earlier ones (see `background`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

import torch

from prefill_workers.ahead import CompileStats
from prefill_workers.arriving import Arriving
from prefill_workers.background import Background
from prefill_workers.engine import PrefillEngine
from prefill_workers.handoff import BlockPool, PoolExhausted
from prefill_workers.job import FORWARD_TOKENS, LinkJob, LinkResult
from prefill_workers.linker import Linker
from prefill_workers.pace import Pace
from prefill_workers.plan import LinkPlan, PixelsNeeded
from prefill_workers.recheck import Rechecks
from prefill_workers.scratch import Scratch
from prefill_workers.sequence import Run, split_runs
from prefill_workers.settings import CompileLimits

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.002  # between looks for NIXL notifications while a lease is out
_STRETCH = 4.0  # times what a link takes to compute, until it is due


class Overloaded(RuntimeError):
    """The queue of waiting links is full."""


class PromptTooLarge(ValueError):
    """The prompt needs more KV blocks than the whole pool has."""


@dataclass(frozen=True)
class LoopStats:
    """A snapshot of the loop, for health, metrics and tests."""

    waiting: int
    running: int
    harvest: int
    blocks_free: int
    blocks_total: int
    leases: int
    forwards: int
    forwards_by_layer: int  # of these: beside loads that kept ahead of them
    forwards_partial: int  # besides these: to choose tokens by how far their KV deviates
    tokens_forwarded: int
    tokens_queued: int  # that waiting and running links have still to compute
    fixed_tokens: float  # that a forward costs besides, whatever it computes
    seconds_per_token: float | None  # that every token adds to a forward; None: not known yet
    leases_expired: int
    harvest_failures: int
    compiled: CompileStats


class PrefillLoop:
    """Owns the engine's thread.

    Args:
        budget: tokens of one forward at most.
        max_queue: links that may wait; more are refused with `Overloaded`.
        form: whether computed chunks are kept (canonical KV, patches) in the background.
        patience_seconds: how long background work gives way to hand-offs of links that have finished, and to requests
            that are on their way.
        compiles: how much is compiled in the background ahead of requests; None: the defaults of `CompileLimits`.
        pace: what forwards take; None: it is learnt from them.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        linker: Linker,
        *,
        budget: int,
        max_queue: int,
        lease_seconds: float,
        owner: str,
        form: bool = True,
        compiles: CompileLimits | None = None,
        patience_seconds: float = 0.5,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._linker = engine, linker
        self._budget, self._max_queue, self._form = budget, max_queue, form
        last = engine.num_blocks
        longest = -(-engine.max_model_len // engine.block_size)
        scratch = min(longest, (last - 1) // 4)
        self._pool = BlockPool(range(1, last - scratch), engine.block_size, lease_seconds, owner, clock)
        self._waiting: deque[LinkJob] = deque()
        self._running: list[LinkJob] = []
        self._pace = pace or Pace()
        spare = Scratch(range(last - scratch, last), engine.block_size, self._piece)
        rechecks = Rechecks(engine, linker.library, linker.fidelity, self._pool, spare)
        self._background = Background(
            linker.harvester,
            self._pool,
            spare,
            compiles or CompileLimits(),
            rechecks,
            clock,
            disturbed=self._disturbed,
            rest=patience_seconds,
        )
        self._patience = patience_seconds
        self._last_finished = self._last_expected = -patience_seconds
        self._abandoned: deque[str] = deque()
        self._forgotten: deque[tuple[str, str]] = deque()  # content, tenant
        self._wake = threading.Condition()
        self._stopping = False
        self._forwards = self._by_layer = self._partial = self._tokens = self._expired = 0
        self._thread = threading.Thread(target=self._run, name="prefill-loop", daemon=True)

    # -- called from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. From here on nobody else may touch the engine."""
        self._thread.start()

    def submit(self, plan: LinkPlan) -> Future[LinkResult]:
        """Queue a plan. Cancelling the future drops the link and frees its blocks.

        The future raises PixelsNeeded when stored KV could not be loaded after all and must be computed instead.

        Raises:
            Overloaded: too many links wait already.
            PromptTooLarge: the pool could never hold the prompt.
        """
        needed = self._pool.blocks_for(len(plan.sequence))
        if needed > self._pool.total:
            raise PromptTooLarge(f"the prompt needs {needed} KV blocks, the prefill worker has {self._pool.total}")
        job = LinkJob(plan, Future(), time.perf_counter(), by_layer=not plan.request.mode.selects)
        with self._wake:
            if self._stopping:
                raise Overloaded("the prefill worker is shutting down")
            if len(self._waiting) >= self._max_queue:
                raise Overloaded(f"{len(self._waiting)} links wait already")
            self._waiting.append(job)
            self._wake.notify()
        for chunk in plan.chunks:
            if chunk.loading is not None:
                chunk.loading.when_done(self._notify)
        return job.done

    def expect(self) -> None:
        """A request is on its way here, its images perhaps being encoded: leave it the machine."""
        self._last_expected = time.perf_counter()

    def hasten(self, seconds: float = 1.0) -> None:
        """Somebody waits for what was learnt: for so long, keep what was seen once without waiting for a quiet time."""
        self._background.hasten(time.perf_counter() + seconds)
        self._notify()

    def abandon(self, lease: str) -> None:
        """Nobody will pull this lease's blocks after all."""
        with self._wake:
            self._abandoned.append(lease)
            self._wake.notify()

    def forget(self, content: str, tenant: str) -> None:
        """A content was deleted: keep and compile nothing more of it."""
        with self._wake:
            self._forgotten.append((content, tenant))
            self._wake.notify()

    def stats(self) -> LoopStats:
        """Counters and queue lengths, without stopping the loop."""
        return LoopStats(
            waiting=len(self._waiting),
            running=len(self._running),
            harvest=len(self._background),
            blocks_free=self._pool.free,
            blocks_total=self._pool.total,
            leases=self._pool.leases,
            forwards=self._forwards,
            forwards_by_layer=self._by_layer,
            forwards_partial=self._partial,
            tokens_forwarded=self._tokens,
            tokens_queued=sum(job.left for job in [*self._waiting, *self._running]),
            fixed_tokens=self._pace.fixed,
            seconds_per_token=self._pace.seconds_per_token,
            leases_expired=self._expired,
            harvest_failures=self._background.failures,
            compiled=self._background.compiled(),
        )

    def alive(self) -> bool:
        """Whether the thread still turns."""
        return self._thread.is_alive()

    def stop(self, timeout: float = 30.0) -> None:
        """Finish running links, refuse waiting ones, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    # -- the loop's thread --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except Exception as error:  # a defect: let nobody wait for ever, and let the health check see the thread end
            with self._wake:
                self._stopping = True
                for job in [*self._running, *self._waiting]:
                    self._fail(job, error)
            raise

    def _turn_until_stopped(self) -> None:
        pressed = False
        while True:
            with self._wake:
                if not (self._has_work() or self._abandoned or self._stopping):
                    # leases are read by a NIXL notification, which has no descriptor to wait on: poll while any is not
                    self._wake.wait(_POLL_SECONDS if self._pool.unread else 0.5)
                if self._stopping and not self._running:
                    for job in self._waiting:
                        with suppress(InvalidStateError):
                            job.done.set_exception(Overloaded("the prefill worker is shutting down"))
                    return
            self._free_blocks()
            self._admit()
            if not (pressed and self._running) and self._background.presses(time.perf_counter() - self._patience):
                self._background.press()
                pressed = True  # and then it is the links' turn
            elif self._running:
                self._step()
                pressed = False
            elif self._waiting:
                time.sleep(0.0005)  # no block is free: wait for a decode engine to read, without spinning
            elif self._gives_way():
                with self._wake:  # leave the machine to somebody's first token
                    if not self._waiting:
                        self._wake.wait(_POLL_SECONDS)
            elif self._background.ready:
                self._background.step()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._background.ready)

    def _gives_way(self) -> bool:
        """Whether background work should wait: a hand-off or a request is on its way, and no check is late."""
        since, checks = time.perf_counter() - self._patience, self._background.checks_since()
        if checks is not None and checks < since:
            return False
        return self._last_expected > since or (self._pool.unread and self._last_finished > since)

    def _disturbed(self) -> float:
        """When a request came last, or got what it came for (`time.perf_counter`)."""
        return max(self._last_expected, self._last_finished)

    def _piece(self) -> int:
        """Tokens that one forward of background work may compute now."""
        return min(self._pace.piece(time.perf_counter() - self._disturbed()), self._budget)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _free_blocks(self) -> None:
        while self._forgotten:
            content, tenant = self._forgotten.popleft()
            self._linker.forget(tenant)
            self._background.forget(content, tenant)
        while self._abandoned:
            self._pool.abandon(self._abandoned.popleft())
        if not self._pool.leases:
            return
        read, wanted = self._engine.poll_handoffs()
        for lease in read:
            self._pool.read(lease)
        for lease in [*wanted, *(job.lease.id for job in self._running if job.lease is not None)]:
            self._pool.renew(lease)
        expired = self._pool.expire()
        if expired:
            self._background.drop([lease.id for lease in expired])
        unread = [lease.id for lease in expired if lease.readers]  # others waited for background work alone
        if unread:
            self._expired += len(unread)
            logger.warning("leases expired unread, blocks freed: %s", ", ".join(unread))

    def _admit(self) -> None:
        while self._waiting and not self._stopping:
            job = self._waiting[0]
            if job.done.cancelled():
                self._waiting.popleft()
                continue
            try:
                job.lease = self._pool.allocate(len(job.plan.sequence), job.plan.request.readers)
            except PoolExhausted:
                if self._background.make_room():
                    continue
                return  # blocks come free when decode engines have read theirs
            self._waiting.popleft()
            job.plan.sequence.blocks = job.lease.blocks
            job.plan.stages_ms["queue"] = (time.perf_counter() - job.submitted) * 1e3
            self._running.append(job)

    def _step(self) -> None:
        self._running = sorted(self._running, key=self._due)
        self._running = [job for job in self._running if self._advance(job)]
        self._select()
        if any(job.computes for job in self._running):
            self._forward()
        finished = [job for job in self._running if job.plan.settled and not job.pending]
        if not finished:
            self._wait_for_loads()
        for job in finished:
            self._finish(job)
        self._running = [job for job in self._running if job not in finished]  # only now: a defect fails these too

    def _due(self, job: LinkJob) -> float:
        """When a link should have been computed (`time.perf_counter`); later, if its chunks turn out not to load."""
        return job.submitted + _STRETCH * self._pace.seconds(job.computed_in_all)

    def _advance(self, job: LinkJob) -> bool:
        """Place what has been loaded for a link, and take up the runs that may be computed then. False if it ends."""
        if job.done.cancelled():
            self._free(job)
            return False
        try:
            spoiled = self._linker.advance(job.plan)
            if spoiled is not None:
                job.go_back_to(spoiled)
            job.compute_up_to(job.plan.frontier)
            if job.plan.loads and job.by_layer and self._engine.takes_arriving:
                self._take_up_arriving(job)
        except PixelsNeeded as needed:
            self._free(job)
            with suppress(InvalidStateError):
                job.done.set_exception(needed)
            return False
        except Exception as error:
            self._fail(job, error)
            return False
        return True

    def _select(self) -> None:
        """Choose the tokens of links that measure deviations, once all that they link is loaded, and it is their turn.

        That is when a forward would take them as well: others' first tokens need not wait for theirs.
        """
        able, turn = [job for job in self._running if job.computes or job.plan.measures], list[LinkJob]()
        for behind, job in zip(reversed(range(len(able))), able, strict=True):
            tokens = sum(map(len, job.to_measure)) if job.plan.measures else job.tokens
            if not turn or self._pace.joins(tokens, len(turn), behind):
                turn.append(job)
        ready = [job for job in turn if job.plan.measures]
        if not ready:
            return
        try:
            self._partial += self._linker.select([(job.plan, job.to_measure) for job in ready], self._budget)
        except Exception as error:
            for job in ready:
                self._fail(job, error)
            self._running = [job for job in self._running if job not in ready]
            return
        for job in ready:
            job.compute_up_to(job.plan.frontier)

    def _take_up_arriving(self, job: LinkJob) -> None:
        """Let this turn's forward write the chunks that are coming in, if their layers keep ahead of it."""
        arriving = self._linker.arriving(job.plan)
        if not arriving:
            return
        whole = len(job.plan.sequence)
        tokens = job.tokens + sum(map(len, job.plan.runs_between(job.reached, whole)))
        earlier = takewhile(lambda other: other is not job, self._running)
        ahead = [other.tokens for other in earlier if other.computes]
        this_turn = not ahead or self._pace.joins(tokens, len(ahead), 0)
        worth_it = tokens >= FORWARD_TOKENS and this_turn and sum(ahead) + tokens <= self._budget
        if worth_it and self._pace.keeps_ahead(arriving, tokens):
            for chunk in arriving:
                chunk.chunk.written = chunk
            job.arriving = arriving
            job.compute_up_to(whole)

    def _forward(self) -> None:
        """One forward over what the link that is due first can compute, and those that join it, up to the budget."""
        began, budget = time.perf_counter(), self._budget
        work: list[tuple[LinkJob, list[Run]]] = []
        arriving: list[tuple[LinkJob, Arriving]] = []
        # those that are not worth a forward of their own yet may only join
        ready = sorted((job for job in self._running if job.pending), key=lambda job: not job.computes)
        for behind, job in zip(reversed(range(len(ready))), ready, strict=True):
            # what a forward writes as it comes in must be in the forward that was chosen for it
            if work and not job.arriving and not self._pace.joins(job.tokens, len(work), behind):
                continue
            now, job.pending = split_runs(job.pending, budget)
            if now:
                work.append((job, now))
                budget -= sum(len(run) for run in now)
                arriving += [(job, chunk) for chunk in job.arriving]
                job.arriving = []
        tokens = self._budget - budget
        try:
            self._engine.forward(
                [(job.plan.sequence, runs) for job, runs in work],
                [chunk for _, chunk in arriving],
                self._pace.deadline(tokens),
            )
        except Exception as error:
            for job in self._running:
                self._fail(job, error)
            self._running.clear()
            return
        self._forwards += 1
        self._by_layer += bool(arriving)
        self._tokens += tokens
        spent = time.perf_counter() - began
        if tokens >= FORWARD_TOKENS:
            self._pace.learn(tokens, spent - sum(chunk.waited for _, chunk in arriving))
        for job, _ in work:
            job.plan.stages_ms["forward"] = job.plan.stages_ms.get("forward", 0.0) + spent * 1e3
        for job, late in ((job, chunk.chunk) for job, chunk in arriving if chunk.late):
            late.written, job.by_layer = None, False
            job.go_back_to(late.span.start)

    def _wait_for_loads(self) -> None:
        """Sleep until a load ends, if nothing can be computed before; not long, leases have no event to wait for."""
        with self._wake:
            if self._running and not any(map(self._goes_on, self._running)):
                self._wake.wait(_POLL_SECONDS)

    @staticmethod
    def _goes_on(job: LinkJob) -> bool:
        """Whether the next turn has something to do for a link."""
        return job.computes or job.plan.measures or job.plan.has_news

    def _finish(self, job: LinkJob) -> None:
        assert job.lease is not None
        plan = job.plan
        self._last_finished = time.perf_counter()
        if self._form:
            self._background.add(plan, job.lease.id)
        self._background.check(plan, job.lease.id)
        result = LinkResult(
            lease=job.lease.id,
            transfer=self._engine.transfer_parameters(job.lease.id, job.lease.blocks, len(plan.sequence)),
            chunks=tuple(chunk.outcome for chunk in plan.chunks),
            tokens_reused=plan.tokens_reused,
            tokens_computed=plan.tokens_computed,
            stages_ms=plan.stages_ms,
        )
        try:
            job.done.set_result(result)
        except InvalidStateError:  # cancelled meanwhile: nobody will read these blocks
            self._free(job)

    def _free(self, job: LinkJob) -> None:
        job.plan.unpin()
        if job.lease is not None:
            self._pool.abandon(job.lease.id)

    def _fail(self, job: LinkJob, error: Exception) -> None:
        logger.error("link %s failed", job.plan.request.request_id, exc_info=error)
        self._free(job)
        with suppress(InvalidStateError):
            job.done.set_exception(error)


def drain(loop: PrefillLoop, seconds: float = 60.0, poll: float = 0.01) -> LoopStats:
    """Wait until the loop has nothing queued, running or to harvest (tests and orderly shutdown).

    Raises:
        TimeoutError: it still had work after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        loop.hasten()
        stats = loop.stats()
        if not (stats.waiting or stats.running or stats.harvest):
            loop.hasten(0)
            return stats
        if time.monotonic() > deadline:
            raise TimeoutError(f"prefill loop still busy after {seconds} s: {stats}")
        time.sleep(poll)
