"""Placement: the order of the chunks that a request leaves free, so that patches fit.

Orbit patches depend on the *set* of a chunk's predecessors, not on their order (kamera.md §5, "Reorder"; App. E,
"Reuse-aware placement"). So the best order is a shortest path in the subset lattice: a state is the set placed so far,
an edge places chunk B next at cost(B | set).

    {} ──▶ {a} ──▶ {a,c} ──▶ {a,b,c}        a, then c behind {a}, then b behind {a,c}

Own patches fit behind one *sequence* of predecessors. Those sequences form a tree that begins where the lattice begins,
and an order that has left the tree never comes back to it. So the best order follows the tree for a while, perhaps not
at all, and goes on in the lattice: both are searched exactly, the tree on top of the lattice.

Where a model's pair patches are summed, they fit behind every small set whose pairs are all known. That costs a little
more than a patch that is stored for the set, as the sum is weighed.

The lattice is searched whole for up to `EXACT` free chunks, one popcount at a time, and beyond that by a beam of
`BEAM` states, which is never worse than the order of arrival. Costs are whole nanoseconds, so that equal orders are
equal: among them the one wins whose most popular chunks come first, as in a frequent-pattern tree, because then the
next set with the same popular chunks finds them behind the same predecessors. Equally popular ones, such as all that
come for the first time, go by name: a set has one order, however it was sent.

Pure functions and values. Chunks are numbers from 0, in the order of arrival; a set of chunks is a bit mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefill_workers.modes import composed_antecedents

EXACT = 12  # free chunks up to which the whole lattice is searched
BEAM = 24  # states kept per place beyond that
SUMMED = 4096  # sets at most behind which sums of patches are counted
_MASK_BITS = 62  # what a set of chunks may have in NumPy's integers
_NEVER = 1 << 58  # nanoseconds: 9 years, and 13 of them still fit 63 bits

Sets = Mapping[int, int]
Sequences = Mapping[tuple[int, ...], int]


@dataclass(frozen=True)
class Chunk:
    """Costs of linking a chunk, in nanoseconds, and the places where it may stand.

    Chunks of one `group` may take one another's places; None: the chunk stays where it is. Between orders that cost the
    same decide `popularity` and then `name`, which is the same in all requests. With a sum of pair patches it costs
    `summed`, between the other two; that counts only where sums are listed (`Stored`).
    """

    patched: int
    computed: int
    group: int | None = None
    popularity: float = 0.0
    summed: int = 0
    name: str = ""


@dataclass(frozen=True)
class Stored:
    """The patches that are stored for chunks of a request behind others of it.

    `sets`: the chunks (a mask) that have a patch behind a set of chunks (a mask), in any order. `sequences`: those that
    have one behind exactly these chunks in this order; every beginning of a sequence must be listed too. `sums`: as
    `sets`, but by a sum of patches (see `sums_of`).
    """

    sets: Sets = field(default_factory=dict)
    sequences: Sequences = field(default_factory=dict)
    sums: Sets = field(default_factory=dict)


def sums_of(sets: Sets, chunks: int, compose_up_to: int) -> dict[int, int]:
    """Chunks that a sum of patches serves, by the set they stand behind.

    `composed_antecedents` says how large such a set is. The chunks have a patch behind nothing, and one behind each
    member. Of no more than `SUMMED` sets, small ones first.
    """
    alone = sets.get(0, 0)
    behind = {1 << chunk: served for chunk in range(chunks) if (served := alone & sets.get(1 << chunk, 0))}
    found: dict[int, int] = {}
    level = behind
    for _ in composed_antecedents(compose_up_to):
        longer = (
            (members | one, both)
            for members, served in level.items()
            for one, more in behind.items()
            if one > members and (both := served & more)
        )
        level = dict(islice(longer, SUMMED - len(found)))
        found |= level
    return found


class Edge(NamedTuple):
    """A chunk in a place: whether patches fit there, one or a sum, and its cost [ns]."""

    chunk: int
    patched: bool
    cost: int
    summed: bool = False


class Rejected(NamedTuple):
    """The best order in which another chunk takes a place: its edge, and the order's cost."""

    edge: Edge
    total: int


@dataclass(frozen=True)
class Placement:
    """An order: `order[place]` is the chunk that stands there. Costs are nanoseconds."""

    order: tuple[int, ...]
    cost: int
    arrival_cost: int


class Problem:
    """One request's chunks, and what is stored for them."""

    def __init__(self, chunks: Sequence[Chunk], stored: Stored) -> None:
        self.chunks, self.stored = tuple(chunks), stored
        self.places = len(self.chunks)
        free = [i for i, chunk in enumerate(self.chunks) if chunk.group is not None]
        self.free_places = free
        self.ranked = sorted(free, key=lambda i: (-self.chunks[i].popularity, self.chunks[i].name))
        groups: dict[int | None, list[int]] = {}
        for i in self.ranked:
            groups.setdefault(self.chunks[i].group, []).append(i)
        self.candidates = [[i] if chunk.group is None else groups[chunk.group] for i, chunk in enumerate(self.chunks)]

    def edge(self, chunk: int, before: int, sequence: tuple[int, ...] | None) -> Edge:
        """Chunk `chunk` behind the set `before`, and behind exactly `sequence` if that still counts."""
        patched = bool(self.stored.sets.get(before, 0) >> chunk & 1)
        if not patched and sequence is not None:
            patched = bool(self.stored.sequences.get(sequence, 0) >> chunk & 1)
        if not patched and self.stored.sums.get(before, 0) >> chunk & 1:
            return Edge(chunk, True, self.chunks[chunk].summed, summed=True)
        return Edge(chunk, patched, self.chunks[chunk].patched if patched else self.chunks[chunk].computed)

    def edges(self, order: Sequence[int]) -> list[Edge]:
        """Edges of all chunks of an order."""
        found, before = [], 0
        for place, chunk in enumerate(order):
            found.append(self.edge(chunk, before, tuple(order[:place])))
            before |= 1 << chunk
        return found

    def cost(self, order: Sequence[int]) -> int:
        """Cost of a whole order."""
        return sum(edge.cost for edge in self.edges(order))

    @property
    def is_small(self) -> bool:
        """True if the whole lattice is searched, which takes milliseconds."""
        return len(self.ranked) <= EXACT and self.places <= _MASK_BITS

    @cached_property
    def search(self) -> _Exact | _Beam:
        """The search that fits the problem's size."""
        return _Exact(self) if self.is_small else _Beam(self)


def place(problem: Problem) -> Placement:
    """The cheapest order: exact to `EXACT` free chunks, by beam search beyond."""
    arrival = tuple(range(problem.places))
    arrival_cost = problem.cost(arrival)
    order = problem.search.best()
    cost = problem.cost(order)
    return Placement(order, cost, arrival_cost) if cost <= arrival_cost else Placement(arrival, *[arrival_cost] * 2)


def rejected(problem: Problem, placement: Placement) -> list[Rejected | None]:
    """Best order with another chunk, for every place; None where no other may stand.

    Up to `EXACT` free chunks the order is the same before that place, and the best of all such orders; beyond, it
    differs by an exchange with the next chunk before or behind that may stand there.
    """
    return [problem.search.instead(placement.order, place) for place in range(problem.places)]


# -- up to EXACT free chunks ------------------------------------------------------------------------------------------


@lru_cache(maxsize=EXACT + 1)
def _layers(free: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Layers of the lattice, by the number of chunks placed.

    The states [s], what each becomes with every chunk [s, free], and _NEVER where it has it already [s, free].
    """
    states, bits = np.arange(1 << free, dtype=np.int64), np.int64(1) << np.arange(free, dtype=np.int64)
    found = []
    for count in range(free):
        of_count = states[np.bitwise_count(states) == count]
        has = (of_count[:, None] & bits) != 0
        found.append((of_count, of_count[:, None] | bits, np.where(has, _NEVER, 0)))
    return found


class _Listed(NamedTuple):
    """Sets behind which chunks are served [sets].

    Their free chunks as states, their fixed ones and what is served.
    """

    states: NDArray[np.int64]
    fixed: NDArray[np.int64]
    behind: NDArray[np.int64]


class _Exact:
    """Exact search of the whole lattice.

    A state is the set of free chunks placed, as ranks: bit r is `problem.ranked[r]`.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._free = len(problem.ranked)
        self._rank = {chunk: rank for rank, chunk in enumerate(problem.ranked)}
        self._bit = {chunk: 1 << rank for chunk, rank in self._rank.items()}
        self._free_mask = sum(1 << chunk for chunk in problem.ranked)
        self._allowed = [sum(1 << chunk for chunk in candidates) for candidates in problem.candidates]
        self._ranked = np.array(problem.ranked, dtype=np.int64)
        self._fixed_before = self._gaps()
        self._rest: list[int] = self._solve().tolist()
        self._below: dict[tuple[int, ...], int] = {}

    def _gaps(self) -> list[int]:
        """The fixed chunks (a mask) that stand before the k-th free place; last, all of them."""
        masks, mask = [], 0
        for place, chunk in enumerate(self._problem.chunks):
            if chunk.group is None:
                mask |= 1 << place
            else:
                masks.append(mask)
        return [*masks, mask]

    def _solve(self) -> NDArray[np.int64]:
        """Cost still to be paid from each state [2^free].

        The fixed chunks up to the state's next free place are linked already.
        """
        problem, free = self._problem, self._free
        ranked = [problem.chunks[chunk] for chunk in problem.ranked]
        computed, summed, patched = (
            np.array([(chunk.computed, chunk.summed, chunk.patched) for chunk in ranked], dtype=np.int64)
            .reshape(free, 3)
            .T
        )
        gaps = np.array(self._fixed_before, dtype=np.int64)

        served = self._listed(problem.stored.sums), self._listed(problem.stored.sets)
        edges = np.tile(computed, (1 << free, 1))
        for listed, price in zip(served, (summed, patched), strict=True):  # the cheaper ones last
            fits = listed.fixed == gaps[np.bitwise_count(listed.states)]
            which, rank = np.nonzero((listed.behind[:, None] >> self._ranked & 1) * fits[:, None])
            edges[listed.states[which], rank] = price[rank]
        between = self._between(*served)

        allowed = np.full((free, free), _NEVER, dtype=np.int64)  # [place among the free, rank]
        for k, place in enumerate(problem.free_places):
            allowed[k, [self._rank[chunk] for chunk in problem.candidates[place]]] = 0
        rest = np.zeros(1 << free, dtype=np.int64)
        owed = between.copy()  # what is to be paid once a state is reached, its fixed chunks included
        for k in range(free - 1, -1, -1):
            of_count, becomes, has = _layers(free)[k]
            rest[of_count] = (edges[of_count] + owed[becomes] + has + allowed[k]).min(axis=1)
            owed[of_count] += rest[of_count]
        return rest

    def _between(self, sums: _Listed, sets: _Listed) -> NDArray[np.int64]:
        """Cost of the fixed chunks between a state's last free place and the next one [2^free]."""
        count = np.bitwise_count(np.arange(1 << self._free, dtype=np.int64))
        between = np.zeros(1 << self._free, dtype=np.int64)
        before = linked = 0
        for place, chunk in enumerate(self._problem.chunks):
            if chunk.group is not None:
                before += 1
                continue
            costs = np.full(1 << self._free, chunk.computed, dtype=np.int64)
            for listed, price in ((sums, chunk.summed), (sets, chunk.patched)):
                costs[listed.states[(listed.behind >> place & 1 == 1) & (listed.fixed == linked)]] = price
            here = count == before
            between[here] += costs[here]
            linked |= 1 << place
        return between

    def _listed(self, sets: Sets) -> _Listed:
        masks = np.fromiter(sets.keys(), np.int64, len(sets))
        behind = np.fromiter(sets.values(), np.int64, len(sets))
        return _Listed(self._ranks_of(masks), masks & self._fixed_before[-1], behind)

    def _ranks_of(self, masks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sets of chunks as states: their free chunks."""
        return (masks[:, None] >> self._ranked & 1) @ (np.int64(1) << np.arange(self._free, dtype=np.int64))

    def best(self) -> tuple[int, ...]:
        """The cheapest order; of several the one whose most popular chunks come first."""
        order: tuple[int, ...] = ()
        before = 0
        while len(order) < self._problem.places:
            edge, _ = min(self._next(order, before), key=lambda choice: choice[1])  # the first of equals
            order, before = (*order, edge.chunk), before | 1 << edge.chunk
        return order

    def instead(self, order: tuple[int, ...], place: int) -> Rejected | None:
        """See `rejected`."""
        start, before = order[:place], sum(1 << chunk for chunk in order[:place])
        others = [choice for choice in self._next(start, before) if choice[0].chunk != order[place]]
        if not others:
            return None
        edge, rest = min(others, key=lambda choice: choice[1])
        return Rejected(edge, self._problem.cost(start) + rest)

    def _next(self, order: tuple[int, ...], before: int) -> Iterator[tuple[Edge, int]]:
        """Chunks that may come next, the most popular first, and the cost from there to the end."""
        for chunk in self._problem.candidates[len(order)]:
            if not before >> chunk & 1:
                edge = self._problem.edge(chunk, before, order)
                yield edge, edge.cost + self._to_pay((*order, chunk), before | 1 << chunk)

    def _to_pay(self, order: tuple[int, ...], before: int) -> int:
        """Cost of the best continuation of an order: along own patches, then in the lattice."""
        known = self._below.get(order)
        if known is not None:
            return known
        place = len(order)
        known = self._in_lattice(place, before)
        behind = self._problem.stored.sequences.get(order)
        if behind is not None and place < self._problem.places:
            # only these can be worth more behind this order than behind its set
            follow = (behind | self._branches.get(order, 0)) & self._allowed[place] & ~before
            for chunk in _members(follow):
                cost = self._problem.edge(chunk, before, order).cost
                known = min(known, cost + self._to_pay((*order, chunk), before | 1 << chunk))
            self._below[order] = known
        return known

    @cached_property
    def _branches(self) -> dict[tuple[int, ...], int]:
        """By sequence the chunks (a mask) with which a longer one goes on."""
        branches: dict[tuple[int, ...], int] = {}
        for sequence in self._problem.stored.sequences:
            if sequence:
                start = sequence[:-1]
                branches[start] = branches.get(start, 0) | 1 << sequence[-1]
        return branches

    def _in_lattice(self, place: int, before: int) -> int:
        """Cost from a place on, without own patches."""
        problem, cost = self._problem, 0
        while place < problem.places and problem.chunks[place].group is None:
            cost += problem.edge(place, before, None).cost
            place, before = place + 1, before | 1 << place
        state = 0
        for chunk in _members(before & self._free_mask):
            state |= self._bit[chunk]
        return cost + self._rest[state]


def _members(mask: int) -> Iterator[int]:
    """The chunks of a set, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


# -- beyond -----------------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A beginning of an order, compared by its cost, then by how popular its first chunks are."""

    cost: int
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    before: int


class _Beam:
    """The best `BEAM` beginnings of orders, place by place.

    From a state it tries every chunk that has a patch there, every one that leads to a set behind which some chunk has
    one, and of the others the most popular and the cheapest to compute.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rank = {chunk: rank for rank, chunk in enumerate(problem.ranked)}

    def best(self) -> tuple[int, ...]:
        """The cheapest order that was found."""
        states = [_State(0, (), (), 0)]
        for place in range(self._problem.places):
            found: dict[tuple[int, tuple[int, ...] | None], _State] = {}
            for state in states:
                for edge in self._promising(state, place):
                    after = self._after(state, edge)
                    on_tree = after.order if after.order in self._problem.stored.sequences else None
                    key = (after.before, on_tree)
                    if key not in found or after < found[key]:
                        found[key] = after
            states = sorted(found.values())[:BEAM]
        return states[0].order

    def _after(self, state: _State, edge: Edge) -> _State:
        chunk = edge.chunk
        ranks = (*state.ranks, self._rank.get(chunk, 0))
        return _State(state.cost + edge.cost, ranks, (*state.order, chunk), state.before | 1 << chunk)

    def _promising(self, state: _State, place: int) -> Iterator[Edge]:
        problem, stored = self._problem, self._problem.stored
        left = [chunk for chunk in problem.candidates[place] if not state.before >> chunk & 1]
        cheapest = min(left, key=lambda chunk: problem.chunks[chunk].computed)
        for chunk in left:
            edge = problem.edge(chunk, state.before, state.order)
            after = state.before | 1 << chunk
            leads = after in stored.sets or after in stored.sums or (*state.order, chunk) in stored.sequences
            if edge.patched or leads or chunk in (left[0], cheapest):
                yield edge

    def instead(self, order: tuple[int, ...], place: int) -> Rejected | None:
        """See `rejected`."""
        allowed = [at for at in range(len(order)) if at != place and order[place] in self._problem.candidates[at]]
        before, behind = [at for at in allowed if at < place], [at for at in allowed if at > place]
        exchanged = []
        for other in before[-1:] + behind[:1]:
            swapped = list(order)
            swapped[place], swapped[other] = order[other], order[place]
            exchanged.append((self._problem.cost(swapped), swapped))
        if not exchanged:
            return None
        total, swapped = min(exchanged)
        return Rejected(self._problem.edges(swapped)[place], total)
