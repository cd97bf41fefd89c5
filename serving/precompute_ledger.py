"""What the workers of an offline caching job are at: no record is computed twice, no entry is tried for ever.

| call             | by a worker                                             |
|------------------|---------------------------------------------------------|
| restarted        | when it starts: what it held before it died is void     |
| attempts         | before a batch: how often each entry was begun in vain  |
| begin, end       | around every entry: begun and never ended is a death    |
| take, release    | around computing: records that nobody else computes now |
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence


class Ledger:
    """One Ray actor for the job; what it knows ends with the job, unlike what is stored.

    An owner takes whole groups of records, all or none of each, and holds nothing while it waits: there is no deadlock.
    Owners are called `worker/anything`.
    """

    def __init__(self, lease_seconds: float = 900.0) -> None:
        """`lease_seconds`: after so long a claim is void: its owner died, and nobody was started in its place."""
        self._lease = lease_seconds
        self._begun: Counter[int] = Counter()
        self._owners: dict[str, tuple[str, float]] = {}
        self._changed = asyncio.Condition()

    async def restarted(self, worker: str) -> None:
        """Give back everything that any owner of this worker has."""
        await self._give_back(lambda owner: owner.startswith(f"{worker}/"))

    async def attempts(self, entries: Sequence[int]) -> list[int]:
        """How often each entry was begun and not ended."""
        return [self._begun[entry] for entry in entries]

    async def begin(self, entries: Sequence[int]) -> None:
        """Work on these entries begins."""
        self._begun.update(entries)

    async def end(self, entries: Sequence[int]) -> None:
        """These entries have outcomes."""
        for entry in entries:
            del self._begun[entry]

    async def take(self, owner: str, wanted: Sequence[Sequence[str]]) -> list[int]:
        """Claim every group of records that nobody else has a part of, as soon as there is one; returns which."""
        async with self._changed:
            while True:
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
