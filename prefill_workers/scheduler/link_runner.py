"""The link runner: forwards of admitted links, and the end of those that are done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import InvalidStateError

from infra.kv_window import window_parameter
from prefill_workers.background.activity import Activity
from prefill_workers.background.idle_work import IdleWork
from prefill_workers.block_pool import BlockPool
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.linker import Linker
from prefill_workers.protocol import HandedOff, LinkResult
from prefill_workers.scheduler.link_job import LinkJob
from prefill_workers.scheduler.observers import observers
from prefill_workers.scheduler.scheduler import ForwardBatch, ForwardResult, Scheduler

logger = logging.getLogger(__name__)


class LinkRunner:
    """Admitted links of one engine, run to their end. Belongs to the prefill loop's thread.

    Args:
        pool: whose blocks the links hold.
        idle_work: takes up links that have finished.
        activity: is told of forwards and of links that have finished.
        learns: whether chunks that links computed are kept.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        linker: Linker,
        scheduler: Scheduler,
        pool: BlockPool,
        idle_work: IdleWork,
        activity: Activity,
        *,
        learns: bool,
    ) -> None:
        self._engine, self._linker, self._scheduler, self._pool = engine, linker, scheduler, pool
        self._idle_work, self._activity, self._learns = idle_work, activity, learns

    def turn(self) -> bool:
        """Run one forward of admitted links, and end those that are done. False if none is."""
        finished = self._run()
        self._end([job for job in finished if self._compact(job)])
        return bool(finished)

    def _run(self) -> list[LinkJob]:
        """Run one forward, if one is worth it; returns the links that are done, in full."""
        batch = self._scheduler.schedule()
        result = None if batch is None else self._forward(batch)
        finished = self._scheduler.update(batch, result)
        if finished and result is None and not self._finish_writes(finished):
            return []
        return finished

    def _end(self, finished: Sequence[LinkJob]) -> None:
        """Give links' results to their callers, and let idle work take them up."""
        held = [job for job in finished if self._finish(job)]
        for job in finished:  # whose blocks are freed on this thread alone
            self._learn(job)
        for job in finished:
            if job not in held:  # cancelled: nobody will read these blocks
                self._scheduler.free(job)
        for job in held:
            if job.plan.session is not None and not self._idle_work.has_outlived(job.plan):
                self._linker.sessions.keep(job.plan)
                self._idle_work.refresh(job.plan)
            if job.compacted is not None:  # the whole KV is no decode engine's
                self._pool.abandon(job.name)
        self._scheduler.remove(finished)  # only now: a defect fails these too, and who drains waits for idle work

    def _forward(self, batch: ForwardBatch) -> ForwardResult | None:
        """Compute a batch. None if that failed, and with it the links in it.

        Others' KV lies in other blocks.
        """
        began = time.perf_counter()
        try:
            observed = list(observers(batch.work, batch.ending))
            logits = self._engine.forward(batch.sequences, batch.loads, batch.deadline, batch.ending, observed)
        except Exception as error:
            self._scheduler.fail(batch.jobs, error)
            return None
        self._activity.note_computed()
        span, seconds = self._engine.forward_span, time.perf_counter() - began
        if span is not None and span.seconds is not None:
            return ForwardResult(logits, span.seconds, on_device=True)
        return ForwardResult(logits, seconds)

    def _finish_writes(self, finished: Sequence[LinkJob]) -> bool:
        """Wait until the KV of links that end without a forward can be read. False if that failed."""
        try:
            self._engine.finish_writes()
        except Exception as error:
            self._scheduler.fail(finished, error)
            return False
        return True

    def _compact(self, job: LinkJob) -> bool:
        """Write a finished link's KV in fewer entries, if its request asks for that. False if that failed."""
        if job.compaction is None or job.compacted is None:
            return True
        began = time.perf_counter()
        try:
            self._engine.compact(job.name, job.plan.sequence.blocks, job.compaction, job.compacted.blocks)
        except Exception as error:
            self._scheduler.fail([job], error)
            return False
        job.plan.took("compact", time.perf_counter() - began)
        return True

    def _finish(self, job: LinkJob) -> bool:
        """Give a finished link's result to its caller. False if the link was cancelled."""
        plan, (lease, room) = job.plan, job.offered
        self._activity.note_finished()
        tokens = len(plan.sequence)
        kept = tokens if job.compaction is None else job.compaction.kept
        transfer = self._engine.transfer_parameters(lease.id, lease.blocks, room)
        if plan.request.compaction.window is not None:
            transfer |= window_parameter(plan.request.compaction.window)
        result = LinkResult(
            lease=lease.id,
            transfer=transfer,
            chunks=tuple(chunk.outcome for chunk in plan.chunks),
            tokens_reused=plan.tokens_reused,
            tokens_computed=plan.tokens_computed,
            stages_ms=plan.end_stages(),
            compute_ms=plan.compute_ms,
            select_ms=plan.select_ms,
            prefix_tokens_reused=len(plan.prefix_hit),
            first_token=job.first_token,
            session=None if plan.session is None else plan.session.outcome(),
            kv=HandedOff(tokens, kept, self._engine.stored_bytes(kept)),
            reads_answer=self._idle_work.reads_answer(plan),
        )
        try:
            job.done.set_result(result)
        except InvalidStateError:  # cancelled meanwhile
            return False
        return True

    def _learn(self, job: LinkJob) -> None:
        """Keep a finished link's blocks by name, and let idle work take it up. Errors cost no more than that."""
        assert job.lease is not None
        try:
            if self._linker.prefixes is not None:
                self._linker.prefixes.keep(job.plan)
            self._idle_work.take_up(job.plan, job.lease.id, job.offered[0].id, learns=self._learns)
        except Exception:  # a defect; the link itself has ended well
            self._idle_work.failures += 1
            logger.exception("nothing is kept of link %s", job.plan.request.request_id)
