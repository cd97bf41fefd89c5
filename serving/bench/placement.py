"""Placement against the order of arrival: how often a chunk finds a patch, and how long choosing an order takes.

A trace of retrieval requests (MRAG): each brings k different pages, drawn by Zipf's law over N pages, in random order.
The index, the arranger and the choice of what to compile are the product's; only the engine is left out, and a patch is
stored at once. A chunk that finds no patch is computed and leaves its own patch; a set of at most
`prefill.orbit_chunks` leaves orbit patches for every order, of a larger one `prefill.part_forwards` parts are compiled.
Pairs, whose sums would serve some chunks that find no patch here, and the compute budget are left out.
Every arm holds as many patches as `budget`; those that were used longest ago go first.

| arm | order | compiled besides what was served |
|---|---|---|
| arrival | as sent | what the product compiles |
| placed | placement's | what the product compiles |
| placed, served only | placement's | nothing |
| arrival, served only | as sent | nothing |
| optimum | with hindsight | every order of every set that was served |

The optimum knows the whole trace and has no budget: a request hits as many chunks as the largest part of it that came
in one earlier request, which no order of requests and no patch formed from served sets can exceed. Hit rates are shares
of all chunks, the first request's included; the second table leaves out leading chunks, which almost always hit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from kvstore.index import Entry, PatchIndex, Scope, prefix_key
from prefill_workers.predictions import parts
from prefill_workers.settings import PrefillSettings
from serving.arranger import Arranger
from serving.bench.harness import Arm, Benchmark, Outcome

PAGES, RETRIEVED, REQUESTS, ZIPF, BUDGET = 100, 5, 2000, 1.0, 5000
_TENANT = "local"
_SCOPE = Scope(_TENANT, prefix_key(()))
_TOKENS = 256
_LOOKS = 8  # as `prefill_workers.compiling`: parts looked up for each that is compiled
_SIZES = (4, 8, 12)


def run(quick: bool, console: Console) -> Outcome:
    """Time plans and replay traces; `quick`: a shorter one, of one size."""
    requests = REQUESTS // 10 if quick else REQUESTS
    retrieved = (RETRIEVED,) if quick else (3, RETRIEVED, 8)
    timed = {str(size): _plan_ms(size, turns=20 if quick else 200) for size in _SIZES}
    rates: dict[str, dict[str, float]] = {}
    behind: dict[str, dict[str, float]] = {}
    again: dict[str, dict[str, float]] = {}
    for count in track(retrieved, "traces", console=console, transient=True):
        for name, rate in _rates(trace(PAGES, count, requests)).items():
            rates.setdefault(name, {})[f"{count} pages"] = rate.of_all
            behind.setdefault(name, {})[f"{count} pages"] = rate.of_others
            if rate.again is not None:
                again.setdefault(name, {})[f"{count} pages"] = rate.again
    headline = {name: by_size[f"{RETRIEVED} pages"] for name, by_size in rates.items()}
    arm = Arm("plan", "CPU time of an order of so many pages, after 300 requests, one core", timed)
    figures = {
        "plan_ms_8": arm.median_ms("8"),
        "plan_ms_12": arm.median_ms("12"),
        "hit_rate_placed": headline["placed"],
        "hit_rate_arrival": headline["arrival"],
        "hit_rate_over_arrival": headline["placed"] / headline["arrival"],
        "hit_rate_over_optimum": headline["placed"] / headline["optimum"],
    }
    settings = PrefillSettings()
    workload = {
        "pages": PAGES,
        "retrieved": RETRIEVED,
        "requests": requests,
        "zipf_exponent": ZIPF,
        "budget_patches": BUDGET,
        "orbit_chunks": settings.orbit_chunks,
        "part_forwards": settings.part_forwards,
        "optimum": "the largest part of a request that came in one earlier request; no budget",
    }
    tables = {
        "hit rate by pages retrieved": rates,
        "hit rate of chunks behind others": behind,
        "chunks behind two or more whose very order came before": again,
    }
    return Outcome(workload, [arm], figures, tables)


def _plan_ms(size: int, turns: int) -> list[float]:
    """CPU milliseconds of choosing orders at the end of a trace of so large requests, from asking the index on."""
    requests = trace(PAGES, size, 300 + turns)
    library, found = _Library(Arranger(PatchIndex(BUDGET)), compiles=True), []
    for request in requests:
        began = time.thread_time()
        order = library.arranger.order(request, [0] * size, _TENANT, ()).placement.order
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
    """

    of_all: float
    of_others: float
    again: float | None = None

    @classmethod
    def of(cls, requests: Sequence[Sequence[str]], leading: int, others: int, again: int | None = None) -> HitRate:
        """From how many leading chunks and how many others found one, and how many came in an order a second time."""
        chunks = sum(map(len, requests))
        behind_two = sum(max(0, len(request) - 2) for request in requests)
        return cls(
            (leading + others) / chunks,
            others / (chunks - len(requests)),
            None if again is None or not behind_two else again / behind_two,
        )


def _rates(requests: list[list[str]]) -> dict[str, HitRate]:
    return {
        "placed": replay(requests, placed=True),
        "arrival": replay(requests, placed=False),
        "placed, served only": replay(requests, placed=True, compiles=False),
        "arrival, served only": replay(requests, placed=False, compiles=False),
        "optimum": optimum(requests),
    }


def optimum(requests: Sequence[Sequence[str]]) -> HitRate:
    """See the module."""
    sets = [frozenset(request) for request in requests]
    hits = [max((len(now & before) for before in sets[:i]), default=0) for i, now in enumerate(sets)]
    leading = sum(hit > 0 for hit in hits)
    return HitRate.of(requests, leading, sum(hits) - leading)


@dataclass
class _Library:
    """What is stored, as the index of an arranger that hears of everything at once."""

    arranger: Arranger
    compiles: bool

    def serve(self, order: Sequence[str]) -> list[bool]:
        """Link chunks in this order, and compile what the product would; returns which were patched."""
        patched = []
        for i, content in enumerate(order):
            served = [Entry(_SCOPE, content, tuple(order[:i]), ordered) for ordered in (True, False)]
            stored = [entry for entry in served if entry in self.arranger.index]
            patched.append(bool(stored))
            self.arranger.formed(stored or served[:1])
        if self.compiles and not all(patched):
            self._compile(order)
        return patched

    def _compile(self, order: Sequence[str]) -> None:
        settings = PrefillSettings()
        if len(order) <= settings.orbit_chunks:
            for content in order:
                others = [other for other in order if other != content]
                sets = (chosen for size in range(len(order)) for chosen in combinations(others, size))
                self.arranger.formed(Entry(_SCOPE, content, chosen, ordered=False) for chosen in sets)
            return
        left = settings.part_forwards
        shares = [self.arranger.popularity.share(_TENANT, content) for content in order]
        for part in islice(parts(shares, [_TOKENS] * len(order)), _LOOKS * left):
            names = [order[i] for i in part.chunks]
            made = [Entry(_SCOPE, name, tuple(names[:i]), ordered=True) for i, name in enumerate(names)]
            if made[-1] not in self.arranger.index and left:
                left -= 1
                self.arranger.formed(entry for entry in made if entry not in self.arranger.index)


def replay(requests: Sequence[Sequence[str]], *, placed: bool, compiles: bool = True) -> HitRate:
    """Serve a trace, in placement's order or as sent."""
    library = _Library(Arranger(PatchIndex(BUDGET)), compiles)
    leading = others = again = 0
    came: set[tuple[str, ...]] = set()
    for request in requests:
        group = 0 if placed else None
        order = library.arranger.order(request, [group] * len(request), _TENANT, ()).placement.order
        chosen = [request[i] for i in order]
        first, *rest = library.serve(chosen)
        leading, others = leading + first, others + sum(rest)
        paths = {tuple(chosen[: i + 1]) for i in range(2, len(chosen))}
        again += len(paths & came)
        came |= paths
    return HitRate.of(requests, leading, others, again)


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
