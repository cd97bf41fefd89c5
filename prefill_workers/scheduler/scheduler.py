"""Links under way in the prefill loop: what is placed, measured and computed of them, a turn at a time.

A turn places the chunks whose loads have ended, and runs ONE forward, up to a token budget; a long run goes on in the
next turn. Links are computed in the order in which they are due, each some times what it takes to compute after it
came: one that links nearly all does not wait for one that computes everything, nor that one for ever. Others join the
forward of the first where that saves more waiting than it causes (see `cost_model`).

A link computes while its later chunks still load (mpic.md §3.2): up to its frontier, the first token that waits for
one, and beyond it where layers come in faster than they are needed (see `arriving`). Which tokens a link chooses by
deviation is found out by partial forwards before (`Linker.select`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import takewhile

from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.sampling import draw
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.link.linker import Linker
from prefill_workers.protocol import PixelsNeeded
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.link_job import FORWARD_TOKENS, LinkJob
from prefill_workers.sequence import Run, split_runs

logger = logging.getLogger(__name__)

_STRETCH = 4.0  # times what a link takes to compute, until it is due


class LinksUnderWay:
    """Links that have blocks, in the order in which they are due after a turn. Belongs to the loop's thread.

    Args:
        cost_model: what forwards take; every forward teaches it.
        budget: tokens of one forward at most.
        free: lets go of what a link holds that ends without a result.

    Attributes:
        forwards, by_layer, partial, tokens: see `worker.LoopStats`.
        failing: turns in which the engine failed, since the last forward that did not.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        linker: Linker,
        cost_model: ForwardCostModel,
        budget: int,
        free: Callable[[LinkJob], None],
    ) -> None:
        self._engine, self._linker, self._cost_model, self._budget, self._free = (
            engine,
            linker,
            cost_model,
            budget,
            free,
        )
        self._jobs: list[LinkJob] = []
        self.forwards = self.by_layer = self.partial = self.tokens = self.failing = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[LinkJob]:
        return iter(self._jobs)

    @property
    def go_on(self) -> bool:
        """Whether the next turn has something to do."""
        return any(job.computes or job.plan.measures or job.plan.has_news for job in self._jobs)

    def add(self, job: LinkJob) -> None:
        """Take up a link that has its blocks."""
        self._jobs.append(job)

    def remove(self, jobs: Collection[LinkJob]) -> None:
        """Drop links that have ended."""
        self._jobs = [job for job in self._jobs if job not in jobs]

    def turn(self) -> list[LinkJob]:
        """Place what has been loaded, choose tokens, and run one forward; the links that are finished, still held."""
        failed_before = self.failing
        self._jobs = sorted(self._jobs, key=self._due)
        self._jobs = [job for job in self._jobs if self._advance(job)]
        self._select()
        computed = any(job.computes for job in self._jobs) and self._forward()
        finished = [job for job in self._jobs if job.plan.settled and not job.pending]
        if finished and not computed:  # they end with a chunk that was written
            finished = self._written(finished)
        self.failing = min(self.failing, failed_before + 1)  # what fails several links is one failure
        return finished

    def _written(self, finished: list[LinkJob]) -> list[LinkJob]:
        """Wait until others can read what was written for these links. Returns them; none if the device failed."""
        try:
            self._engine.finish_writes()
        except Exception as error:
            self._fail_together(finished, error)
            return []
        return finished

    def _fail_together(self, jobs: Collection[LinkJob], error: Exception) -> None:
        """The engine failed, and with it all links that it worked for."""
        self.failing += 1
        for job in jobs:
            self.fail(job, error)
        self.remove(jobs)

    def fail(self, job: LinkJob, error: Exception) -> None:
        """Tell whoever waits for a link that it ended so, and let go of what it holds."""
        logger.error("link %.100r failed", job.plan.request.request_id, exc_info=error)
        self._free(job)
        with suppress(InvalidStateError):
            job.done.set_exception(error)

    def _due(self, job: LinkJob) -> float:
        """When a link should have been computed (`time.perf_counter`); later, if its chunks turn out not to load."""
        return job.submitted + _STRETCH * self._cost_model.seconds(job.computed_in_all)

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
            if job.plan.loads and job.by_layer and self._engine.accepts_layerwise_kv:
                self._take_up_arriving(job)
        except PixelsNeeded as needed:
            self._free(job)
            with suppress(InvalidStateError):
                job.done.set_exception(needed)
            return False
        except Exception as error:
            self.failing += 1
            self.fail(job, error)
            return False
        return True

    def _select(self) -> None:
        """Choose the tokens of links that measure deviations, once all that they link is loaded, and it is their turn.

        That is when a forward would take them as well: others' first tokens need not wait for theirs.
        """
        able, turn = [job for job in self._jobs if job.computes or job.plan.measures], list[LinkJob]()
        for behind, job in zip(reversed(range(len(able))), able, strict=True):
            tokens = sum(map(len, job.to_measure)) if job.plan.measures else job.tokens
            if not turn or self._cost_model.joins(tokens, len(turn), behind):
                turn.append(job)
        ready = [job for job in turn if job.plan.measures]
        if not ready:
            return
        try:
            self.partial += self._linker.select([(job.plan, job.to_measure) for job in ready], self._budget)
        except Exception as error:
            self._fail_together(ready, error)
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
        earlier = takewhile(lambda other: other is not job, self._jobs)
        ahead = [other.tokens for other in earlier if other.computes]
        this_turn = not ahead or self._cost_model.joins(tokens, len(ahead), 0)
        worth_it = tokens >= FORWARD_TOKENS and this_turn and sum(ahead) + tokens <= self._budget
        if worth_it and self._cost_model.keeps_ahead(arriving, tokens):
            for coming in arriving:
                coming.chunk.written = coming
            job.arriving = arriving
            job.compute_up_to(whole)

    def _forward(self) -> bool:
        """One forward over what the link that is due first can compute, and those that join it, up to the budget.

        False if it failed, and with it the links that it was for: others' KV lies in other blocks.
        """
        began, budget = time.perf_counter(), self._budget
        work: list[tuple[LinkJob, list[Run]]] = []
        arriving: list[tuple[LinkJob, LayerwiseLoad]] = []
        # those that are not worth a forward of their own yet may only join
        ready = sorted((job for job in self._jobs if job.pending), key=lambda job: not job.computes)
        for behind, job in zip(reversed(range(len(ready))), ready, strict=True):
            # what a forward writes as it comes in must be in the forward that was chosen for it
            if work and not job.arriving and not self._cost_model.joins(job.tokens, len(work), behind):
                continue
            now, job.pending = split_runs(job.pending, budget)
            if now:
                work.append((job, now))
                budget -= sum(len(run) for run in now)
                arriving += [(job, coming) for coming in job.arriving]
                job.arriving = []
        tokens = self._budget - budget
        ending = [i for i, (job, now) in enumerate(work) if job.ends_with(now)]
        try:
            logits = self._engine.forward(
                [(job.plan.sequence, runs) for job, runs in work],
                [coming for _, coming in arriving],
                self._cost_model.deadline(tokens),
                ending,
            )
        except Exception as error:
            self._fail_together([job for job, _ in work], error)
            return False
        self.failing = 0
        self.forwards += 1
        self.by_layer += bool(arriving)
        self.tokens += tokens
        spent = time.perf_counter() - began
        computing = spent - sum(coming.waited for _, coming in arriving)
        if tokens >= FORWARD_TOKENS:
            self._cost_model.learn(tokens, computing)
        for job, now in work:
            job.plan.took("forward", spent)
            job.plan.compute_ms += computing * 1e3 * sum(map(len, now)) / tokens
        for i, scores in zip(ending, () if logits is None else logits, strict=True):
            job = work[i][0]
            assert job.plan.request.sampling is not None
            job.first_token = draw(scores, job.plan.request.sampling, job.plan.sequence.token_ids)
        for job, coming in arriving:
            if coming.late:
                coming.chunk.written, job.by_layer = None, False
                job.go_back_to(coming.chunk.span.start)
        return True
