"""Writes of a library that wait for its tiers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from kvstore.deletions import Deletions
from kvstore.records.format import encode_parts
from kvstore.records.record import Record, SessionRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Lifetime, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.stack import TierStack
from kvstore.tiers.write_behind import WriteBehind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Write:
    """A queued write: the record, and its encoded bytes if they are known."""

    record: Record
    encoded: pa.Buffer | None = None

    def pieces(self) -> Sequence[pa.Buffer]:
        """The encoded record, mostly views of its tensors.

        Not kept: a tier may be long in coming to it.
        """
        return encode_parts(self.record) if self.encoded is None else [self.encoded]


class WriteQueues:
    """A library's queues of writes, one a tier. Thread-safe.

    Writes that wait for a slow tier do not block the others.

    Args:
        deletions: what they cover is not written.
        persisted: told of every record that a tier has now, with its path and the tier's lifetime.
    """

    def __init__(
        self,
        stack: TierStack,
        settings: LibrarySettings,
        deletions: Deletions,
        persisted: Callable[[str, Record, Lifetime], None],
    ) -> None:
        self._stack, self._deletions, self._persisted = stack, deletions, persisted
        self._queues = [
            WriteBehind[_Write, Sequence[pa.Buffer]](
                _Write.pieces,
                partial(self._persist, index),
                partial(stack.undo, index),
                settings.write_queue_items,
                settings.write_queue_bytes,
            )
            for index in range(len(stack.tiers))
        ]

    def submit(self, path: str, record: Record, nbytes: int, tiers: int, encoded: pa.Buffer | None = None) -> list[str]:
        """Queue a write to that many tiers, nearest first; names those whose queue is full."""
        queues, write = zip(self._stack.tiers[:tiers], self._queues, strict=False), _Write(record, encoded)
        taking = [(tier, queue) for tier, queue in queues if self._takes(tier, record)]
        return [tier.name for tier, queue in taking if not queue.submit(path, write, nbytes)]

    def _takes(self, tier: Tier, record: Record) -> bool:
        """False for a session's manifest on a node's own disk before a store.

        Manifests alone are replaced: when another node goes on with the session, this one's would be the first found.
        """
        own = isinstance(tier, DiskTier) and tier.lifetime is Lifetime.NODE
        return not (own and isinstance(record, SessionRecord) and self._stack.tiers[-1].lifetime is Lifetime.STORE)

    def _persist(self, index: int, path: str, write: _Write, pieces: Sequence[pa.Buffer]) -> None:
        if not self._deletions.covers(write.record) and self._stack.write(index, write.record, pieces):
            self._persisted(path, write.record, self._stack.tiers[index].lifetime)

    def pending(self, path: str) -> Record | None:
        """The record if its write to some tier is queued or running."""
        return next((write.record for queue in self._queues if (write := queue.pending(path)) is not None), None)

    def matching(self, condition: Callable[[Record], bool]) -> list[str]:
        """Paths whose record, queued or being written, meets a condition."""
        return [path for queue in self._queues for path in queue.matching(lambda write: condition(write.record))]

    def cancel(self, path: str) -> bool:
        """Drop a path's writes, or undo those under way. True if there were any."""
        return any([queue.cancel(path) for queue in self._queues])

    def settle(self, path: str) -> None:
        """Wait while a record is written: a write that cannot be undone is removed afterwards."""
        for queue in self._queues:
            queue.settle(path)

    @property
    def failures(self) -> int:
        """Writes that raised."""
        return sum(queue.failures for queue in self._queues)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or being written.

        False if `timeout` seconds were not enough.
        """
        until = None if timeout is None else time.monotonic() + timeout
        return all([queue.flush(_left(until)) for queue in self._queues])

    def close(self, timeout: float | None = None) -> None:
        """Refuse later writes; persist what is queued, as far as `timeout` seconds allow."""
        until = None if timeout is None else time.monotonic() + timeout
        for queue in self._queues:
            queue.end()
        for tier, queue in zip(self._stack.tiers, self._queues, strict=True):
            lost = queue.close(_left(until))
            if lost:
                logger.warning("%s: %d records were not persisted in time", tier.name, lost)


def _left(until: float | None) -> float | None:
    """Seconds left until a time (`time.monotonic`); None: without end."""
    return None if until is None else max(0.0, until - time.monotonic())
