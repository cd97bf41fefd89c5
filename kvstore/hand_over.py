"""Hand-over of records from a process that is about to end to others of the same library.

    leaver ── paths ──▶ every sibling: which of them do you lack? ──▶ leaver ── parcels ──▶ one sibling: adopt

Offered is what the leaver has in memory and no tier that outlives it is known to have, the worthiest first, a content's
records together. A record that any sibling has within reach stays where it is. Siblings keep what they adopt as their
own, in memory by its worth and in their tiers; so an object in a Ray store comes to lie on a node that stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from infra.groups import within
from kvstore.catalog.inventory import checked
from kvstore.errors import CorruptRecord, StoreError
from kvstore.library import Library
from kvstore.records.format import encode
from kvstore.records.record import Record
from kvstore.tiers.base import Lifetime
from kvstore.tiers.eviction import worth
from kvstore.tiers.paths import path_of

logger = logging.getLogger(__name__)

PARCEL_BYTES = 32 << 20  # sent at once
_ASKED = 1024  # paths that siblings are asked for at once


class Parcel(NamedTuple):
    """An encoded record, its path, and the seconds since its last use."""

    path: str
    idle_s: float
    encoded: bytes


@dataclass(frozen=True)
class HandedOver:
    """Outcome of a hand-over.

    Attributes:
        records, nbytes: adopted by siblings.
        left: records that nobody has taken: time ran out, or no sibling answered.
    """

    records: int = 0
    nbytes: int = 0
    left: int = 0


class Siblings(Protocol):
    """The processes that stay. Calls raise what the transport raises."""

    async def lacking(self, paths: Sequence[str]) -> Sequence[Collection[str]]:
        """Of these paths, by sibling, the ones whose records it does not have within reach."""

    async def adopt(self, parcels: Sequence[Parcel]) -> int:
        """Give records to one of them; returns how many it took."""


def lacking(library: Library, paths: Sequence[str]) -> list[str]:
    """Of these paths, the ones whose records are not within the library's reach."""
    there = library.in_reach(paths)
    return [path for path in paths if path not in there]


def adopt(library: Library, parcels: Sequence[Parcel]) -> int:
    """Take over records; returns how many were sound and of this library's model."""
    taken = 0
    for path, idle_s, encoded in parcels:
        try:
            library.put(checked(encoded, path), idle_s)
        except (CorruptRecord, StoreError) as error:
            logger.warning("%s is not taken over: %s", path, error)
            continue
        taken += 1
    return taken


def at_stake(library: Library, lifetime: Lifetime, bytes_per_second: float) -> float:
    """Seconds that the end of the process costs.

    What no tier of that lifetime has is to be handed over or computed again, whichever is less.
    """
    found = library.outlived(lifetime)
    again = sum(record.recompute_seconds for record, _ in found)
    return min(again, sum(record.nbytes for record, _ in found) / bytes_per_second)


async def hand_over(
    library: Library,
    lifetime: Lifetime,
    siblings: Siblings,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> HandedOver:
    """Give siblings what would be lost with this process; best effort.

    Args:
        lifetime: of tiers that outlive the process and that siblings reach.
        until: `clock`'s time at which to stop. A call that takes longer is given up.
    """
    offered = _by_worth(library.outlived(lifetime))
    records, nbytes, left = 0, 0, len(offered)
    try:
        async with asyncio.timeout(max(0.0, until - clock())):
            for start in range(0, len(offered), _ASKED):
                part = offered[start : start + _ASKED]
                answers = await siblings.lacking([path for path, _, _ in part])
                if not answers:
                    break
                wanted = set.intersection(*map(set, answers))
                left -= len(part) - len(wanted)
                lacked = [one for one in part if one[0] in wanted]
                for batch in within(PARCEL_BYTES, lacked, lambda one: one[1].nbytes):
                    parcels = await asyncio.to_thread(_packed, batch)
                    records += await siblings.adopt(parcels)
                    nbytes += sum(len(parcel.encoded) for parcel in parcels)
                    left -= len(batch)
    except TimeoutError:
        logger.warning("there was no time to hand over %d of %d records", left, len(offered))
    except Exception as error:  # siblings are going, too, or cannot be reached: the rest is computed again
        logger.warning("%d of %d records are not handed over: %s", left, len(offered), error)
    return HandedOver(records, nbytes, left)


_Offer = tuple[str, Record, float]  # path, record, seconds since its last use


def _by_worth(found: Sequence[tuple[Record, float]]) -> list[_Offer]:
    """The worthiest first; records of one content follow the first of them: none serves without its canonical."""
    value = {id(record): worth(record.recompute_seconds, record.nbytes, idle_s) for record, idle_s in found}
    contents: dict[tuple[str, str], list[_Offer]] = {}
    for record, idle_s in sorted(found, key=lambda one: -value[id(one[0])]):
        contents.setdefault((record.tenant, record.content), []).append((path_of(record), record, idle_s))
    return [one for offers in contents.values() for one in offers]


def _packed(batch: Sequence[_Offer]) -> list[Parcel]:
    return [Parcel(path, idle_s, encode(record).to_pybytes()) for path, record, idle_s in batch]
