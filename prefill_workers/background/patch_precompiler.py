"""Patch precompiler: the jobs of `compile_queue`, worked off in idle time, by pieces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from kvstore.forget import CacheGroup
from kvstore.records.patch_form import Footprint
from prefill_workers.background.answer_prefill import AnswerStats
from prefill_workers.background.compile_queue import (
    CROSS_REQUEST_CHUNKS,
    HORIZON_S,
    Clock,
    CompileJob,
    CompileQueue,
    ComputeBudget,
    Demand,
    JobKind,
    cross_request_jobs,
    jobs,
)
from prefill_workers.background.recent_chunks import RecentChunks
from prefill_workers.host_blocks import HostStats
from prefill_workers.link.plan import LinkPlan
from prefill_workers.patches.orbit_patches import OrbitForming
from prefill_workers.patches.scratch import Pieces, ResumableTask, Scratch
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.settings import CompileLimits

_MAX_JOBS = 64  # that wait; the least valuable give way
_KNOWN_CHUNKS = 512  # that requests brought last, of all tenants


@dataclass(frozen=True)
class CompileStats:
    """Counters of compiling ahead, of other idle work, and of what is kept for prompts.

    Attributes:
        waiting: jobs left.
        forwards: orders, subsets and pairs that were run, by kind of job.
        seconds: of these forwards.
        given_up: jobs by reason: `queue` (others were worth more), `bytes` (the library holds what saves more per byte)
            or `sums` (no pair patches are summed any more).
        dropped: patches that the compiler had no room for or could not form, whatever they came of.
        idle_tokens: that forwards computed in idle time, whatever for.
        answers: of `answer_prefill`.
        host: of `host_blocks`.
    """

    waiting: int
    forwards: Mapping[str, int]
    seconds: float
    given_up: Mapping[str, int]
    dropped: int = 0
    idle_tokens: int = 0
    answers: AnswerStats = field(default_factory=AnswerStats)
    host: HostStats = field(default_factory=HostStats)


class PatchPrecompiler:
    """The queue of one prefill loop, whose thread it belongs to.

    Args:
        scratch: where its sequences lie.
        caches: of the loop's thread.
        clock: monotonic seconds.
        sums: whether sums of pair patches may be served now; while not, no pair is worth a forward.
        crowded: whether the patch compiler has enough to do; while it has, no step begins.
    """

    def __init__(
        self,
        sets: SetPatches,
        scratch: Scratch,
        limits: CompileLimits,
        caches: CacheGroup,
        clock: Clock = time.monotonic,
        sums: Callable[[], bool] = lambda: True,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sets, self._scratch, self._most, self._sums = sets, scratch, limits, sums
        self._crowded = crowded
        self.demand = Demand(clock)
        self._queue = caches.register(CompileQueue[OrbitForming](_MAX_JOBS, self.demand))
        self._known = caches.register(RecentChunks(_KNOWN_CHUNKS))
        self._budget = ComputeBudget(limits.share, clock=clock)
        self._job: CompileJob[OrbitForming] | None = None
        self._forming: OrbitForming | None = None  # of the job, if it runs orders and has begun to
        self._fresh = False  # whether the job has been taken up and has not done a step yet
        self._step: ResumableTask[tuple[int, int]] | None = None  # of the job, while it uses the scratch blocks
        self._forwards, self._given_up = Counter[str](), Counter[str]()
        self._tokens, self._seconds = 0, 0.0

    def __len__(self) -> int:
        """Jobs that may go on now.

        None while the compute budget is spent, unless one has begun a step.
        """
        waiting = self._waiting
        return waiting if waiting and (self.is_running or self._budget.is_open) else 0

    def offer(self, plan: LinkPlan, *, missed: bool) -> None:
        """Take up a finished link; `missed`: some of its chunks had to be computed."""
        tenant, prefix = plan.request.tenant, plan.request.prefix
        contents = [chunk.span.content for chunk in plan.chunks]
        limits = self._limits if plan.request.session is None else self._limits.of_session(len(contents))
        self.demand.observe(tenant, contents)
        if not limits.share or len({chunk.keys.canonical for chunk in plan.chunks}) < len(plan.chunks):
            return
        served = _light(self._sets.unready(plan))
        if limits.pair_forwards:
            self._known.add(served)
        if not missed or any(chunk.keys.context != prefix for chunk in plan.chunks):
            return  # nothing is missed, or only what is keyed by text, which other orders of the chunks are without
        tokens = [len(chunk.span) for chunk in plan.chunks]
        found = jobs(served, tenant, prefix, contents, tokens, limits, self.demand)
        if limits.pair_forwards:
            others = self._known.beside(
                served, CROSS_REQUEST_CHUNKS, lambda content: self.demand.expected(tenant, content)
            )
            company = OrbitForming(prefix, served.chunks + others, tenant, served.opening)
            contents += [chunk.content for chunk in others]
            tokens += [len(chunk.token_ids) for chunk in others]
            found += cross_request_jobs(
                company, tenant, prefix, contents, tokens, len(served.chunks), limits, self.demand
            )
        for job in found:
            self._queue.add(job)

    def forget(self, content: str, tenant: str) -> None:
        """End the job under way if it is over a deleted content, in the middle of a step too."""
        if self._job and self._job.is_over(content, tenant):
            self._end()

    @property
    def is_running(self) -> bool:
        """True if a step has begun, which uses the scratch blocks until it is over."""
        return self._step is not None

    def may_go_on(self, awaited: Collection[tuple[str, str]]) -> bool:
        """True if a step has begun or may begin.

        `awaited` contents (tenant, content) are still to be kept.
        """
        if self.is_running or self._crowded():
            return self.is_running
        return self._budget.is_open and (self._job is not None or self._queue.best(awaited) is not None)

    def step(self, awaited: Collection[tuple[str, str]] = ()) -> None:
        """Do one piece of work. Raises what the library and the engine do; the job is given up then."""
        # A job does a step before it gives way: worth decays while jobs are compared, equal ones would swap for ever.
        job, better = self._job, None if self.is_running or self._fresh else self._queue.best(awaited)
        # The orders of a set are not left half-way: the means that they are forming are large.
        if job and better and job.kind is not JobKind.orders and self._priority(better) > self._priority(job):
            self._queue.add(job)
            job = None
        try:
            if job is not None:
                self._go_on(job)
            elif better is not None:
                self._begin(better)
        except BaseException:
            self._end()
            raise

    def stats(self) -> CompileStats:
        """Counters, from any thread."""
        given_up = {"queue": self._queue.dropped, **self._given_up}
        return CompileStats(self._waiting, dict(self._forwards), self._seconds, given_up)

    @property
    def _limits(self) -> CompileLimits:
        return self._most if self._sums() else self._most.without_sums()

    @property
    def _waiting(self) -> int:
        return len(self._queue) + (self._job is not None)

    def _priority(self, job: CompileJob[OrbitForming]) -> float:
        return job.priority(self.demand)

    def _begin(self, job: CompileJob[OrbitForming]) -> None:
        """Take up a job: from here on it counts as the one under way."""
        self._job, self._forming, self._fresh = job, None, True
        self._queue.remove(job)
        reason = self._to_give_up(job)
        if reason is not None:
            self._given_up[reason] += 1
            self._end()

    def _go_on(self, job: CompileJob[OrbitForming]) -> None:
        if self._step is None:
            reason = self._to_give_up(job)
            if reason is not None:
                self._given_up[reason] += 1
                self._end()
                return
            self._step = ResumableTask(self._take(job))
        if not self._step.go_on():
            return
        (ran, tokens), seconds = self._step.result, self._step.seconds
        self._step, self._fresh = None, False
        if ran:
            self._budget.spend(seconds)
            self._forwards[job.kind] += ran
            self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if not (job.steps and job.forwards):
            self._end()

    def _end(self) -> None:
        self._job = self._forming = self._step = None
        self._fresh = False

    def _to_give_up(self, job: CompileJob[OrbitForming]) -> str | None:
        """Reason for not taking a job's next step; None: it is to be taken.

        The orders of a set end in one patch, whose bytes were weighed when they were begun.
        """
        if job.has_pairs and not self._sums():
            return "sums"
        weighed = job.kind is JobKind.orders and not self._fresh
        return None if weighed or self._worth_its_bytes(job) else "bytes"

    def _worth_its_bytes(self, job: CompileJob[OrbitForming]) -> bool:
        """True if the next step saves as much per second and byte as what goes for it."""
        price = self._sets.library.price(job.tenant)
        if not price or not self._tokens:
            return True
        saved = job.tokens_saved(self.demand) / HORIZON_S * self._seconds / self._tokens
        return saved >= price * job.nbytes(lambda tokens: self._footprint(tokens).own)

    def _footprint(self, tokens: int) -> Footprint:
        engine = self._sets.engine
        return self._sets.form.footprint(tokens, engine.layout, engine.dtype)

    def _take(self, job: CompileJob[OrbitForming]) -> Pieces[tuple[int, int]]:
        """Take the job's next step.

        Returns:
            How many orders, subsets or pairs were run, and over how many tokens; none after a look at what is stored.
        """
        fits, tokens, ran = len(job.item.opening) + job.longest() <= self._scratch.tokens, job.step_tokens(), 0
        if job.kind is JobKind.orders:
            if fits and self._forming is None:
                self._forming = yield from self._sets.lacking(job.item)
            if fits and self._forming is not None:
                ran = int((yield from self._sets.orbit_step(self._forming, self._scratch)))
            job.forwards = job.forwards - 1 if ran else 0
            return ran, tokens
        step = job.steps.pop(0)
        if fits and job.has_pairs:
            ran, tokens = yield from self._sets.pairs_step(job.item, step, job.forwards, self._scratch)
        elif fits:
            ran = int((yield from self._sets.prefix_subset_step(job.item, step, self._scratch)))
        job.forwards -= ran
        return ran, tokens


def _light(served: OrbitForming) -> OrbitForming:
    """The same set without embeddings.

    Jobs would keep them for as long as they wait: what runs one loads them again.
    """
    chunks = tuple(replace(chunk, embeddings=None) for chunk in served.chunks)
    return OrbitForming(served.prefix, chunks, served.tenant, served.opening)
