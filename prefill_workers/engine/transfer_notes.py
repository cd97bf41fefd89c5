"""NIXL read notifications of hand-off leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence


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
