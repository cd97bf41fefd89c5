"""The order that placement finds, against every order there is."""

from __future__ import annotations

from functools import reduce
from itertools import combinations, permutations
from operator import and_

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.access_log import LoggedChunk
from serving.offline.compile_plan import in_order
from serving.placement.search import EXACT, SUMMED, Chunk, Edge, Placement, Problem, Stored, place, rejected, sums_of

PATCHED, COMPUTED = 1, 100


def allowed_orders(chunks: list[Chunk]) -> list[tuple[int, ...]]:
    """Every order in which chunks stand in places of their own group, the most popular first where they may."""

    def may(chunk: int, at: int) -> bool:
        return chunk == at or chunks[chunk].group == chunks[at].group is not None

    orders = permutations(range(len(chunks)))
    return [order for order in orders if all(may(chunk, at) for at, chunk in enumerate(order))]


def cost(order: tuple[int, ...], chunks: list[Chunk], stored: Stored) -> int:
    """What an order costs, told from the definition: a patch behind the set, or behind exactly the sequence."""
    total = 0
    for at, chunk in enumerate(order):
        before = order[:at]
        mask = sum(1 << other for other in before)
        if (stored.sets.get(mask, 0) | stored.sequences.get(before, 0)) >> chunk & 1:
            total += chunks[chunk].patched
        elif stored.sums.get(mask, 0) >> chunk & 1:
            total += chunks[chunk].summed
        else:
            total += chunks[chunk].computed
    return total


def by_popularity(order: tuple[int, ...], chunks: list[Chunk]) -> list[tuple[float, str, int]]:
    return [(-chunks[chunk].popularity, chunks[chunk].name, chunk) for chunk in order]


@st.composite
def problems(draw: st.DrawFn, least: int = 1, most: int = 7, groups: tuple[int | None, ...] = (None, 0, 0, 1)):
    count = draw(st.integers(least, most))
    numbers = range(count)
    chunks = [
        Chunk(
            patched=draw(st.integers(0, 3)),
            computed=draw(st.integers(6, 9)),
            summed=draw(st.integers(3, 6)),
            group=draw(st.sampled_from(groups)),
            popularity=draw(st.integers(0, 3)),
            name=draw(st.sampled_from("abc")),
        )
        for _ in numbers
    ]
    everything = (1 << count) - 1
    behind = st.dictionaries(st.integers(0, everything), st.integers(0, everything), max_size=24)
    sets, sums = ({mask: served & ~mask for mask, served in draw(behind).items()} for _ in range(2))
    sequences: dict[tuple[int, ...], int] = {}
    for whole in draw(st.lists(st.permutations(numbers), max_size=6)):
        length = draw(st.integers(0, count - 1))
        for end in range(length + 1):
            start = tuple(whole[:end])
            sequences.setdefault(start, 0)
            if draw(st.booleans()):
                sequences[start] |= 1 << whole[end]
    return chunks, Stored(sets, sequences, sums)


@settings(max_examples=60)
@given(problems())
def test_no_order_costs_less_and_of_equal_ones_the_popular_come_first(problem: tuple[list[Chunk], Stored]):
    is_best(*problem)


@settings(max_examples=20)
@given(problems(least=7, groups=(0,)))
def test_of_all_5040_orders_of_seven_free_chunks_none_costs_less(problem: tuple[list[Chunk], Stored]):
    is_best(*problem)


def is_best(chunks: list[Chunk], stored: Stored) -> None:
    """Of all orders in which the chunks may stand, placement finds that of the least cost, popular chunks first."""
    found = place(Problem(chunks, stored))
    best = min(allowed_orders(chunks), key=lambda order: (cost(order, chunks, stored), by_popularity(order, chunks)))
    assert found.order == best
    assert found.cost == cost(best, chunks, stored)
    assert found.arrival_cost == cost(tuple(range(len(chunks))), chunks, stored)


@settings(max_examples=60)
@given(problems(most=6))
def test_the_best_rejected_order_is_the_best_that_has_another_chunk_there(problem: tuple[list[Chunk], Stored]):
    chunks, stored = problem
    whole = Problem(chunks, stored)
    found = place(whole)
    orders = allowed_orders(chunks)
    for at, alternative in enumerate(rejected(whole, found)):
        others = [order for order in orders if order[:at] == found.order[:at] and order[at] != found.order[at]]
        if not others:
            assert alternative is None
            continue
        assert alternative is not None
        assert alternative.total == min(cost(order, chunks, stored) for order in others)
        assert alternative.edge.chunk != found.order[at]


@settings(max_examples=60)
@given(problems(most=7, groups=(0, 0, 1, None)), st.integers(0, 3))
def test_the_beam_is_never_worse_than_arrival_and_keeps_groups(problem: tuple[list[Chunk], Stored], fixed: int):
    """Beyond what is searched whole: the chunks of a small problem among others that have no patch."""
    chunks, stored = problem
    others = [Chunk(PATCHED, COMPUTED, 2) for _ in range(EXACT + 1)]
    large = [*chunks, *others, *(Chunk(PATCHED, COMPUTED) for _ in range(fixed))]
    found = place(Problem(large, stored))
    assert sorted(found.order) == list(range(len(large)))
    assert all(large[chunk].group == large[at].group for at, chunk in enumerate(found.order))
    assert found.cost == cost(found.order, large, stored)
    assert found.cost <= found.arrival_cost == cost(tuple(range(len(large))), large, stored)


def test_the_beam_finds_a_chain_of_patches_that_runs_against_arrival_and_popularity():
    count = EXACT + 4
    order = tuple(range(count - 1, -1, -1))
    sets = {sum(1 << chunk for chunk in order[:at]): 1 << chunk for at, chunk in enumerate(order)}
    chunks = [Chunk(PATCHED, COMPUTED, 0, popularity=chunk % 5) for chunk in range(count)]
    assert place(Problem(chunks, Stored(sets))) == Placement(order, count * PATCHED, count * COMPUTED)


def test_beyond_exact_search_the_best_rejected_order_is_an_exchange():
    count = EXACT + 2
    chunks = [Chunk(PATCHED, COMPUTED + chunk, 0, popularity=count - chunk) for chunk in range(count)]
    problem = Problem([*chunks, Chunk(PATCHED, COMPUTED)], Stored({0: 0b11}))
    found = place(problem)
    others = rejected(problem, found)
    assert found.order[0] == 1, "it costs more to compute than chunk 0"
    assert others[0] == (Edge(0, True, PATCHED), found.cost + 1)
    assert others[-1] is None, "that chunk is fixed"


def test_without_anything_stored_the_most_popular_come_first_in_the_places_of_their_group():
    chunks = [Chunk(1, 2, 0, 1.0), Chunk(1, 2), Chunk(1, 2, 0, 3.0), Chunk(1, 2, 1, 0.0), Chunk(1, 2, 1, 9.0)]
    assert place(Problem(chunks, Stored())).order == (2, 1, 0, 4, 3)


def test_a_new_set_has_one_order_however_it_is_sent():
    orders = set()
    for sent in permutations("dacb"):
        found = place(Problem([Chunk(1, 2, 0, popularity=0.5, name=name) for name in sent], Stored())).order
        orders.add("".join(sent[i] for i in found))
    assert orders == {"abcd"}


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from((None, 0, 0, 1))), max_size=7),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_what_is_compiled_for_a_trace_stands_in_the_order_that_placement_falls_back_to(
    sent: list[tuple[str, int | None]], counts: list[int]
):
    popularity = dict(zip("abcdef", counts, strict=True))
    chunks = [Chunk(1, 2, group, popularity[name], name=name) for name, group in sent]
    logged = [LoggedChunk(content=name, modality="text", tokens=8, point="", group=group) for name, group in sent]
    found = [sent[i][0] for i in place(Problem(chunks, Stored())).order]
    assert found == [chunk.content for chunk in in_order(logged, popularity)]


def test_small_chunks_miss_rather_than_large_ones():
    """Behind nothing either has a patch, and behind the other one both have."""
    chunks = [Chunk(1, 900, 0, popularity=5.0), Chunk(1, 100, 0)]
    found = place(Problem(chunks, Stored({0b01: 0b10, 0b10: 0b01})))
    assert (found.order, found.cost, found.arrival_cost) == ((1, 0), 101, 901)


@given(st.dictionaries(st.sampled_from([0, *(1 << i for i in range(6))]), st.integers(0, 63)), st.integers(0, 4))
def test_sums_serve_chunks_whose_patches_behind_nothing_and_behind_each_chunk_are_stored(
    sets: dict[int, int], up_to: int
):
    sets = {mask: served & ~mask for mask, served in sets.items()}
    found = sums_of(sets, 6, up_to)
    for size in range(2, 7):
        for members in combinations(range(6), size):
            mask = sum(1 << member for member in members)
            every = [sets.get(0, 0), *(sets.get(1 << member, 0) for member in members)]
            assert found.get(mask, 0) == (reduce(and_, every) if size <= up_to else 0)


def test_sums_of_many_chunks_are_bounded_the_small_sets_first():
    found = sums_of({0: 1, **{1 << i: 1 for i in range(1, 40)}}, 40, 8)
    assert len(found) == SUMMED
    assert sum(mask.bit_count() == 2 for mask in found) == 39 * 38 // 2


def test_a_patch_of_the_set_goes_before_a_sum_and_a_sum_before_computing():
    chunks = [Chunk(1, 100, 0, summed=10) for _ in range(3)]
    pairs = {0: 0b111, 0b001: 0b110, 0b010: 0b101, 0b100: 0b011}
    summed = place(Problem(chunks, Stored(pairs, sums=sums_of(pairs, 3, 2))))
    assert (summed.order, summed.cost) == ((0, 1, 2), 1 + 1 + 10)
    stored = {**pairs, 0b110: 0b001}
    assert place(Problem(chunks, Stored(stored, sums=sums_of(pairs, 3, 2)))) == Placement((1, 2, 0), 3, 12)
    assert place(Problem(chunks, Stored(pairs))).cost == 102


def test_nothing_to_place():
    assert place(Problem([], Stored())) == Placement((), 0, 0)
