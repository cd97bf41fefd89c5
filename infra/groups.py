"""Groups of items that are taken together as far as a limit allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def within(limit: int, items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in order, in groups of at most `limit` together; a larger one is a group by itself."""
    group, used = list[T](), 0
    for item in items:
        own = size(item)
        if group and used + own > limit:
            yield group
            group, used = [], 0
        group.append(item)
        used += own
    if group:
        yield group
