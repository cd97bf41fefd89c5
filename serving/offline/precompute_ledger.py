"""Ledger of an offline caching job: claims of its workers, and outcomes of entries.

| call             | by                                                                        |
|------------------|---------------------------------------------------------------------------|
| restarted        | a worker that starts: what it held before it died is void                 |
| attempts         | a worker with a new batch: how often each entry was begun in vain         |
| begin, end       | a worker, around entries: begun and never ended is a death                |
| take, release    | a worker, around computing: records that nobody else computes meanwhile   |
| drain            | the driver: outcomes that it has not seen, each once                      |
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["stored", "present", "failed"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one entry.

    `began` and `ended` are Unix seconds; counts are of records computed for it.
    """

    number: int
    name: str
    status: Status  # present: everything was stored already
    reason: str | None = None
    images: int = 0
    embeddings: int = 0
    canonicals: int = 0
    patches: int = 0
    tokens: int = 0
    began: float = 0.0
    ended: float = 0.0


class Ledger:
    """One Ray actor for the job; what it knows ends with the job, unlike what is stored.

    An owner takes whole groups of records, all or none of each, and holds nothing while it waits: there is no deadlock.
    Owners are called `worker/anything`.
    """

    def __init__(self, entries: int, lease_seconds: float = 900.0) -> None:
        """Create a ledger whose claims are void after `lease_seconds`.

        After so long the owner has died, and nobody was started in its place.
        """
        self._lease = lease_seconds
        self._begun: Counter[int] = Counter()
        self._ended = bytearray(entries)
        self._outcomes: list[Outcome] = []
        self._owners: dict[str, tuple[str, float]] = {}
        self._changed = asyncio.Condition()
        self._restarts: Counter[str] = Counter()

    async def restarted(self, worker: str) -> None:
        """Give back everything that any owner of this worker has."""
        self._restarts[worker] += 1
        await self._give_back(lambda owner: _worker(owner) == worker)

    async def attempts(self, entries: Sequence[int]) -> list[int | None]:
        """Attempts at each entry that did not end; None: it has an outcome."""
        return [None if self._ended[entry] else self._begun[entry] for entry in entries]

    async def begin(self, entries: Sequence[int]) -> None:
        """Work on these entries begins."""
        self._begun.update(entries)

    async def end(self, outcomes: Sequence[Outcome]) -> None:
        """Note outcomes of entries; an entry's first outcome counts."""
        for outcome in outcomes:
            del self._begun[outcome.number]
            if not self._ended[outcome.number]:
                self._ended[outcome.number] = True
                self._outcomes.append(outcome)

    async def drain(self) -> list[Outcome]:
        """The outcomes since the last call."""
        drained, self._outcomes = self._outcomes, []
        return drained

    async def take(self, owner: str, wanted: Sequence[Sequence[str]]) -> list[int]:
        """Claim every group of records that is free, as soon as there is one.

        Free: nobody else has claimed a part of it. Returns which.

        Nothing, if the owner's worker has restarted meanwhile: then nobody waits for the answer.
        """
        worker = _worker(owner)
        restarts = self._restarts[worker]
        async with self._changed:
            while True:
                if self._restarts[worker] != restarts:
                    return []
                taken = [i for i, records in enumerate(wanted) if self._claim(owner, records)]
                if taken:
                    return taken
                try:
                    await asyncio.wait_for(self._changed.wait(), self._lease)
                except TimeoutError:
                    continue

    async def release(self, owner: str) -> None:
        """Give back everything that the owner has."""
        await self._give_back(lambda other: other == owner)

    def _claim(self, owner: str, records: Sequence[str]) -> bool:
        now = time.monotonic()
        for record in records:
            other, since = self._owners.get(record, (owner, now))
            if other != owner and now - since < self._lease:
                return False
        self._owners.update((record, (owner, now)) for record in records)
        return True

    async def _give_back(self, belongs: Callable[[str], bool]) -> None:
        async with self._changed:
            self._owners = {record: claim for record, claim in self._owners.items() if not belongs(claim[0])}
            self._changed.notify_all()


def _worker(owner: str) -> str:
    """Worker of an owner, which is called `worker/thread`."""
    return owner.rpartition("/")[0]
