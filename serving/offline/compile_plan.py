"""Which patches to compile for a known trace, within a budget of bytes and seconds.

Sets. Requests that leave their order free are put in one order, the popular chunks first, as placement does among
orders of equal cost; others stay as they are. So all requests of a tenant behind one prefix make a tree:

    requests  a b c, a b, a d        a ─┬─ b ── c        one own patch per node, worth what it spares
                                        └─ d             every request that passes through it

A patch serves its chunk however those before it were linked, so nodes are worth something independently of each other.
To make one, a forward must run over all chunks on the way to it; nodes share these forwards.

Pairs. A chunk behind up to `compose_up_to` others needs no patch of their set where those behind each of them, and
behind none, are stored (see `prefill_workers.link.compose`). There are fewer pairs than sets, and several requests
share each; but all of a chunk's pairs must be there before any is worth something.

Pure functions and values. Times are seconds, as the trace's own links took them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from autoscale.curves import ForwardCost
from kvstore.records.keys import owner_of
from prefill_workers.modes import composed_antecedents
from serving.access_log import LoggedChunk, LoggedRequest
from serving.offline.knapsack import UNBOUNDED, Cost, Demand, bound, pick


class Kind(StrEnum):
    """Kinds of patches that a plan compiles."""

    sets = "sets"
    pairs = "pairs"


class Scope(NamedTuple):
    """Owner of patches, and the digest of the fixed prefix that they are behind."""

    owner: str
    prefix: str


class Wanted(NamedTuple):
    """A patch of the last of these chunks behind the others (content ids).

    In this order, or in any.
    """

    scope: Scope
    ordered: bool
    contents: tuple[str, ...]


@dataclass(frozen=True)
class Terms:
    """Costs and limits that the choice goes by.

    Args:
        forward: what computing chunks takes.
        place: seconds per token of writing a stored chunk.
        patch_bytes: bytes of a patch of a chunk of so many tokens.
        first_layers: share of the layers that a request with composed chunks computes to weigh their parts, once, or
            what takes as long.
        compose_up_to: antecedents behind which a chunk is composed at most.
        longest: tokens of a prompt at most.
        min_uses: logged requests that must use a patch for it to be a candidate.
    """

    forward: ForwardCost
    place: float
    patch_bytes: Callable[[int], int]
    first_layers: float = 0.0
    compose_up_to: int = 0
    longest: int = 1 << 40
    min_uses: int = 2

    def saved(self, tokens: int) -> float:
        """Seconds that a request saves where a chunk of so many tokens is written, not computed."""
        return self.forward.added_seconds(tokens) - self.place * tokens


@dataclass(frozen=True)
class Plan:
    """Patches to compile, in an order in which neighbours share a beginning.

    `saves` of `most` seconds: what the patches spare the trace's requests, and what no choice within the budget
    exceeds. `possible`: what all candidates together would spare.
    """

    kind: Kind
    patches: tuple[Wanted, ...]
    saves: float
    most: float
    possible: float
    candidates: int
    cost: Cost

    @property
    def share(self) -> float:
        """Of the offline optimum, at least."""
        return self.saves / self.most if self.most else 1.0


@dataclass
class Trace:
    """Requests of a log that patches can serve, in placement's order.

    `skipped`: chunks of requests that no patch can be compiled for, by reason.
    """

    requests: list[tuple[LoggedRequest, tuple[LoggedChunk, ...]]] = field(default_factory=list)
    shapes: dict[str, LoggedChunk] = field(default_factory=dict)  # by content id
    skipped: Counter[str] = field(default_factory=Counter)


def trace_of(
    requests: Iterable[LoggedRequest],
    prefixes: Mapping[str, Sequence[int]],
    unusable: Callable[[Sequence[tuple[str, LoggedChunk]]], Iterable[str | None]] = lambda owned: [None] * len(owned),
    why_not: Callable[[LoggedRequest], str | None] = lambda _: None,
) -> Trace:
    """Put every request's free chunks in order and leave out what cannot be compiled.

    Args:
        prefixes: the fixed prefixes whose token ids are known, by digest.
        unusable: why each of some owners' chunks cannot be computed again; None if it can.
        why_not: why a request is of no use; None if it is.
    """
    trace, kept = Trace(), list[LoggedRequest]()
    popularity: defaultdict[tuple[str, str], float] = defaultdict(float)
    alike: dict[tuple[str, int | None], LoggedChunk] = {}  # a long trace names the same chunks again and again
    for request in requests:
        for content in {chunk.content for chunk in request.chunks}:
            popularity[request.tenant, content] += request.weight
        unknown = None if request.prefix in prefixes else "the fixed prefix is not known: give its text by --prefix"
        reason = why_not(request) or unknown
        if reason is not None:
            trace.skipped[reason] += len(request.chunks)
            continue
        chunks = tuple(alike.setdefault((chunk.content, chunk.group), chunk) for chunk in request.chunks)
        kept.append(request.model_copy(update={"chunks": chunks}))
    trace.shapes = {chunk.content: chunk for request in kept for chunk in request.chunks}
    owned = {(owner_of(request.tenant, chunk.content), chunk.content) for request in kept for chunk in request.chunks}
    asked = [(owner, trace.shapes[content]) for owner, content in sorted(owned)]
    reasons = {(owner, chunk.content): why for (owner, chunk), why in zip(asked, unusable(asked), strict=True)}
    for request in kept:
        why_not_of = {
            chunk.content: reasons[owner_of(request.tenant, chunk.content), chunk.content] for chunk in request.chunks
        }
        shares = {
            content: popularity[request.tenant, content] if why is None else -1.0  # behind those that can be patched
            for content, why in why_not_of.items()
        }
        order = in_order(request.chunks, shares)
        for place, chunk in enumerate(order):
            why = why_not_of[chunk.content]
            if why is not None:  # nor can anything behind it
                trace.skipped[why] += len(order) - place
                order = order[:place]
                break
        if order:
            trace.requests.append((request, order))
    return trace


def in_order(chunks: Sequence[LoggedChunk], popularity: Mapping[str, float]) -> tuple[LoggedChunk, ...]:
    """A request's chunks, those that may trade places with the most popular first.

    `popularity`: by content id.
    """
    groups: dict[int, list[LoggedChunk]] = defaultdict(list)
    for chunk in chunks:
        if chunk.group is not None:
            groups[chunk.group].append(chunk)
    ranked = {
        group: iter(sorted(members, key=lambda chunk: (-popularity[chunk.content], chunk.content)))
        for group, members in groups.items()
    }
    return tuple(chunk if chunk.group is None else next(ranked[chunk.group]) for chunk in chunks)


def plan(
    trace: Trace,
    kind: Kind,
    terms: Terms,
    budget: Cost = UNBOUNDED,
    stored: Callable[[Collection[Wanted]], Collection[Wanted]] = lambda wanted: (),
) -> Plan:
    """Choose the patches of one kind.

    `stored`: which of some patches are there already. They take their bytes of the budget, and no seconds.
    """
    candidates = _Candidates(terms)
    for request, order in trace.requests:
        (_add_sets if kind is Kind.sets else _add_pairs)(candidates, request, order)
    costs, patches, demands = candidates.worth_it(stored)
    picked = pick(costs, demands, budget)
    return Plan(
        kind=kind,
        patches=tuple(sorted(wanted for item, wanted in patches.items() if item in picked.items)),
        saves=picked.value,
        most=max(picked.value, bound(costs, demands, budget)),
        possible=sum(demand.value for demand in demands),
        candidates=len(patches),
        cost=picked.cost,
    )


class _Candidates:
    """Items and demands of the knapsack.

    Items: forwards over chunks behind others, and patches to store. Demands: requests' chunks that they serve.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.costs: list[Cost] = []
        self._forwards: dict[Wanted, int] = {}
        self._patches: dict[Wanted, tuple[tuple[int, ...], int]] = {}  # the forwards to it, and the patch itself
        self._uses: Counter[Wanted] = Counter()
        self._values: defaultdict[tuple[Wanted, ...], float] = defaultdict(float)

    def demand(self, value: float, wanted: Iterable[tuple[Wanted, Sequence[LoggedChunk], int]]) -> None:
        """A request's chunk that these patches, together, would save `value` seconds.

        Each with its chunks, and with the tokens of the fixed prefix before them.
        """
        patches: dict[Wanted, None] = {}
        for patch, chunks, prefix in wanted:
            if prefix + sum(chunk.tokens for chunk in chunks) > self.terms.longest:
                return
            if patch not in self._patches:
                self._patches[patch] = self._items(patch, chunks, prefix)
            patches[patch] = None
        self._values[tuple(patches)] += value
        self._uses.update(patches.keys())

    def _items(self, patch: Wanted, chunks: Sequence[LoggedChunk], prefix: int) -> tuple[tuple[int, ...], int]:
        """The forwards over a patch's chunks, from the first to the last, and the patch itself."""
        found = []
        for count, chunk in enumerate(chunks, 1):
            forward = patch._replace(contents=patch.contents[:count])
            if forward not in self._forwards:
                tokens = chunk.tokens + (prefix if count == 1 else 0)
                self._forwards[forward] = self._item(Cost(seconds=self.terms.forward.seconds(tokens)))
            found.append(self._forwards[forward])
        return tuple(found), self._item(Cost(bytes=self.terms.patch_bytes(chunks[-1].tokens)))

    def _item(self, cost: Cost) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def worth_it(
        self, stored: Callable[[Collection[Wanted]], Collection[Wanted]]
    ) -> tuple[list[Cost], dict[int, Wanted], list[Demand]]:
        """Demands that save anything by patches that are used often enough.

        With their items, numbered anew.
        """
        kept = {
            patches: value
            for patches, value in self._values.items()
            if value > 0 and all(self._uses[patch] >= self.terms.min_uses for patch in patches)
        }
        asked = dict.fromkeys(patch for patches in kept for patch in patches)
        there = set(stored(tuple(asked)))

        def items(patch: Wanted) -> tuple[int, ...]:
            forwards, itself = self._patches[patch]
            return (itself,) if patch in there else (*forwards, itself)

        needed = [tuple(dict.fromkeys(item for patch in patches for item in items(patch))) for patches in kept]
        numbers = {item: number for number, item in enumerate(dict.fromkeys(chain.from_iterable(needed)))}
        costs = [self.costs[item] for item in numbers]
        patches = {numbers[self._patches[patch][1]]: patch for patch in asked}
        demands = [
            Demand(value, tuple(numbers[item] for item in each))
            for value, each in zip(kept.values(), needed, strict=True)
        ]
        return costs, patches, demands


def _add_sets(candidates: _Candidates, request: LoggedRequest, order: Sequence[LoggedChunk]) -> None:
    scope, contents = Scope(request.tenant, request.prefix), tuple(chunk.content for chunk in order)
    for place, chunk in enumerate(order):
        patch = Wanted(scope, True, contents[: place + 1])
        value = request.weight * candidates.terms.saved(chunk.tokens)
        candidates.demand(value, [(patch, order[: place + 1], request.prefix_tokens)])


def _add_pairs(candidates: _Candidates, request: LoggedRequest, order: Sequence[LoggedChunk]) -> None:
    terms, tokens = candidates.terms, request.prefix_tokens
    sums = composed_antecedents(terms.compose_up_to)
    for place, chunk in enumerate(order):
        composed = place in sums
        if place > 1 and not composed:
            return
        before = order[:place]
        contents = [other.content for other in order[: place + 1]]
        if composed and len(set(contents)) < len(contents):
            return  # what stands twice is not composed, nor is it in anything behind it
        owner = request.tenant if tokens else owner_of(request.tenant, *contents)
        scope = Scope(owner, request.prefix)
        alone = (Wanted(scope, False, (chunk.content,)), (chunk,), tokens)
        behind = [(Wanted(scope, False, (b.content, chunk.content)), (b, chunk), tokens) for b in before]
        value = terms.saved(chunk.tokens)
        if composed:  # as if it were the only one: whether others, weighed in the same look, are chosen is not known
            value -= terms.first_layers * terms.forward.added_seconds(sum(other.tokens for other in order[: place + 1]))
        candidates.demand(request.weight * value, behind if place == 1 else [alone, *behind])
