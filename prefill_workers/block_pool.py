"""KV blocks of a prefill worker: allocation, and leases under which decode engines read.

A lease keeps a sequence's blocks until everyone who still needs them is done: each decode engine that will pull them
over NIXL, and the patch compiler, which reads the KV of recomputed chunks off the request path. A lease that nobody
renews ends by time-out, so that a decode replica that died cannot keep blocks for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from prefill_workers.protocol import LeaseState

_ABOUT_SECONDS = 1.0  # a lease that ends within this time may have ended
_MOST_READ = 4096  # leases that are remembered to have been read


class PoolExhausted(RuntimeError):
    """Not enough free blocks at the moment; the caller waits or refuses."""


@dataclass
class Lease:
    """Blocks of one sequence and who still needs them."""

    id: str
    blocks: tuple[int, ...]
    readers: int  # decode sequences that have yet to pull them
    holds: int  # background readers (the patch compiler's)
    deadline: float  # seconds of the pool's clock


class BlockPool:
    """Free list of KV blocks with leases. Not thread-safe: the prefill loop's thread owns it.

    Args:
        blocks: ids of the blocks this pool may hand out.
        block_size: tokens per block.
        lease_seconds: how long a lease lives without being renewed.
        owner: prefix of lease ids, unique among prefill workers.
    """

    def __init__(
        self,
        blocks: range,
        block_size: int,
        lease_seconds: float,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.total = len(blocks)
        self._free = deque(blocks)
        self._leases: dict[str, Lease] = {}
        self._read: dict[str, None] = {}  # by all their readers; oldest first
        self._lease_seconds = lease_seconds
        self._ids = (f"{owner}-{n}" for n in count())
        self._clock = clock

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def leases(self) -> int:
        """Leases still held."""
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        """True while a lease is held."""
        return lease_id in self._leases

    @property
    def has_unread(self) -> bool:
        """True if some decode sequence has yet to pull its blocks."""
        return any(lease.readers > 0 for lease in self._leases.values())

    def waits_for_readers(self, lease_id: str) -> bool:
        """True if some decode sequence has yet to pull this lease's blocks.

        Releases by others free none of them then.
        """
        lease = self._leases.get(lease_id)
        return lease is not None and lease.readers > 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens takes."""
        return -(-tokens // self.block_size)

    def allocate(self, tokens: int, readers: int = 1) -> Lease:
        """Take blocks for `tokens` tokens that `readers` decode sequences will pull.

        Raises:
            PoolExhausted: fewer blocks are free than needed.
        """
        needed = self.blocks_for(tokens)
        if needed > len(self._free):
            raise PoolExhausted(f"{needed} KV blocks needed, {len(self._free)} of {self.total} free")
        blocks = tuple(self._free.popleft() for _ in range(needed))
        lease = Lease(next(self._ids), blocks, readers, 0, self._clock() + self._lease_seconds)
        self._leases[lease.id] = lease
        return lease

    def read(self, lease_id: str) -> None:
        """Note that one decode sequence has pulled the blocks, or never will.

        Unknown (expired) leases are ignored.
        """
        if lease := self._leases.get(lease_id):
            lease.readers = max(0, lease.readers - 1)
            if not lease.readers:
                self._note_read(lease)
            self._drop_if_unused(lease)

    def abandon(self, lease_id: str) -> None:
        """No decode sequence will pull the blocks any more."""
        if lease := self._leases.get(lease_id):
            lease.readers = 0
            self._drop_if_unused(lease)

    def hold(self, lease_id: str) -> None:
        """A background reader needs the blocks besides."""
        self._leases[lease_id].holds += 1

    def unhold(self, lease_id: str) -> None:
        """A background reader is done."""
        if lease := self._leases.get(lease_id):
            lease.holds -= 1
            self._drop_if_unused(lease)

    def state(self, lease_id: str) -> LeaseState:
        """State of a lease. From any thread."""
        if lease_id in self._read:
            return LeaseState.READ
        lease = self._leases.get(lease_id)
        held = lease is not None and lease.deadline > self._clock() + _ABOUT_SECONDS
        return LeaseState.HELD if held else LeaseState.UNKNOWN

    def renew(self, lease_id: str) -> None:
        """A party said that it still wants the blocks; unknown leases are ignored."""
        if lease := self._leases.get(lease_id):
            lease.deadline = self._clock() + self._lease_seconds

    def expire(self) -> list[Lease]:
        """Free the blocks of every lease past its deadline and return these."""
        now = self._clock()
        expired = [lease for lease in self._leases.values() if lease.deadline < now]
        for lease in expired:
            self._drop(lease)
        return expired

    def _note_read(self, lease: Lease) -> None:
        self._read[lease.id] = None
        if len(self._read) > _MOST_READ:
            del self._read[next(iter(self._read))]

    def _drop_if_unused(self, lease: Lease) -> None:
        if lease.readers <= 0 and lease.holds <= 0:
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self._free.extend(lease.blocks)
