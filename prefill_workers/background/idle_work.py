"""Idle work of a prefill worker: answers, harvests, checks, compiling ahead.

The KV of an answer (see `answer_prefill`) comes first: its user's next turn may come within seconds, and it is short.
Harvests hold their sequence's blocks until the conditioned KV has been read out, as measurements do that requests ask
for (see `load_bearing`); checks (see `shadow_check`) until the served KV has been attended to; what is compiled besides
(see `patch_precompiler`) needs none and comes last. Work goes on in pieces (see `prefill_workers.patches.scratch`), so
that a link that arrives meanwhile waits for one at most.

A busy worker learns too, but no more than is worth the waiting: chunks that were asked for more than once are harvested
beside links, within a share of the time. What was seen once waits until no request has come for a while, the longer the
fewer of the tenant's chunks come again: where none does, none is worth a request's waiting. It is the first to go when
its blocks are needed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import StoreError
from kvstore.forget import CacheGroup
from kvstore.records.keys import owner_of
from prefill_workers.background.activity import Activity
from prefill_workers.background.answer_prefill import AnswerPrefill, AnswerStats
from prefill_workers.background.brought import brought
from prefill_workers.background.compile_queue import Clock, ComputeBudget
from prefill_workers.background.load_bearing import LoadBearingChecks
from prefill_workers.background.patch_precompiler import CompileStats, PatchPrecompiler
from prefill_workers.background.session_refresh import SessionRefresh
from prefill_workers.background.shadow_check import ShadowChecks
from prefill_workers.block_pool import BlockPool
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import uses_canonical_alone, uses_library
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.scratch import Pieces, ResumableTask, Scratch
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.protocol import LoadBearing
from prefill_workers.settings import CompileLimits

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 0.0005  # between looks for the embeddings of a check
_BUSY_SECONDS = 10.0  # over which `busy_share` is a share
_LONGEST_REST = 30.0  # seconds without requests after which anything is harvested
_MOST_DELETED = 4096  # contents that are remembered for links that began before their deletion


@dataclass(eq=False)
class _Harvest:
    plan: LinkPlan
    chunk: ChunkPlan
    lease: str
    since: float

    @property
    def asked(self) -> tuple[str, str]:
        """Tenant and content of the harvest."""
        return self.plan.request.tenant, self.chunk.span.content


class IdleWork:
    """Queues of what finished links can teach. Belongs to the prefill loop's thread.

    Args:
        linker: whose links they are.
        scratch: where background sequences lie.
        caches: of the loop's thread.
        limits: how much is kept beside links, and compiled ahead of requests.
        activity: of requests; what was seen once waits, at even odds of its coming again, for as long as it is patient.
        clock: monotonic seconds.
        crowded: whether the patch compiler has enough to do.
        keeps_answers, reads_answers: see `LoopLimits`.
    """

    def __init__(
        self,
        linker: Linker,
        harvester: Harvester,
        pool: BlockPool,
        scratch: Scratch,
        caches: CacheGroup,
        limits: CompileLimits,
        activity: Activity,
        *,
        clock: Clock,
        crowded: Callable[[], bool],
        keeps_answers: bool,
        reads_answers: bool,
    ) -> None:
        engine, library, prefixes = linker.engine, linker.library, linker.prefixes
        self._harvester, self._pool, self._scratch = harvester, pool, scratch
        self._harvests: list[_Harvest] = []
        self._harvest: tuple[_Harvest, ResumableTask[None]] | None = None  # that uses the scratch blocks
        self._busy = ComputeBudget(limits.busy_share, _BUSY_SECONDS, clock)
        self._shadow_checks = ShadowChecks(engine, library, linker.fidelity, pool, scratch)
        self._refresh = caches.register(SessionRefresh(engine, library, linker.sessions, scratch))
        self._load_bearing = caches.register(LoadBearingChecks(engine, library, harvester, pool, scratch))
        self._answers: AnswerPrefill | None = None
        self._reads_answers = reads_answers
        if keeps_answers and prefixes is not None:
            self._answers = caches.register(AnswerPrefill(engine, pool, prefixes, scratch.piece))
        self._precompiler = caches.register(
            PatchPrecompiler(SetPatches(harvester), scratch, limits, caches, clock, linker.sums, crowded)
        )
        self._activity, self._hastened = activity, -math.inf
        self._deleted: dict[tuple[str, str], float] = {}  # contents and their owners, with when; latest last
        self.failures = 0

    def __len__(self) -> int:
        """Pieces of work that are left; what waits for its compute budget is not among them."""
        harvests = (self._harvest is not None) + len(self._harvests)
        others = len(self._shadow_checks) + len(self._refresh) + len(self._load_bearing) + len(self._precompiler)
        answers = 0 if self._answers is None else len(self._answers) + self._answers.pulling
        return harvests + others + answers

    @property
    def is_ready(self) -> bool:
        """True if a piece of work may be done now."""
        begun = bool(self._harvest or self._shadow_checks or self._refresh or self._load_bearing or self._answers)
        return begun or self._may_compile or any(map(self._may_begin, self._harvests))

    @property
    def accepts_answers(self) -> bool:
        """True if the KV of answers is kept."""
        return self._answers is not None

    @property
    def is_pulling(self) -> bool:
        """True while answers are read from decode engines, for `poll_pulls` to end."""
        return self._answers is not None and self._answers.pulling > 0

    def hasten(self, until: float) -> None:
        """Do what is left without waiting for a quiet time, until `until` (`time.perf_counter`).

        From any thread.
        """
        self._hastened = until

    def keep_answer(
        self, lease: str, token_ids: Sequence[int], offer: Mapping[str, Any] | None, ended: Future[bool]
    ) -> None:
        """Take up the answer behind a link; see `AnswerPrefill.add`."""
        assert self._answers is not None
        self._answers.add(lease, token_ids, offer, ended)

    def reads_answer(self, plan: LinkPlan) -> bool:
        """True if the answer behind a link would be read from its decode engine."""
        return self._answers is not None and self._reads_answers and self._answers.is_kept(plan)

    def give_up_pulls(self) -> None:
        """Let nobody wait for pulls: the loop ends."""
        if self._answers is not None:
            self._answers.give_up_pulls()

    def poll_pulls(self) -> None:
        """End pulls of answers whose KV has come."""
        if self._answers is not None and self._answers.pulling:
            self._answers.poll()

    def load_bearing(self, tenant: str, request_id: str) -> LoadBearing | None:
        """Load-bearing chunks of a request that asked for them lately. From any thread."""
        return self._load_bearing.get(tenant, request_id)

    def take_up(self, plan: LinkPlan, lease: str, offered: str, *, learns: bool) -> None:
        """Take up a finished link. Its blocks stay until what takes it up has read them.

        One that brought what was deleted since it began teaches nothing: it would be kept long after the deletion.

        Args:
            offered: the lease that decode engines pull, under which its answer comes.
            learns: whether its chunks are kept.
        """
        outlived = self.has_outlived(plan)
        if self._answers is not None and not outlived:
            self._answers.remember(plan, offered)
        if learns and not outlived:
            self.add(plan, lease)
        self._shadow_checks.offer(plan, lease)
        if not outlived:
            self._load_bearing.offer(plan, lease)

    def refresh(self, plan: LinkPlan) -> None:
        """Queue the refresh of a link's session (see `session_refresh`)."""
        self._refresh.offer(plan)

    def add(self, plan: LinkPlan, lease: str) -> None:
        """Harvest what a finished link computed; its blocks stay until they have been read."""
        chunks = self._harvester.harvestable(plan)
        for chunk in chunks:
            self._pool.hold(lease)
            self._harvests.append(_Harvest(plan, chunk, lease, time.perf_counter()))
            self._harvester.keep_embeddings(plan, chunk)  # now: whatever becomes of the harvest, they cost no more
        mode = plan.request.mode
        if uses_library(mode):
            of_use = not uses_canonical_alone(mode)  # who asks like that would not look up what is compiled
            self._precompiler.offer(plan, missed=bool(chunks) and of_use)
            for chunk in plan.chunks:
                if chunk.is_reused:
                    self._harvester.keep_embeddings(plan, chunk)

    def forget(self, content: str, tenant: str) -> None:
        """Keep nothing more of links that brought a deleted content."""
        deleted = content, owner_of(tenant, content)
        self._deleted.pop(deleted, None)
        self._deleted[deleted] = time.perf_counter()
        if len(self._deleted) > _MOST_DELETED:
            del self._deleted[next(iter(self._deleted))]
        for harvest in [one for one in self._harvests if brought(one.plan.request, content, tenant)]:
            self._harvests.remove(harvest)
            self._pool.unhold(harvest.lease)
        if self._harvest and brought(self._harvest[0].plan.request, content, tenant):  # it has let go of its blocks
            self._harvest = None

    def has_outlived(self, plan: LinkPlan) -> bool:
        """True if a content that a link brought was deleted after it began."""
        tenant = plan.request.tenant
        named = ((span.content, owner_of(tenant, span.content)) for span in plan.request.chunks)
        return any(self._deleted.get(one, -math.inf) >= plan.began for one in named)

    def compiled(self) -> CompileStats:
        """Counters of compiling ahead, and of answers."""
        answers = AnswerStats() if self._answers is None else self._answers.stats()
        return replace(self._precompiler.stats(), answers=answers)

    def is_overdue(self, since: float) -> bool:
        """True if a harvest of a repeated chunk has waited since before `since`, and links make way.

        They do while `busy_share` is not used up. `since`: `time.perf_counter`.
        """
        if not self._busy.is_open:
            return False
        begun = [self._harvest[0]] if self._harvest else []
        again = filter(self._asked_again, [*begun, *self._harvests])
        best = max(again, key=self._wanted, default=None)
        return best is not None and best.since < since

    def checks_since(self) -> float | None:
        """Time at which the oldest check was queued (`time.perf_counter`); None: there is none."""
        return self._shadow_checks.waits_since()

    def step_beside_links(self) -> None:
        """Do a piece of a harvest beside links, or of what has begun and must end before it."""
        began = time.perf_counter()
        self._go_on()
        self._busy.spend(time.perf_counter() - began)

    def _wanted(self, harvest: _Harvest) -> float:
        return self._precompiler.demand.expected(*harvest.asked)

    def _asked_again(self, harvest: _Harvest) -> bool:
        return self._precompiler.demand.asked_again(*harvest.asked)

    def _may_begin(self, harvest: _Harvest) -> bool:
        """True if a harvest is worth doing already, when no link is under way."""
        now, odds_against = time.perf_counter(), self._precompiler.demand.odds_against(harvest.asked[0])
        rested = now - self._activity.last_request >= min(self._activity.patience * odds_against, _LONGEST_REST)
        return rested or now < self._hastened or self._asked_again(harvest)

    @property
    def _may_compile(self) -> bool:
        """True if a compile step has begun or may begin.

        Not over chunks whose canonical KV is still to be kept.
        """
        return self._precompiler.may_go_on(self._awaited())

    def _awaited(self) -> set[tuple[str, str]]:
        return {harvest.asked for harvest in self._harvests}

    def step(self) -> None:
        """Do one piece of work; what fails is counted and given up."""
        if self._answers:
            with self._attempt("an answer's KV could not be computed"):
                self._answers.step()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Do one piece of what finished links can teach."""
        if self._shadow_checks.is_running:  # what has begun may use the scratch blocks alone until it is over
            self._shadow_checks.step()
        elif self._precompiler.is_running:
            self._compile()
        elif self._refresh.is_running:
            self._go_on_refreshing()
        elif self._load_bearing.is_running:
            self._load_bearing.step()
        elif self._harvest or self._begin_harvest():
            self._go_on_harvesting()
        elif self._shadow_checks.is_ready:
            self._shadow_checks.step()
        elif self._load_bearing:
            self._load_bearing.step()
        elif self._refresh:
            self._go_on_refreshing()
        elif self._may_compile:
            self._compile()
        else:
            time.sleep(_LOAD_SECONDS)

    def make_room(self) -> bool:
        """Give up work that alone holds blocks somebody waits for.

        Returns whether any block came free.
        """
        if self._shadow_checks.make_room() or self._load_bearing.make_room():
            return True
        before = self._pool.free
        for least in sorted(self._harvests, key=self._wanted):
            if not self._pool.comes_free(least.lease):
                continue
            self._harvests.remove(least)
            self._pool.unhold(least.lease)
            if self._pool.free > before:
                return True
        return False

    def drop(self, leases: Collection[str]) -> None:
        """Give up the harvests, checks and measurements of leases that have ended."""
        self._shadow_checks.drop(leases)
        self._load_bearing.drop(leases)
        self._harvests = [harvest for harvest in self._harvests if harvest.lease not in leases]

    def _begin_harvest(self) -> bool:
        """Take up the harvest of what is asked for most, if any may begin."""
        best = max(filter(self._may_begin, self._harvests), key=self._wanted, default=None)
        if best is None:
            return False
        self._harvest = best, ResumableTask(self._keep(best))
        self._harvests.remove(best)
        return True

    def _go_on_harvesting(self) -> None:
        """Do a piece of the harvest that has begun."""
        assert self._harvest is not None
        item, task = self._harvest
        over = True
        try:
            with self._attempt(f"chunk {item.chunk.span.content[:16]} could not be kept"):
                over = task.go_on()
        finally:
            if over:
                self._harvest = None  # only now: until then it counts as work to be done

    def _keep(self, item: _Harvest) -> Pieces[None]:
        """Harvest one chunk.

        The first piece reads what lies in the link's blocks, and lets go of them. Of one that comes again, what could
        be formed behind chunks with stored KV is formed behind computed ones.
        """
        conditioned = None
        try:
            if not self._harvester.is_resident(item.plan, item.chunk):
                conditioned = self._harvester.conditioned(item.plan, item.chunk)
        finally:
            self._pool.unhold(item.lease)
        if conditioned is not None and not (yield from self._harvester.is_kept(item.plan, item.chunk)):
            if len(item.chunk.span) > self._scratch.tokens:
                logger.info("a chunk of %d tokens is too long for a background forward; not kept", len(item.chunk.span))
                return
            yield from self._harvester.harvest(item.plan, item.chunk, conditioned, self._scratch)
        if self._asked_again(item):
            yield from self._harvester.form_anew(item.plan, item.chunk, self._scratch)

    @contextmanager
    def _attempt(self, words: str) -> Iterator[None]:
        """Do a piece of work; what fails is counted and logged."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            logger.warning("%s: %s", words, error, exc_info=_is_defect(error))

    def _go_on_refreshing(self) -> None:
        with self._attempt("a session's segments could not be computed anew"):
            self._refresh.step()

    def _compile(self) -> None:
        with self._attempt("patches could not be compiled ahead"):
            self._precompiler.step(self._awaited())


def _is_defect(error: Exception) -> bool:
    """True for an error that is none of a store, a device or memory.

    The log should say where it came from.
    """
    return not isinstance(error, StoreError | RuntimeError | OSError)
