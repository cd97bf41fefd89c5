"""Value of compiling for a known trace: against the offline optimum, and for later requests.

A trace of retrieval requests as in `placement`. Its first half is the access log, from which `compile_plan` chooses
patches within a budget of bytes, of the size that a 7B model's have; the second half is then linked by nothing but
these, in placement's order or as sent. Nothing is formed on the way, so that what was compiled ahead shows.

| table | |
|---|---|
| share of the optimum | seconds that the choice saves the log, over what no choice within the budget exceeds |
| saved of the log | the same over all that computing its chunks takes |
| patched afterwards | chunks of the second half that find their patch, or all pairs that make it up |
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track

from kvstore.catalog.index import Entry, prefix_key
from kvstore.catalog.index import Scope as IndexScope
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.patch_form import PatchForm
from prefill_workers.link.token_selection import MEASURED_LAYER
from prefill_workers.settings import COMPOSE_UP_TO
from serving.access_log import VERSION, LoggedChunk, LoggedRequest
from serving.bench.harness import Arm, Benchmark, Outcome
from serving.offline.compile_plan import Kind, Plan, Terms, plan, trace_of
from serving.offline.knapsack import Cost
from serving.placement.orderer import LinkCosts, PatchAwareOrderer
from serving.placement.search import place
from tests.benchmarks.placement import PAGES, REQUESTS, RETRIEVED, ZIPF, trace

TOKENS = 1024  # of a page
BUDGETS = {"256 MiB": 2**28, "1 GiB": 2**30, "4 GiB": 2**32}
_HEADLINE = "1 GiB"
_TENANT, _PREFIX = "local", prefix_key(())
_LAYOUT = Layout.gqa(28, 4, 128, RotaryScheme((1.0,), "neox"))  # Qwen2.5-VL-7B


def run(quick: bool, console: Console) -> Outcome:
    """Plan for every kind, order and budget; `quick`: a tenth of the requests."""
    count = REQUESTS // 10 if quick else REQUESTS
    requests = trace(PAGES, RETRIEVED, count)
    log, later = requests[: count // 2], requests[count // 2 :]
    shares: dict[str, dict[str, float]] = {}
    saved: dict[str, dict[str, float]] = {}
    after: dict[str, dict[str, float]] = {}
    planning: dict[str, list[float]] = {}
    costs = LinkCosts()
    whole = costs.forward.seconds(TOKENS) * sum(map(len, log))
    cases = [(kind, placed) for placed in (True, False) for kind in Kind]
    for kind, placed in track(cases, "plans", console=console, transient=True):
        name = f"{kind}, {'placed' if placed else 'as sent'}"
        for label, size in BUDGETS.items():
            began = time.perf_counter()
            found = plan(trace_of(_logged(log, placed), {_PREFIX: ()}), kind, _terms(costs), Cost(size, math.inf))
            planning.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
            shares.setdefault(name, {})[label] = found.share
            saved.setdefault(name, {})[label] = found.saves / whole
            after.setdefault(name, {})[label] = patched_share(found, later, placed=placed)
    figures = {
        **{f"share_of_optimum_{kind}": shares[f"{kind}, placed"][_HEADLINE] for kind in Kind},
        **{f"patched_afterwards_{kind}": after[f"{kind}, placed"][_HEADLINE] for kind in Kind},
    }
    workload = {
        "pages": PAGES,
        "tokens": TOKENS,
        "retrieved": RETRIEVED,
        "logged": len(log),
        "afterwards": len(later),
        "zipf_exponent": ZIPF,
        "compose_up_to": COMPOSE_UP_TO,
        "patch_bytes": _terms(costs).patch_bytes(TOKENS),
        "headline_budget": _HEADLINE,
    }
    tables = {"share of the optimum": shares, "saved of the log": saved, "patched afterwards": after}
    arm = Arm("plan", "reading aside: order, candidates, choice and bound, per budget", planning)
    return Outcome(workload, [arm], figures, tables)


def _terms(costs: LinkCosts) -> Terms:
    return Terms(
        forward=costs.forward,
        place=costs.place,
        patch_bytes=lambda tokens: PatchForm().footprint(tokens, _LAYOUT, torch.bfloat16).own,
        first_layers=(MEASURED_LAYER + 1) / _LAYOUT.layers,
        compose_up_to=COMPOSE_UP_TO,
    )


def _logged(requests: Sequence[Sequence[str]], placed: bool) -> list[LoggedRequest]:
    group = 0 if placed else None
    return [
        LoggedRequest(
            v=VERSION,
            time=0.0,
            model="",
            tenant=_TENANT,
            mode="auto",
            sample=1.0,
            prefix=_PREFIX,
            chunks=tuple(
                LoggedChunk(content=name.replace(" ", "-"), modality="text", tokens=TOKENS, point="", group=group)
                for name in request
            ),
        )
        for request in requests
    ]


def patched_share(compiled: Plan, requests: Sequence[Sequence[str]], *, placed: bool) -> float:
    """Share of the requests' chunks that a plan's patches serve, placed or as sent."""
    orderer = PatchAwareOrderer(compose_up_to=COMPOSE_UP_TO)
    stored = {
        Entry(IndexScope(*wanted.scope), wanted.contents[-1], wanted.contents[:-1], wanted.ordered)
        for wanted in compiled.patches
    }
    orderer.formed(stored)
    scope, hits, chunks = IndexScope(_TENANT, _PREFIX), 0, 0
    for request in requests:
        contents = [name.replace(" ", "-") for name in request]
        groups = [0 if placed else None] * len(contents)
        orderer.popularity.observe(_TENANT, contents)
        order = [contents[i] for i in place(orderer.problem(contents, groups, _TENANT, ())).order]
        for at, content in enumerate(order):
            before = tuple(order[:at])
            direct = any(Entry(scope, content, before, ordered) in stored for ordered in (True, False))
            alone = [(), *((one,) for one in before)]
            parts = (Entry(scope, content, one, False) in stored for one in alone)
            hits += direct or (1 < at <= COMPOSE_UP_TO and all(parts))
            chunks += 1
    return hits / chunks


BENCHMARK = Benchmark(
    "compile-trace",
    "What patches chosen from an access log save, against the offline optimum and to later requests.",
    run,
    {f"share_of_optimum_{kind}": (">=", 0.9) for kind in Kind},
)
