"""Properties of alignment: what of a session's old prompt a new one may take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_workers.sessions.alignment import MatchKind, align, apart

P, S, R, N = MatchKind.PREFIX, MatchKind.SURVIVED, MatchKind.RECALLED, MatchKind.NEW
ids = st.lists(st.integers(0, 6), max_size=14)


def kinds(old: Sequence, new: Sequence, known: str = "") -> list[MatchKind]:
    return [match.kind for match in align(old, new, known)]


def longest_common_subsequence(a: Sequence, b: Sequence) -> int:
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


@settings(max_examples=500)
@given(ids, ids, st.frozensets(st.integers(0, 9)))
def test_every_segment_has_one_match_and_as_many_survive_as_can(old: list[int], new: list[int], known: frozenset[int]):
    matches = align(old, new, known)
    assert len(matches) == len(new)
    first = sum(match.kind is P for match in matches)
    assert [match.old for match in matches[:first]] == list(range(first))
    assert old[:first] == new[:first]
    assert first == min(len(old), len(new)) or old[first] != new[first], "the beginning is the longest"
    taken = [match.old for match in matches if match.old is not None]
    assert taken == sorted(set(taken)), "relative order is kept, and an old place serves once"
    for segment, match in zip(new, matches, strict=True):
        assert (match.old is not None) == (match.kind in (P, S))
        if match.old is not None:
            assert old[match.old] == segment
        else:
            assert (match.kind is R) == (segment in {*old, *known})
    survivors = sum(match.kind is S for match in matches)
    assert survivors == longest_common_subsequence(old[first:], new[first:])


@given(ids, ids)
def test_what_is_appended_leaves_the_rest_a_prefix(old: list[int], more: list[int]):
    assert kinds(old, [*old, *more])[: len(old)] == [P] * len(old)


@given(st.lists(st.integers(0, 99), unique=True, min_size=4, max_size=12), st.lists(st.integers(1, 3), max_size=6))
def test_a_window_that_slides_keeps_all_that_is_left_and_has_seen_all_in_front(window: list[int], steps: list[int]):
    behind, fresh = {segment: window[:i] for i, segment in enumerate(window)}, iter(range(100, 200))
    for gone in steps:
        left = window[gone:]
        new = [*left, next(fresh), next(fresh)]
        matches = align(window, new)
        assert [match.kind for match in matches] == [S] * len(left) + [N, N]
        for i, segment in enumerate(new):
            behind.setdefault(segment, new[:i])
            assert not apart(behind[segment], new[:i])[1]
        window = new
    recalled = [1000, *window]
    assert all(apart(behind[segment], recalled[:i])[1] for i, segment in enumerate(recalled) if i)


def test_rules():
    assert kinds("hABC", "hABCD") == [P, P, P, P, N]
    assert kinds("hABC", "hBCD") == [P, S, S, N]
    assert kinds("hBCD", "hBCDA", "A") == [P, P, P, P, R]  # looked back at, behind the window
    assert kinds("hBCD", "hABCD", "A") == [P, R, S, S, S]  # recalled in front
    assert kinds("hABC", "hACB") in ([P, P, S, R], [P, P, R, S])  # reordered: one keeps its KV
    assert kinds("hABC", "hAABC") == [P, P, R, S, S]  # the same image twice
    assert kinds("hABCD", "hAXCD") == [P, P, N, S, S]  # an edit in the middle
    assert [match.old for match in align("hAxAy", "hxAy")] == [0, 2, 3, 4]  # the latest of equally many


def test_gone_and_unseen_are_counted():
    assert apart("hAAB", "hAC") == (Counter("AB"), Counter("C"))
