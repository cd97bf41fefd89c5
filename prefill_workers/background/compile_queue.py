"""Compile queue of a prefill worker: jobs ahead of requests, their priority and budget.

| job                 | a step each                                      | patches                                     |
|---------------------|--------------------------------------------------|---------------------------------------------|
| orders              | every order of a small set                       | orbit, behind all its subsets, in any order |
| prefix_subsets      | a subset of a larger set, in the order served    | own, of the subset (see `candidate_sets`)   |
| pairs               | some chunks of a set, each behind the same other | pair, whose sums serve sets never seen      |
| cross_request_pairs | the same, with chunks that the set did not bring | pair                                        |

Where sums of pairs serve a small set, its orders are compiled only if it is expected again.

All wait in one bounded queue. The next one is that which saves most for what it takes,

    expected reuses * seconds saved / seconds of its forwards,

where both kinds of seconds are tokens at the same pace. Chunks are expected to be asked for together as often as the
tenant's requests bring all of them, if each were drawn by itself, times as many requests as came in the last hour.

Two budgets bound it. The *compute budget* is a share of the worker's time. The *byte budget* is the library's: once
that is full, what saves less per byte than what was evicted last is not compiled. What serving forwards computed anyhow
is kept without asking either (see `idle_work`): it costs no forward, and its set did come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvstore.catalog.popularity import Popularity
from kvstore.deletions import reaches
from kvstore.operator.patch import ORBIT_ORDERINGS
from prefill_workers.background import candidate_sets
from prefill_workers.modes import composed_antecedents
from prefill_workers.settings import CompileLimits

HORIZON_S = 3600.0  # ahead of which reuses are expected, and behind which requests are counted
ASKED_AGAIN = 1.5  # requests that brought it: more than one, decayed as they may be
CROSS_REQUEST_CHUNKS = 16  # of earlier requests, the most popular, with which a request's chunks are paired
_WINDOW_S = 120.0  # over which the compute budget is a share: what an idle worker saves up at most
_RECENT_CHUNKS = 256  # over which is counted how often chunks come again
_LOOKS = 8  # subsets that are looked up in the library for each that is compiled

Item = TypeVar("Item")
Clock = Callable[[], float]


class JobKind(StrEnum):
    """Kinds of compile jobs; see the module's table."""

    orders = "orders"
    prefix_subsets = "prefix_subsets"
    pairs = "pairs"
    cross_request_pairs = "cross_request_pairs"


class Demand:
    """Per-tenant chunk popularity and request rate, decayed over HORIZON_S.

    Not thread-safe.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._popularity = Popularity()
        self._requests: dict[str, tuple[float, float]] = {}  # of a tenant: how many, decayed, and as of when
        self._chunks: dict[str, tuple[float, float]] = {}  # of a tenant's, decayed: that had come before, and all

    def observe(self, tenant: str, contents: Sequence[str]) -> None:
        """A request brought these."""
        again, of_all = self._chunks.get(tenant, (0.0, 0.0))
        for share in self.shares(tenant, contents):
            again, of_all = (count * (1 - 1 / _RECENT_CHUNKS) for count in (again + (share > 0), of_all + 1))
        self._chunks[tenant] = again, of_all
        self._popularity.observe(tenant, contents)
        self._requests[tenant] = self.requests(tenant) + 1.0, self._clock()

    def requests(self, tenant: str) -> float:
        """Requests expected of a tenant within the horizon: as many as came in the last one."""
        count, since = self._requests.get(tenant, (0.0, 0.0))
        return count * math.exp((since - self._clock()) / HORIZON_S) if count else 0.0

    def expected(self, tenant: str, content: str) -> float:
        """Requests of a tenant that are expected to bring a content within the horizon."""
        return self.requests(tenant) * self._popularity.share(tenant, content)

    def asked_again(self, tenant: str, content: str) -> bool:
        """True if more than one of a tenant's requests brought a content, of late."""
        return self._popularity.asked(tenant, content) >= ASKED_AGAIN

    def odds_against(self, tenant: str) -> float:
        """Odds against a tenant's chunk having come before, of late.

        Near 0 if all come again, large if none does.
        """
        again, of_all = self._chunks.get(tenant, (0.0, 0.0))
        return (of_all - again + 1) / (again + 1)  # the rule of succession

    def shares(self, tenant: str, contents: Sequence[str]) -> list[float]:
        """The shares of a tenant's requests that bring each of the contents."""
        return [self._popularity.share(tenant, content) for content in contents]


@dataclass(eq=False)
class CompileJob(Generic[Item]):
    """Forwards over chunks of one served set.

    `steps` are those left, as indices into its chunks, the most valuable first; a step of pairs is that of all its
    chunks behind the first (`candidate_sets.PairBatch`). At most `forwards` orders, subsets or pairs are run. Of its
    chunks the set brought the first `own`, or all.
    """

    kind: JobKind
    item: Item
    tenant: str
    prefix: tuple[int, ...]
    contents: tuple[str, ...]
    tokens: tuple[int, ...]
    steps: list[tuple[int, ...]]
    forwards: int
    own: int | None = None

    @property
    def name(self) -> Hashable:
        """Identity of a job: when its set comes again, the new job of that kind has the same."""
        return self.kind, self.tenant, self.prefix, self.contents[: self.own]

    @property
    def has_pairs(self) -> bool:
        """True if its steps are pairs, for pair patches."""
        return self.kind in (JobKind.pairs, JobKind.cross_request_pairs)

    def is_over(self, content: str, tenant: str) -> bool:
        """True if it runs over a content of a tenant, or of everybody."""
        return content in self.contents and reaches(content, tenant, self.tenant)

    def awaits(self, awaited: Collection[tuple[str, str]]) -> bool:
        """True if it runs over one of these (tenant, content)."""
        return bool(awaited) and any((self.tenant, content) in awaited for content in self.contents)

    def tokens_saved(self, demand: Demand) -> float:
        """Tokens that the next step's patches are expected to save.

        The orders of a set are one step.
        """
        step = self.steps[0]
        shares, tokens = demand.shares(self.tenant, [self.contents[i] for i in step]), [self.tokens[i] for i in step]
        if self.kind is JobKind.prefix_subsets:
            saved = sum(math.prod(shares[: i + 1]) * count for i, count in enumerate(tokens))
        elif self.has_pairs:
            saved = sum(candidate_sets.pair_value(0, i, shares, tokens) for i in range(1, len(step)))
        else:
            saved = math.prod(shares) * sum(tokens)
        return demand.requests(self.tenant) * saved

    def step_tokens(self) -> int:
        """Tokens that the next step computes, of orders that one of them does."""
        return sum(self.tokens[i] for i in self.steps[0])

    def longest(self) -> int:
        """Tokens of the longest run of chunks of the next step."""
        first, *others = (self.tokens[i] for i in self.steps[0])
        return first + (max(others) if self.has_pairs else sum(others))

    def nbytes(self, of_patch: Callable[[int], int]) -> int:
        """Bytes of the next step's patches.

        `of_patch`: of one for a chunk of so many tokens.
        """
        sizes = [of_patch(self.tokens[i]) for i in self.steps[0]]
        if self.kind is not JobKind.orders:
            return sum(sizes)
        others = len(sizes) - 1
        exhaustive = math.factorial(others) <= ORBIT_ORDERINGS
        return sum(sizes) * (2**others if exhaustive else others + 2)  # behind all subsets, or none, each and all

    def priority(self, demand: Demand) -> float:
        """Expected reuses * seconds saved per second that the next step takes."""
        forwards = self.forwards if self.kind is JobKind.orders else 1
        return self.tokens_saved(demand) / (self.step_tokens() * forwards)


def jobs(
    item: Item,
    tenant: str,
    prefix: tuple[int, ...],
    contents: Sequence[str],
    tokens: Sequence[int],
    limits: CompileLimits,
    demand: Demand,
) -> list[CompileJob[Item]]:
    """Compile jobs of a served set of different chunks.

    All orders of a small one, prefix subsets and pairs of others.

    The orders of a set leave the patches of its pairs as well. They are left to a set that is expected again, where
    pairs serve it for less: of 3 chunks by half of the tokens, and other sets besides.
    """
    count = len(contents)
    shares, found = demand.shares(tenant, contents), list[CompileJob[Item]]()
    summed = bool(limits.pair_forwards) and count - 1 in composed_antecedents(limits.compose_up_to)
    expected = demand.requests(tenant) * math.prod(shares)

    def job(kind: JobKind, steps: list[tuple[int, ...]], forwards: int) -> CompileJob[Item]:
        return CompileJob(kind, item, tenant, prefix, tuple(contents), tuple(tokens), steps, forwards)

    if count < 2 or not limits.share:
        return []
    small = count <= limits.orbit_chunks
    if small and not (summed and expected < ASKED_AGAIN):
        exhaustive = math.factorial(count - 1) <= ORBIT_ORDERINGS
        forwards = math.factorial(count) if exhaustive else count * ORBIT_ORDERINGS
        found.append(job(JobKind.orders, [tuple(range(count))], forwards))
    if limits.subset_forwards and not small:
        subsets = candidate_sets.prefix_subsets(shares, tokens)
        best = [subset.chunks for subset in subsets[: _LOOKS * limits.subset_forwards]]
        found.append(job(JobKind.prefix_subsets, best, limits.subset_forwards))
    if limits.pair_forwards and (summed or not small):
        batches = candidate_sets.pair_batches(shares, tokens, limits.pair_forwards)
        found.append(job(JobKind.pairs, [batch.chunks for batch in batches], limits.pair_forwards))
    return found


def cross_request_jobs(
    item: Item,
    tenant: str,
    prefix: tuple[int, ...],
    contents: Sequence[str],
    tokens: Sequence[int],
    own: int,
    limits: CompileLimits,
    demand: Demand,
) -> list[CompileJob[Item]]:
    """Pairs of a served set's chunks with others of its tenant that it did not bring.

    The set's own are the first `own`.

    Of those that were asked for more than once: nobody has yet come back for the others.
    """
    again = [i for i, content in enumerate(contents) if demand.asked_again(tenant, content)]
    shares, most = demand.shares(tenant, contents), limits.pair_forwards
    mine, others = [i for i in again if i < own], [i for i in again if i >= own]
    likely = candidate_sets.cross_request_pairs(mine, others, shares, tokens)
    steps = [batch.chunks for batch in likely[: _LOOKS * most]]
    if not (steps and limits.share):
        return []
    return [
        CompileJob(JobKind.cross_request_pairs, item, tenant, prefix, tuple(contents), tuple(tokens), steps, most, own)
    ]


class CompileQueue(Generic[Item]):
    """Jobs that wait, at most `limit`: the least valuable give way. Not thread-safe.

    A job's value follows demand while it waits. A set that comes again takes the place of its former jobs.
    """

    def __init__(self, limit: int, demand: Demand) -> None:
        self._limit, self._demand = limit, demand
        self._waiting: dict[Hashable, CompileJob[Item]] = {}
        self.dropped = 0  # that gave way

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: CompileJob[Item]) -> None:
        """Let a job wait, unless a full queue holds only better ones."""
        self._waiting[job.name] = job
        if len(self._waiting) > self._limit:
            least = min(self._waiting, key=lambda name: self._waiting[name].priority(self._demand))
            del self._waiting[least]
            self.dropped += 1

    def best(self, awaited: Collection[tuple[str, str]] = ()) -> CompileJob[Item] | None:
        """The job that goes next; of equal ones that which has waited longest.

        Not one over `awaited` contents (tenant, content): what its patches are measured against is still to be kept.
        """
        able = (job for job in self._waiting.values() if not job.awaits(awaited))
        return max(able, key=lambda job: job.priority(self._demand), default=None)

    def remove(self, job: CompileJob[Item]) -> None:
        """Remove a job."""
        del self._waiting[job.name]

    def forget(self, content: str, tenant: str) -> None:
        """Give up the jobs over a tenant's content that was deleted, or everybody's."""
        for job in list(self._waiting.values()):
            if job.is_over(content, tenant):
                self.remove(job)


class ComputeBudget:
    """Seconds of work that may be spent: a share of the time that passes.

    Saved up for `window_s` at most.

    Whoever finds it `is_open` may begin a step, however long: what that takes too much is waited for afterwards.
    """

    def __init__(self, share: float, window_s: float = _WINDOW_S, clock: Clock = time.monotonic) -> None:
        self._share, self._most, self._clock = share, share * window_s, clock
        self._left, self._since = self._most, clock()

    @property
    def is_open(self) -> bool:
        """True if a step may begin."""
        return self._at(self._clock()) > 0

    def spend(self, seconds: float) -> None:
        """Spend the seconds of a step that has ended now."""
        now = self._clock()
        self._left, self._since = self._at(now) - seconds, now

    def _at(self, now: float) -> float:
        return min(self._left + self._share * (now - self._since), self._most)
