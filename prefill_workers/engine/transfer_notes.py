"""Ranks' notes of NIXL transfers: hand-off leases that were read, and pulls that have ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence

logger = logging.getLogger(__name__)


def parsed(notes: Iterable[bytes]) -> tuple[list[tuple[str, int]], list[str]]:
    """(lease, ranks that read it) of every read notification, and the leases of heartbeats.

    Any agent that has this one's metadata may send notes: what is neither is dropped.
    """
    read: list[tuple[str, int]] = []
    wanted: list[str] = []
    for note in notes:
        kind, _, leases = note.partition(b":")
        lease, _, ranks = note.rpartition(b":")
        try:
            if kind == b"HB":
                wanted += leases.decode().split(",")
            elif lease and ranks.isdigit() and int(ranks) > 0:
                read.append((lease.decode(), int(ranks)))
            else:
                logger.warning("a NIXL note that is none of a decode engine is dropped: %.100r", note)
        except ValueError:
            logger.warning("a NIXL note that cannot be read is dropped: %.100r", note)
    return read, wanted


class ReadNotes:
    """Joins the ranks' notes: a sequence is read when every rank has heard of all readers."""

    def __init__(self, ranks: int) -> None:
        self._heard: list[Counter[str]] = [Counter() for _ in range(ranks)]

    def take(
        self, told: Sequence[tuple[list[tuple[str, int]], list[str]]], held: Container[str]
    ) -> tuple[list[str], list[str]]:
        """Leases read (one entry per decode sequence) and still wanted, from all ranks' polls.

        What was heard of leases that are not `held` any more is forgotten.
        """
        for heard in self._heard:
            for lease in [lease for lease in heard if lease not in held]:
                del heard[lease]
        readers: dict[str, int] = {}
        for heard, (read, _) in zip(self._heard, told, strict=True):
            heard.update(lease for lease, _ in read if lease in held)
            readers |= {lease: each for lease, each in read if lease in held}
        done: list[str] = []
        for lease, each in readers.items():
            complete = min(heard[lease] for heard in self._heard) // each
            for heard in self._heard:
                heard[lease] -= complete * each
                if not heard[lease]:
                    del heard[lease]
            done += [lease] * complete
        return done, [lease for _, wanted in told for lease in wanted]


class EndedPulls:
    """Joins the ranks' notes: a pull has ended when it has on every rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended, self._failed = Counter[str](), set[str]()

    def take(self, told: Sequence[tuple[list[str], list[str]]]) -> tuple[list[str], list[str]]:
        """Pulls that have ended, well and not, from all ranks' polls."""
        for well, badly in told:
            self._ended.update((*well, *badly))
            self._failed.update(badly)
        ended = [name for name, ranks in self._ended.items() if ranks == self._ranks]
        for name in ended:
            del self._ended[name]
        failed = [name for name in ended if name in self._failed]
        self._failed.difference_update(failed)
        return [name for name in ended if name not in failed], failed
