"""Placement against arrival order: share of chunks with a patch, and time to choose.

A trace of retrieval requests (MRAG): each brings k different pages, drawn by Zipf's law over N pages, in random order.
The index, the orderer and the choice of what to compile are the product's; only the engine is left out, and a patch is
stored at once. A chunk that finds no patch is computed, and leaves its own patch if all before it were computed, too; a
set of at most `prefill.orbit_chunks` leaves orbit patches for every order, of a larger one `prefill.subset_forwards`
subsets are compiled.
With pairs, these are compiled as well, and their sums serve chunks behind up to `prefill.compose_up_to` others. Every
arm holds as many patches as `budget`; those that were used longest ago go first. The compute budget is left out; how
many forwards per request an arm compiles is reported.

| arm | order | compiled besides what was served |
|---|---|---|
| placed, pairs | placement's | what the product compiles: subsets, and pairs |
| arrival, pairs | as sent | the same |
| placed | placement's | the same without pairs |
| arrival | as sent | the same without pairs |
| placed, served only | placement's | nothing |
| placed, unbounded | placement's | `UNBOUNDED_SUBSETS` subsets of every set, and no patch ever goes |
| arrival, served only | as sent | nothing |
| optimum | with hindsight | every order of every set that was served |

The optimum knows the whole trace and has no budget: a request hits as many chunks as the largest part of it that came
in one earlier request, which no order of requests and no patch formed from served sets can exceed; sums of pairs can.
What placement without bounds hits of it is the orders' doing; the rest of what `placed` misses is the budgets'.
Hit rates are shares of all chunks, the first request's included; the second table leaves out leading chunks, which
almost always hit.

Plans are timed as the product makes them, where they take longest: all pairs of all pages are stored.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from kvstore.catalog.index import Entry, PatchIndex, Scope, prefix_key
from prefill_workers.background.compile_queue import CROSS_REQUEST_CHUNKS, Demand, JobKind, cross_request_jobs, jobs
from prefill_workers.modes import composed_antecedents
from prefill_workers.settings import COMPOSE_UP_TO, CompileLimits, PrefillSettings
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.placement.orderer import PatchAwareOrderer
from serving.placement.search import place

PAGES, RETRIEVED, REQUESTS, ZIPF, BUDGET = 100, 5, 2000, 1.0, 5000
UNBOUNDED_SUBSETS = 16
_TENANT = "local"
_SCOPE = Scope(_TENANT, prefix_key(()))
_TOKENS = 256
_SIZES = (4, 8, 12)
NOTHING = CompileLimits(share=0)


def run(quick: bool, console: Console) -> Outcome:
    """Time plans and replay traces; `quick`: a shorter one, of one size."""
    requests = REQUESTS // 10 if quick else REQUESTS
    retrieved = (RETRIEVED,) if quick else (3, RETRIEVED, 8)
    arm = Arm(
        "plan",
        "CPU time of an order of so many pages, after 300 requests, all pairs stored, one core",
        {str(size): _plan_ms(size, turns=20 if quick else 200) for size in _SIZES},
    )
    found: dict[str, dict[str, HitRate]] = {}
    for count in track(retrieved, "traces", console=console, transient=True):
        for name, rate in _rates(trace(PAGES, count, requests)).items():
            found.setdefault(name, {})[f"{count} pages"] = rate
    headline = {name: by_size[f"{RETRIEVED} pages"].of_all for name, by_size in found.items()}
    figures = {
        "plan_ms_8": arm.median_ms("8"),
        "plan_ms_12": arm.median_ms("12"),
        "hit_rate_placed": headline["placed"],
        "hit_rate_arrival": headline["arrival"],
        "hit_rate_over_arrival": headline["placed"] / headline["arrival"],
        "hit_rate_over_optimum": headline["placed"] / headline["optimum"],
        "hit_rate_unbounded_over_optimum": headline["placed, unbounded"] / headline["optimum"],
        "hit_rate_placed_pairs": headline["placed, pairs"],
        "hit_rate_arrival_pairs": headline["arrival, pairs"],
        "hit_rate_pairs_over_arrival_pairs": headline["placed, pairs"] / headline["arrival, pairs"],
        "hit_rate_pairs_over_optimum": headline["placed, pairs"] / headline["optimum"],
    }
    settings = PrefillSettings()
    workload = {
        "pages": PAGES,
        "retrieved": RETRIEVED,
        "requests": requests,
        "zipf_exponent": ZIPF,
        "budget_patches": BUDGET,
        "orbit_chunks": settings.orbit_chunks,
        "subset_forwards": settings.subset_forwards,
        "pair_forwards": settings.pair_forwards,
        "compose_up_to": COMPOSE_UP_TO,
        "optimum": "the largest part of a request that came in one earlier request; no budget",
    }

    def rows(of: Callable[[HitRate], float | None]) -> dict[str, dict[str, float]]:
        known = {
            name: {size: value for size, rate in rates.items() if (value := of(rate)) is not None}
            for name, rates in found.items()
        }
        return {name: cells for name, cells in known.items() if cells}

    tables = {
        "p99 ms": {arm.name: {size: float(np.percentile(times, 99)) for size, times in arm.samples_ms.items()}},
        "hit rate by pages retrieved": rows(lambda rate: rate.of_all),
        "hit rate of chunks behind others": rows(lambda rate: rate.of_others),
        "chunks that sums of pairs serve": rows(lambda rate: rate.summed),
        "forwards compiled per request": rows(lambda rate: rate.forwards),
        "chunks behind two or more whose very order came before": rows(lambda rate: rate.again),
    }
    return Outcome(workload, [arm], figures, tables, axis="pages")


def _plan_ms(size: int, turns: int) -> list[float]:
    """CPU milliseconds of choosing orders for requests of this size, index queries included."""
    limits = PrefillSettings().compile_limits(COMPOSE_UP_TO)
    library, found = Library(PatchIndex(), limits), []
    pages = [f"page {number}" for number in range(PAGES)]
    behind = ((page, before) for page in pages for before in ((), *((other,) for other in pages if other != page)))
    library.orderer.formed(Entry(_SCOPE, page, before, ordered=False) for page, before in behind)
    for request in trace(PAGES, size, 300 + turns):
        began = time.thread_time()
        library.orderer.popularity.observe(_TENANT, request)
        order = place(library.orderer.problem(request, [0] * size, _TENANT, ())).order
        found.append((time.thread_time() - began) * 1e3)
        library.serve([request[i] for i in order])
    return found[-turns:]


def trace(pages: int, retrieved: int, requests: int, seed: int = 0) -> list[list[str]]:
    """Requests of different pages in random order, drawn one after another by Zipf's law."""
    draw = random.Random(seed)
    numbers = range(pages)
    weights = [1 / (number + 1) ** ZIPF for number in numbers]
    found = []
    for _ in range(requests):
        chosen: dict[int, None] = {}
        while len(chosen) < retrieved:
            chosen[draw.choices(numbers, weights)[0]] = None
        order = list(chosen)
        draw.shuffle(order)
        found.append([f"page {number}" for number in order])
    return found


class HitRate(NamedTuple):
    """Chunks that found a patch, as a share of all, and of those that stand behind others.

    `again`: of those behind two or more, the share whose very order came before: weights of sums are known then.
    `summed`: share of all that sums of pairs served; None where there are none. `forwards`: that were compiled, per
    request.
    """

    of_all: float
    of_others: float
    again: float | None = None
    summed: float | None = None
    forwards: float | None = None


def _rates(requests: list[list[str]]) -> dict[str, HitRate]:
    product, plain = (PrefillSettings().compile_limits(up_to) for up_to in (COMPOSE_UP_TO, 0))
    unbounded = PrefillSettings(subset_forwards=UNBOUNDED_SUBSETS).compile_limits(0)
    return {
        "placed": replay(requests, plain, placed=True),
        "arrival": replay(requests, plain, placed=False),
        "placed, served only": replay(requests, NOTHING, placed=True),
        "arrival, served only": replay(requests, NOTHING, placed=False),
        "placed, unbounded": replay(requests, unbounded, placed=True, budget=sys.maxsize),
        "optimum": optimum(requests),
        "placed, pairs": replay(requests, product, placed=True),
        "arrival, pairs": replay(requests, product, placed=False),
    }


def optimum(requests: Sequence[Sequence[str]]) -> HitRate:
    """See the module."""
    sets = [frozenset(request) for request in requests]
    hits = [max((len(now & before) for before in sets[:i]), default=0) for i, now in enumerate(sets)]
    leading, chunks = sum(hit > 0 for hit in hits), sum(map(len, requests))
    return HitRate(sum(hits) / chunks, (sum(hits) - leading) / (chunks - len(requests)))


class Served(NamedTuple):
    """Chunks of a request by what served them: a patch (one or a sum), or a sum."""

    patched: list[bool]
    summed: list[bool]


class Library:
    """Stored patches, as an up-to-date orderer's index, and compilation for them."""

    def __init__(self, index: PatchIndex, limits: CompileLimits) -> None:
        self._limits = limits
        self._demand = Demand(clock=lambda: 0.0)  # all of a trace comes within the hour
        self._known: dict[str, None] = {}  # what requests brought
        self.forwards = 0  # that compiling took
        self.orderer = PatchAwareOrderer(index, compose_up_to=limits.compose_up_to if limits.pair_forwards else 0)

    def serve(self, order: Sequence[str]) -> Served:
        """Link chunks in this order, and compile what the product would."""
        self._demand.observe(_TENANT, order)
        self._known |= dict.fromkeys(order)
        found, exact = Served([], []), True
        for i, content in enumerate(order):
            whole = [Entry(_SCOPE, content, tuple(order[:i]), ordered) for ordered in (True, False)]
            stored = self._stored(whole)
            parts = [] if stored else self._parts(content, order[:i])
            found.patched.append(bool(stored or parts))
            found.summed.append(bool(parts))
            self.orderer.formed(stored or parts or whole[:exact])
            exact = exact and not (stored or parts)
        if not all(found.patched):
            self._compile(order)
        return found

    def _stored(self, entries: Iterable[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry in self.orderer.index]

    def _parts(self, content: str, before: Sequence[str]) -> list[Entry]:
        """The patches whose sum serves a chunk behind others; none if one of them is not stored."""
        if len(before) not in composed_antecedents(self.orderer.compose_up_to):
            return []
        parts = [Entry(_SCOPE, content, part, ordered=False) for part in ((), *zip(before))]
        return parts if len(self._stored(parts)) == len(parts) else []

    def _compile(self, order: Sequence[str]) -> None:
        """As `prefill_workers.background.patch_precompiler`, but at once."""
        limits, demand, tokens = self._limits, self._demand, [_TOKENS] * (len(order) + CROSS_REQUEST_CHUNKS)
        found = jobs(None, _TENANT, (), order, tokens[: len(order)], limits, demand)
        if limits.pair_forwards:
            others = [content for content in self._known if content not in order]
            popular = sorted(others, key=lambda content: -demand.expected(_TENANT, content))[:CROSS_REQUEST_CHUNKS]
            company = [*order, *popular]
            found += cross_request_jobs(None, _TENANT, (), company, tokens[: len(company)], len(order), limits, demand)
        for job in found:
            for step in job.steps:
                if job.forwards:
                    ran = self._run(job.kind, [job.contents[i] for i in step], job.forwards)
                    job.forwards -= ran
                    self.forwards += ran

    def _run(self, kind: JobKind, names: Sequence[str], limit: int) -> int:
        """A step of a job: the patches that it leaves.

        Returns how many forwards it takes; the orders of a set are one step, of `limit` forwards.
        """
        if kind is JobKind.orders:
            missing = not self._stored([Entry(_SCOPE, names[-1], tuple(names[:-1]), ordered=False)])
            for content in names:
                others = [other for other in names if other != content]
                sets = (chosen for size in range(len(names)) for chosen in combinations(others, size))
                self.orderer.formed(Entry(_SCOPE, content, chosen, ordered=False) for chosen in sets)
            return limit if missing else 0
        if kind is JobKind.prefix_subsets:
            made = [Entry(_SCOPE, name, tuple(names[:i]), ordered=True) for i, name in enumerate(names)]
            missing = not self._stored(made[-1:])
            if missing:
                self.orderer.formed(entry for entry in made if entry not in self.orderer.index)
            return int(missing)
        first, *others = names
        lacking = [pair for one in others if not self._stored([pair := Entry(_SCOPE, one, (first,), ordered=False)])]
        alone = Entry(_SCOPE, first, (), ordered=False)
        if lacking and not self._stored([alone]):
            self.orderer.formed([alone])
        self.orderer.formed(lacking[:limit])
        return len(lacking[:limit])


def replay(requests: Sequence[Sequence[str]], limits: CompileLimits, *, placed: bool, budget: int = BUDGET) -> HitRate:
    """Serve a trace, placed or as sent, compiling within limits; `budget`: patches kept."""
    library = Library(PatchIndex(budget), limits)
    leading = others = summed = again = 0
    came: set[tuple[str, ...]] = set()
    for request in requests:
        group = 0 if placed else None
        library.orderer.popularity.observe(_TENANT, request)
        order = place(library.orderer.problem(request, [group] * len(request), _TENANT, ())).order
        chosen = [request[i] for i in order]
        served = library.serve(chosen)
        first, *rest = served.patched
        leading, others, summed = leading + first, others + sum(rest), summed + sum(served.summed)
        paths = {tuple(chosen[: i + 1]) for i in range(2, len(chosen))}
        again += len(paths & came)
        came |= paths
    chunks = sum(map(len, requests))
    behind_two = sum(max(0, len(request) - 2) for request in requests)
    return HitRate(
        of_all=(leading + others) / chunks,
        of_others=others / (chunks - len(requests)),
        again=again / behind_two if behind_two else None,
        summed=summed / chunks if limits.pair_forwards else None,
        forwards=library.forwards / len(requests) if limits.share else None,
    )


BENCHMARK = Benchmark(
    "placement",
    "How often chunks find a patch when placement orders them, against arrival and the optimum, and what it takes.",
    run,
    {
        "plan_ms_8": ("<=", 1.0),
        "plan_ms_12": ("<=", 10.0),
        "hit_rate_over_arrival": (">=", 2.0),
        "hit_rate_over_optimum": (">=", 0.9),
    },
)
