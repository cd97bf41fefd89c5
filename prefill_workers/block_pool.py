"""KV blocks of a prefill worker: allocation, and leases under which decode engines read.

Sequences that begin alike share blocks. A block is free, referred to by leases, or cached: referred to by none, and
named in the `block_index`. Cached blocks are handed out once no other is free, the one let go of first before others. A
lease lets go of its end first, so that a prompt's beginning outlives what hangs on it.

A lease keeps a sequence's blocks until everyone who still needs them is done: each decode engine that will pull them
over NIXL, and the patch compiler, which reads the KV of recomputed chunks off the request path. A lease that nobody
renews ends by time-out, so that a decode replica that died cannot keep blocks for ever.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from prefill_workers.block_index import NO_MATCH, BlockIndex, PrefixMatch
from prefill_workers.protocol import LeaseState

_ABOUT_SECONDS = 1.0  # a lease that ends within this time may have ended
_MOST_READ = 4096  # leases that are remembered to have been read


class PoolExhausted(RuntimeError):
    """Not enough free blocks at the moment; the caller waits or refuses."""


@dataclass
class Lease:
    """Blocks of one sequence and who still needs them.

    Of `blocks`, those that other leases refer to as well, or may, are only to be read. `sources` are further blocks
    from which KV is to be copied.
    """

    id: str
    blocks: tuple[int, ...]
    sources: tuple[int, ...]
    readers: int  # decode sequences that have yet to pull them
    holds: int  # background readers (the patch compiler's)
    deadline: float  # seconds of the pool's clock


class BlockPool:
    """KV blocks with references, and leases. Not thread-safe: the prefill loop's thread owns it.

    Args:
        blocks: ids of the blocks this pool may hand out.
        block_size: tokens per block.
        lease_seconds: how long a lease lives without being renewed.
        owner: prefix of lease ids, unique among prefill workers.
        index: names of blocks that outlive their lease; None: none do.

    Attributes:
        on_evict: called with cached blocks that are about to hold other KV, while they are still named.
    """

    def __init__(
        self,
        blocks: range,
        block_size: int,
        lease_seconds: float,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        index: BlockIndex | None = None,
    ) -> None:
        self.block_size = block_size
        self.total = len(blocks)
        self._index = index
        self._free = deque(blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go of longest ago first
        self._references: dict[int, int] = {}
        self._leases: dict[str, Lease] = {}
        self._read: dict[str, None] = {}  # by all their readers; oldest first
        self._lease_seconds = lease_seconds
        self._ids = (f"{owner}-{n}" for n in count())
        self._clock = clock
        self.on_evict: Callable[[Sequence[int]], None] = lambda blocks: None

    @property
    def free(self) -> int:
        """Blocks that may be handed out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks without a lease that were kept for prompts to begin with."""
        return len(self._cached)

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

    def comes_free(self, lease_id: str) -> bool:
        """True if some block comes free once background readers are done with a lease.

        Not while a decode sequence has yet to pull its blocks, nor if other leases refer to all of them.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.readers > 0:
            return False
        return any(self._references[block] == 1 for block in lease.blocks)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens takes."""
        return -(-tokens // self.block_size)

    def fits(self, tokens: int, match: PrefixMatch) -> bool:
        """True if a sequence that begins with `match` finds room once all others have ended.

        Not where the blocks that it copies from leave too few.
        """
        copied = len(match.blocks) - sum(match.is_shared(i, self.block_size) for i in range(len(match.blocks)))
        return self.blocks_for(tokens) + copied <= self.total

    def allocate(self, tokens: int, readers: int = 1, match: PrefixMatch = NO_MATCH) -> Lease:
        """Take blocks for `tokens` tokens that `readers` decode sequences will pull.

        Args:
            match: what the sequence begins with, as the index has it now. Full blocks in its frame are shared; others
                become `sources`.

        Raises:
            PoolExhausted: fewer blocks are free than needed.
        """
        shared = {i: one.block for i, one in enumerate(match.blocks) if match.is_shared(i, self.block_size)}
        sources = tuple(one.block for i, one in enumerate(match.blocks) if i not in shared)
        taken = (*shared.values(), *sources)
        needed = self.blocks_for(tokens) - len(shared)
        free = self.free - len({block for block in taken if block in self._cached})
        if needed > free:
            raise PoolExhausted(f"{needed} KV blocks needed, {free} of {self.total} free")
        self._refer(taken)
        own = self._take(needed)
        self._refer(own)
        rest = iter(own)
        blocks = tuple(shared[i] if i in shared else next(rest) for i in range(self.blocks_for(tokens)))
        lease = Lease(next(self._ids), blocks, sources, readers, 0, self._clock() + self._lease_seconds)
        self._leases[lease.id] = lease
        return lease

    def take_cached(self, count: int, besides: Iterable[int]) -> list[int]:
        """Take blocks for KV that is to be cached again, without a lease.

        Up to `count`, none of `besides`.
        """
        kept = [block for block in besides if block in self._cached]
        for block in kept:
            self._cached.move_to_end(block)
        taken = self._take(min(count, self.free - len(kept)))
        self._cached.update(dict.fromkeys(taken))
        return taken

    def end_copying(self, lease: Lease) -> None:
        """Let go of the blocks that a lease's KV was copied from."""
        sources, lease.sources = lease.sources, ()
        self._let_go(sources)

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
        self.end_copying(lease)
        self._let_go(lease.blocks)

    def _take(self, count: int) -> list[int]:
        """Free blocks, and cached ones where these do not suffice."""
        taken = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(taken))]
        if evicted and self._index is not None:
            self.on_evict(evicted)
            for block in evicted:
                self._index.drop(block)
        return [*taken, *evicted]

    def _refer(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def _let_go(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if self._index is not None and block in self._index:
                self._cached[block] = None
            else:
                self._free.append(block)
