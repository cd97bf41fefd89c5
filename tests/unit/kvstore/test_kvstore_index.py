"""What the index answers about a request's chunks, however its entries came and went."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.catalog.index import Entry, FormedLog, PatchIndex, Scope, prefix_key, scopes_of
from kvstore.records.keys import DYNAMIC_TENANT

SCOPE = Scope("local", prefix_key([1, 2]))


def entry(chunk: str, before: str = "", ordered: bool = True, scope: Scope = SCOPE) -> Entry:
    return Entry(scope, chunk, tuple(before), ordered)


entries = st.builds(
    lambda names, ordered: entry(names[0], "".join(names[1:]), ordered),
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True),
    st.booleans(),
)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.booleans(), entries), max_size=40), st.permutations("abcde"))
def test_answers_are_those_of_a_plain_list(changes: list[tuple[bool, Entry]], contents: list[str]):
    index, stored = PatchIndex(), set[Entry]()
    for added, item in changes:
        (index.add if added else index.discard)(item)
        (stored.add if added else stored.discard)(item)
    assert len(index) == len(stored)

    def behind(before: tuple[str, ...], ordered: bool) -> int:
        return sum(1 << i for i, chunk in enumerate(contents) if Entry(SCOPE, chunk, before, ordered) in stored)

    sets, sequences = index.sets(SCOPE, contents), index.sequences(SCOPE, contents)
    numbers = range(len(contents))
    for size in numbers:
        for chosen in combinations(numbers, size):
            mask = sum(1 << i for i in chosen)
            assert sets.get(mask, 0) == behind(tuple(contents[i] for i in chosen), ordered=False)
        for order in permutations(numbers, size):
            assert sequences.get(order, 0) == behind(tuple(contents[i] for i in order), ordered=True)
    assert all(sequence[:-1] in sequences for sequence in sequences if sequence)


def test_nothing_is_left_of_what_was_discarded():
    index = PatchIndex()
    for item in (entry("c", "ab"), entry("c", "ba", ordered=False), entry("a")):
        index.add(item)
    for item in (entry("c", "ab"), entry("c", "ab", ordered=False), entry("a"), entry("never", "there")):
        index.discard(item)
    assert len(index) == 0
    assert index._trees == index._naming == {}


def test_what_was_added_or_confirmed_longest_ago_goes_first():
    index = PatchIndex(limit=2)
    for chunk in "abac":
        index.add(entry(chunk))
    assert [entry(chunk) in index for chunk in "abc"] == [True, False, True]


def test_forgetting_a_content_takes_what_was_conditioned_on_it_along():
    index = PatchIndex()
    kept = entry("c", "b")
    for item in (entry("a"), entry("b", "a"), entry("c", "ab", ordered=False), kept):
        index.add(item)
    index.discard_content("a")
    assert len(index) == 1
    assert kept in index


def test_scopes_keep_tenants_and_prefixes_apart():
    index = PatchIndex()
    index.add(entry("b", "a"))
    for other in (Scope("another", SCOPE.prefix), Scope("local", prefix_key([1]))):
        assert index.sets(other, "ab") == index.sequences(other, "ab") == {}
    assert index.sequences(SCOPE, "ab")[0,] == 0b10


def test_the_dynamic_librarys_patches_serve_requests_with_references():
    assert scopes_of("acme", [], ["a", "b"]) == [Scope("acme", prefix_key([]))]
    assert [scope.owner for scope in scopes_of("acme", [], ["a", "shared-b"])] == ["acme", DYNAMIC_TENANT]


def test_a_chunk_that_comes_twice_is_looked_up_as_the_first():
    index = PatchIndex()
    index.add(entry("b", "a", ordered=False))
    assert index.sets(SCOPE, ["a", "b", "a"]) == {0b001: 0b010}


def test_a_log_gives_everybody_what_they_have_not_seen():
    log = FormedLog(limit=3)
    first, second, *others = (entry(chunk) for chunk in "abcdef")
    log.add(first)
    cursor, seen = log.since(0)
    assert seen == [first]
    log.add(second)
    assert log.since(cursor) == (2, [second])
    for item in others:
        log.add(item)
    assert log.since(cursor) == (6, others[1:]), "the log keeps three"
    assert log.since(6) == (6, [])
    assert log.since(cursor, most=2) == (5, others[1:3]), "the rest at the next call"
    assert log.since(5) == (6, others[3:])
