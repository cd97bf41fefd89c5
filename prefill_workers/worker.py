"""The prefill loop: one thread that drives the engine.

Each turn it frees what decode engines have read, admits waiting links while blocks last, places their reused chunks,
and runs ONE forward over the runs of all admitted links up to a token budget; a long run goes on in the next turn.
When no link waits it works off the harvest: canonical KV and deficits of what earlier links computed. A link that
arrives meanwhile waits for one background forward at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import StoreError
from prefill_workers.engine import PrefillEngine
from prefill_workers.handoff import BlockPool, Lease, PoolExhausted
from prefill_workers.linker import ChunkOutcome, ChunkPlan, Linker, LinkPlan
from prefill_workers.orbit import OrbitForming
from prefill_workers.sequence import Run, split_runs

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.002  # between looks for NIXL notifications while a lease is out
_MAX_ORBITS = 64  # sets that wait for their orbit patches; the oldest give way


class Overloaded(RuntimeError):
    """The queue of waiting links is full."""


class PromptTooLarge(ValueError):
    """The prompt needs more KV blocks than the whole pool has."""


@dataclass(frozen=True)
class LinkResult:
    """A linked sequence, ready to be pulled by a decode engine."""

    lease: str
    transfer: dict[str, Any]  # vLLM's kv_transfer_params
    chunks: tuple[ChunkOutcome, ...]
    tokens_reused: int
    tokens_computed: int
    stages_ms: dict[str, float]


@dataclass(eq=False)
class _Job:
    plan: LinkPlan
    done: Future[LinkResult]
    submitted: float
    lease: Lease | None = None
    pending: list[Run] = field(default_factory=list)
    forward_began: float = 0.0


@dataclass(eq=False)
class _Harvest:
    plan: LinkPlan
    chunk: ChunkPlan
    lease: str
    since: float


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
    tokens_forwarded: int
    leases_expired: int
    harvest_failures: int


class PrefillLoop:
    """Owns the engine's thread.

    Args:
        budget: tokens of one forward at most.
        max_queue: links that may wait; more are refused with `Overloaded`.
        form: whether computed chunks are kept (canonical KV, patches) in the background.
        patience_seconds: how long background work gives way to hand-offs of links that have finished.
        orbit_chunks: largest set of chunks whose orders are run in the background for orbit patches; 0: none.
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
        orbit_chunks: int = 3,
        patience_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._linker = engine, linker
        self._budget, self._max_queue, self._form = budget, max_queue, form
        last = engine.num_blocks
        longest = -(-engine.max_model_len // engine.block_size)
        scratch = min(longest, (last - 1) // 4)
        self._scratch = range(last - scratch, last)
        self._pool = BlockPool(range(1, last - scratch), engine.block_size, lease_seconds, owner, clock)
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._harvest: deque[_Harvest] = deque()
        self._orbits: deque[LinkPlan] = deque(maxlen=_MAX_ORBITS)
        self._forming: OrbitForming | None = None
        self._orbit_chunks = orbit_chunks
        self._patience = patience_seconds
        self._last_finished = -patience_seconds
        self._abandoned: deque[str] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._forwards = self._tokens = self._expired = self._failures = 0
        self._thread = threading.Thread(target=self._run, name="prefill-loop", daemon=True)

    # -- called from other threads ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. From here on nobody else may touch the engine."""
        self._thread.start()

    def submit(self, plan: LinkPlan) -> Future[LinkResult]:
        """Queue a plan. Cancelling the future drops the link and frees its blocks.

        Raises:
            Overloaded: too many links wait already.
            PromptTooLarge: the pool could never hold the prompt.
        """
        needed = self._pool.blocks_for(len(plan.sequence))
        if needed > self._pool.total:
            raise PromptTooLarge(f"the prompt needs {needed} KV blocks, the prefill worker has {self._pool.total}")
        job = _Job(plan, Future(), time.perf_counter(), pending=list(plan.runs))
        with self._wake:
            if self._stopping:
                raise Overloaded("the prefill worker is shutting down")
            if len(self._waiting) >= self._max_queue:
                raise Overloaded(f"{len(self._waiting)} links wait already")
            self._waiting.append(job)
            self._wake.notify()
        return job.done

    def abandon(self, lease: str) -> None:
        """Nobody will pull this lease's blocks after all."""
        with self._wake:
            self._abandoned.append(lease)
            self._wake.notify()

    def stats(self) -> LoopStats:
        """Counters and queue lengths, without stopping the loop."""
        return LoopStats(
            waiting=len(self._waiting),
            running=len(self._running),
            harvest=len(self._harvest) + len(self._orbits) + (self._forming is not None),
            blocks_free=self._pool.free,
            blocks_total=self._pool.total,
            leases=self._pool.leases,
            forwards=self._forwards,
            tokens_forwarded=self._tokens,
            leases_expired=self._expired,
            harvest_failures=self._failures,
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
        while True:
            with self._wake:
                if not (self._has_work() or self._abandoned or self._stopping):
                    # leases end by a NIXL notification, which has no descriptor to wait on: poll while any is out
                    self._wake.wait(_POLL_SECONDS if self._pool.leases else 0.5)
                if self._stopping and not self._running:
                    for job in self._waiting:
                        with suppress(InvalidStateError):
                            job.done.set_exception(Overloaded("the prefill worker is shutting down"))
                    return
            self._free_blocks()
            self._admit()
            if self._running:
                self._step()
            elif self._waiting:
                time.sleep(0.0005)  # no block is free: wait for a decode engine to read, without spinning
            elif self._gives_way():
                with self._wake:  # leave the machine to somebody's first token
                    if not self._waiting:
                        self._wake.wait(_POLL_SECONDS)
            elif self._harvest:
                self._harvest_one()
            elif self._forming or self._orbits:
                self._orbit_one()

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._harvest or self._orbits or self._forming)

    def _gives_way(self) -> bool:
        """Whether background work should wait: a hand-off is under way, and neither has waited long."""
        now = time.perf_counter()
        late = bool(self._harvest) and now - self._harvest[0].since > self._patience
        return self._pool.unread and now - self._last_finished < self._patience and not late

    def _free_blocks(self) -> None:
        while self._abandoned:
            self._pool.abandon(self._abandoned.popleft())
        if not self._pool.leases:
            return
        read, wanted = self._engine.poll_handoffs()
        for lease in read:
            self._pool.read(lease)
        for lease in wanted:
            self._pool.renew(lease)
        expired = self._pool.expire()
        if expired:
            self._expired += len(expired)
            logger.warning("leases expired unread, blocks freed: %s", ", ".join(expired))
            self._harvest = deque(h for h in self._harvest if h.lease not in expired)

    def _admit(self) -> None:
        while self._waiting and not self._stopping:
            job = self._waiting[0]
            if job.done.cancelled():
                self._waiting.popleft()
                continue
            began = time.perf_counter()
            try:
                job.lease = self._pool.allocate(len(job.plan.sequence), job.plan.request.readers)
            except PoolExhausted:
                if self._make_room():
                    continue
                return  # blocks come free when decode engines have read theirs
            self._waiting.popleft()
            job.plan.sequence.blocks = job.lease.blocks
            job.plan.stages_ms["queue"] = (began - job.submitted) * 1e3
            try:
                self._linker.place(job.plan)
            except Exception as error:
                self._fail(job, error)
                continue
            job.forward_began = time.perf_counter()
            job.plan.stages_ms["place"] = (job.forward_began - began) * 1e3
            self._running.append(job)

    def _step(self) -> None:
        cancelled = [job for job in self._running if job.done.cancelled()]
        for job in cancelled:
            self._running.remove(job)
            self._free(job)
        budget, work = self._budget, []
        for job in self._running:
            now, job.pending = split_runs(job.pending, budget)
            if now:
                work.append((job.plan.sequence, now))
                budget -= sum(len(run) for run in now)
        if work:
            try:
                self._engine.forward(work)
            except Exception as error:
                for job in self._running:
                    self._fail(job, error)
                self._running.clear()
                return
            self._forwards += 1
            self._tokens += self._budget - budget
        finished = [job for job in self._running if not job.pending]
        self._running = [job for job in self._running if job.pending]
        for job in finished:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        assert job.lease is not None
        plan = job.plan
        self._last_finished = time.perf_counter()
        plan.stages_ms["forward"] = (time.perf_counter() - job.forward_began) * 1e3
        if self._form:
            for chunk in self._linker.harvestable(plan):
                self._pool.hold(job.lease.id)
                self._harvest.append(_Harvest(plan, chunk, job.lease.id, time.perf_counter()))
            if 1 < len(plan.chunks) <= self._orbit_chunks and self._linker.harvestable(plan):
                self._orbits.append(plan)
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

    def _harvest_one(self) -> None:
        item = self._harvest[0]
        try:
            self._keep(item)
        except (StoreError, RuntimeError, OSError) as error:
            self._failures += 1
            logger.warning("chunk %s could not be kept: %s", item.chunk.span.content[:16], error)
        finally:
            self._harvest.popleft()

    def _keep(self, item: _Harvest) -> None:
        try:
            if self._linker.is_kept(item.plan, item.chunk):
                return
            conditioned = self._linker.conditioned(item.plan, item.chunk)
        finally:
            self._pool.unhold(item.lease)
        self._linker.keep_embeddings(item.plan, item.chunk)
        tokens = item.chunk.span.stop - item.chunk.span.start
        if tokens > len(self._scratch) * self._engine.block_size:
            logger.info("a chunk of %d tokens is too long for a background forward; not kept", tokens)
            return
        self._linker.harvest(item.plan, item.chunk, conditioned, self._scratch)

    def _orbit_one(self) -> None:
        try:
            if self._forming is None:
                try:
                    self._forming = self._linker.orbit(self._orbits[0])
                finally:
                    self._orbits.popleft()  # only now: until then it counts as work to be done
                return
            fits = self._forming.tokens <= len(self._scratch) * self._engine.block_size
            if not fits or not self._linker.orbit_step(self._forming, self._scratch):
                self._forming = None
        except (StoreError, RuntimeError, OSError) as error:
            self._failures += 1
            self._forming = None
            logger.warning("orbit patches could not be formed: %s", error)

    def _make_room(self) -> bool:
        """Give up harvests that hold blocks somebody waits for. Returns whether any block came free."""
        before = self._pool.free
        while self._harvest and self._pool.free == before:
            self._pool.unhold(self._harvest.popleft().lease)
        return self._pool.free > before

    def _free(self, job: _Job) -> None:
        if job.lease is not None:
            self._pool.abandon(job.lease.id)

    def _fail(self, job: _Job, error: Exception) -> None:
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
        stats = loop.stats()
        if not (stats.waiting or stats.running or stats.harvest):
            return stats
        if time.monotonic() > deadline:
            raise TimeoutError(f"prefill loop still busy after {seconds} s: {stats}")
        time.sleep(poll)
