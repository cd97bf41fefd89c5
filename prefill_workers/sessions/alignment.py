"""Alignment of a session's old segments with a prompt's new ones. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class MatchKind(StrEnum):
    """Relation of a segment of a new prompt to the session's last one."""

    PREFIX = "prefix"  # behind the same beginning
    SURVIVED = "survived"  # still there, in the same relative order
    RECALLED = "recalled"  # seen before, but not where its old KV would fit
    NEW = "new"


class Match(NamedTuple):
    """Match of one new segment.

    `old`: the place in the old prompt of a prefix or survivor, else None.
    """

    kind: MatchKind
    old: int | None = None


def align(old: Sequence[Hashable], new: Sequence[Hashable], known: Collection[Hashable] = ()) -> list[Match]:
    """Match the segments of a new prompt, by their ids, with those of an old one.

    1. The longest common beginning is `prefix`.
    2. Of the rest, a longest common subsequence is `survived`. Of equally long ones, the one whose old places are
       latest: a window loses its oldest segments first, and what came last has seen least of what left. An old place
       serves one new segment.
    3. Others that `old` or `known` (segments that left earlier) have are `recalled`, also what moved in front of a
       survivor.
    4. The rest is `new`.
    """
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    kept = _common(old[first:], new[first:])
    has = {*old, *known}
    matches = [Match(MatchKind.PREFIX, i) for i in range(first)]
    for i, segment in enumerate(new[first:]):
        if i in kept:
            matches.append(Match(MatchKind.SURVIVED, first + kept[i]))
        else:
            matches.append(Match(MatchKind.RECALLED if segment in has else MatchKind.NEW))
    return matches


def _common(old: Sequence[Hashable], new: Sequence[Hashable]) -> dict[int, int]:
    """Longest common subsequence, new place to old place (Hunt and Szymanski): n log n where few ids repeat.

    Both are walked from their ends, so that of equally long ones the latest old places win.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, segment in enumerate(old):
        places[segment].append(-place)  # descending places when walked from the end: keys ascend
    tails: list[int] = []  # smallest key that ends a common subsequence of each length
    links: list[Any] = []  # per length, the chain (new place, old place, chain before it) that ends there
    for i in range(len(new) - 1, -1, -1):
        for key in places.get(new[i], ()):  # keys descend: a new place extends each length at most once
            length = bisect_left(tails, key)
            chain = (i, -key, links[length - 1] if length else None)
            if length == len(tails):
                tails.append(key)
                links.append(chain)
            else:
                tails[length], links[length] = key, chain
    kept: dict[int, int] = {}
    last = links[-1] if links else None
    while last is not None:
        kept[last[0]], last = last[1], last[2]
    return kept


def apart(behind: Sequence[Hashable], front: Sequence[Hashable]) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """Compare what KV was computed behind with what stands in front of it now: (gone, unseen).

    `behind` was fixed when the KV was computed; over several slides more and more of it is gone. KV with nothing unseen
    is served by R(δ) alone; with something unseen it lacks conditioning, as canonical KV does.
    """
    then, now = Counter(behind), Counter(front)
    return then - now, now - then
