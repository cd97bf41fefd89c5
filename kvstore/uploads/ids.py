"""Ids that sort by creation: a time stamp in nanoseconds, then random bits.

    file-<16 hex digits of the stamp><24 random hex digits>

The place of an item in a listing is thus known without the item: a cursor goes on behind one that was deleted. Earlier
versions gave 32 random digits; such an id is valid, and tells no place.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable

DIGITS = r"(?:[0-9a-f]{40}|[0-9a-f]{32})"  # of an id, as regular expression
NANOSECONDS = 10**9  # in a second
_STAMPED = re.compile(r"[a-z]+[-_]([0-9a-f]{16})[0-9a-f]{24}")

Place = tuple[int, str]  # of an item in a listing: when it came, in Unix nanoseconds, and its id


def new_id(prefix: str, others: Iterable[str] = ()) -> str:
    """Id that sorts behind `others`, also where a clock ahead of this machine's gave theirs."""
    return f"{prefix}{next_stamp(stamp_of(other) or 0 for other in others):016x}{secrets.token_hex(12)}"


def next_stamp(others: Iterable[int] = ()) -> int:
    """The time in Unix nanoseconds, or the first one later than `others`."""
    return max(time.time_ns(), 1 + max(others, default=0))


def stamp_of(item_id: str) -> int | None:
    """Unix nanoseconds at which an id was given; None if it does not say."""
    match = _STAMPED.fullmatch(item_id)
    return None if match is None else int(match[1], 16)


def place_of(item_id: str, created_at: int) -> Place:
    """Place of an item in a listing.

    Args:
        created_at: Unix seconds; they count where the id has no stamp.
    """
    stamp = stamp_of(item_id)
    return (created_at * NANOSECONDS if stamp is None else stamp), item_id
