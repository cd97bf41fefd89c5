"""Background work of a prefill worker: the harvest of finished links and checks of them, in the engine's idle time.

Harvests hold their sequence's blocks until the conditioned KV has been read out, checks (see `recheck`) until the
served KV has been attended to; orbit patches need none. Work goes on one engine forward at a time, so that a link that
arrives meanwhile waits for one of them at most.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.popularity import Popularity
from prefill_workers import policies
from prefill_workers.handoff import BlockPool
from prefill_workers.harvest import Harvester
from prefill_workers.orbit import OrbitForming
from prefill_workers.plan import ChunkPlan, LinkPlan
from prefill_workers.predictions import Part, PartsQueue, parts
from prefill_workers.recheck import Rechecks

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 0.0005  # between looks for the embeddings of a check
_MAX_ORBITS = 64  # sets that wait for their orbit patches; the oldest give way
_MAX_PARTS = 64  # larger sets whose parts wait to be compiled; the least valuable give way
_LOOKS = 8  # parts that are looked up in the library for each that is compiled


@dataclass(eq=False)
class _Parts:
    """A set whose parts are being compiled: those to look at, and forwards that may still be spent on it."""

    forming: OrbitForming
    waiting: list[Part]
    forwards: int


@dataclass(eq=False)
class _Harvest:
    plan: LinkPlan
    chunk: ChunkPlan
    lease: str
    since: float


class Background:
    """Queues of what finished links can teach. Belongs to the prefill loop's thread.

    Args:
        scratch: blocks for background forwards.
        orbit_chunks: largest set of chunks whose orders are all run for orbit patches; 0: none.
        part_forwards: forwards over parts of a larger set (see `predictions`); 0: none.
    """

    def __init__(
        self,
        harvester: Harvester,
        pool: BlockPool,
        scratch: range,
        orbit_chunks: int,
        part_forwards: int,
        rechecks: Rechecks,
    ) -> None:
        self._harvester, self._pool, self._scratch = harvester, pool, scratch
        self._orbit_chunks = orbit_chunks
        self._harvests: deque[_Harvest] = deque()
        self._orbits: deque[LinkPlan] = deque(maxlen=_MAX_ORBITS)
        self._forming: OrbitForming | None = None
        self._part_forwards = part_forwards
        self._popularity = Popularity()
        self._parts = PartsQueue[LinkPlan](_MAX_PARTS)
        self._compiling: _Parts | None = None
        self._rechecks = rechecks
        self.failures = 0

    def __len__(self) -> int:
        """Pieces of work left."""
        sets = len(self._orbits) + (self._forming is not None) + len(self._parts) + (self._compiling is not None)
        return len(self._harvests) + sets + len(self._rechecks)

    def check(self, plan: LinkPlan, lease: str) -> None:
        """Compare a finished link with an exact one, if it is drawn; its blocks stay until that has begun."""
        self._rechecks.offer(plan, lease)

    def add(self, plan: LinkPlan, lease: str) -> None:
        """Take up a finished link; its blocks stay until its chunks have been read."""
        chunks = self._harvester.harvestable(plan)
        for chunk in chunks:
            self._pool.hold(lease)
            self._harvests.append(_Harvest(plan, chunk, lease, time.perf_counter()))
        if policies.forms_patches(plan.request.mode):
            self._popularity.observe(plan.request.tenant, (c.span.content for c in plan.chunks))
        if chunks and 1 < len(plan.chunks) <= self._orbit_chunks:
            self._orbits.append(plan)
        elif chunks and self._part_forwards and len({c.canonical_key for c in plan.chunks}) == len(plan.chunks) > 1:
            shares = [self._popularity.share(plan.request.tenant, c.span.content) for c in plan.chunks]
            found = parts(shares, [len(c.span) for c in plan.chunks])
            self._parts.add(plan, found[: _LOOKS * self._part_forwards])

    def waits_since(self) -> float | None:
        """When the oldest work that holds blocks was queued (`time.perf_counter`); None if there is none."""
        harvest = self._harvests[0].since if self._harvests else None
        return min((since for since in (harvest, self._rechecks.waits_since()) if since is not None), default=None)

    def step(self) -> None:
        """Do one piece of work; what fails is counted and given up."""
        if self._rechecks.running:  # it alone may use the scratch blocks until it is over
            self._rechecks.step()
        elif self._harvests:
            self._harvest_one()
        elif self._rechecks.ready:
            self._rechecks.step()
        elif self._orbits or self._forming is not None:
            self._orbit_one()
        elif self._parts or self._compiling is not None:
            self._part_one()
        else:
            time.sleep(_LOAD_SECONDS)

    def make_room(self) -> bool:
        """Give up work that holds blocks somebody waits for. Returns whether any block came free."""
        if self._rechecks.make_room():
            return True
        before = self._pool.free
        while self._harvests and self._pool.free == before:
            self._pool.unhold(self._harvests.popleft().lease)
        return self._pool.free > before

    def drop(self, leases: Collection[str]) -> None:
        """Give up the harvests and checks of leases that have ended."""
        self._rechecks.drop(leases)
        self._harvests = deque(harvest for harvest in self._harvests if harvest.lease not in leases)

    @property
    def _scratch_tokens(self) -> int:
        return len(self._scratch) * self._pool.block_size

    def _harvest_one(self) -> None:
        item = self._harvests[0]
        try:
            self._keep(item)
        except (StoreError, RuntimeError, OSError) as error:
            self.failures += 1
            logger.warning("chunk %s could not be kept: %s", item.chunk.span.content[:16], error)
        finally:
            self._harvests.popleft()  # only now: until then it counts as work to be done

    def _keep(self, item: _Harvest) -> None:
        try:
            self._harvester.keep_embeddings(item.plan, item.chunk)  # they may be missing where all else is stored
            if self._harvester.is_kept(item.plan, item.chunk):
                return
            conditioned = self._harvester.conditioned(item.plan, item.chunk)
        finally:
            self._pool.unhold(item.lease)
        if len(item.chunk.span) > self._scratch_tokens:
            logger.info("a chunk of %d tokens is too long for a background forward; not kept", len(item.chunk.span))
            return
        self._harvester.harvest(item.plan, item.chunk, conditioned, self._scratch)

    def _orbit_one(self) -> None:
        try:
            if self._forming is None:
                try:
                    self._forming = self._harvester.orbit(self._orbits[0])
                finally:
                    self._orbits.popleft()
                return
            fits = self._forming.tokens <= self._scratch_tokens
            if not fits or not self._harvester.orbit_step(self._forming, self._scratch):
                self._forming = None
        except (StoreError, RuntimeError, OSError) as error:
            self.failures += 1
            self._forming = None
            logger.warning("orbit patches could not be formed: %s", error)

    def _part_one(self) -> None:
        try:
            if self._compiling is None:
                plan, found = self._parts.pop()
                forming = self._harvester.forming(plan)
                if forming is not None and forming.tokens <= self._scratch_tokens:
                    self._compiling = _Parts(forming, found, self._part_forwards)
                return
            work = self._compiling
            if not work.waiting or not work.forwards:
                self._compiling = None
            elif self._harvester.part_step(work.forming, work.waiting.pop(0).chunks, self._scratch):
                work.forwards -= 1
        except (StoreError, RuntimeError, OSError) as error:
            self.failures += 1
            self._compiling = None
            logger.warning("parts of a set could not be compiled: %s", error)
