"""The contract of storage tiers: named blobs, whose meaning only `kvstore.library` knows.

| tier | module | backing | read | write |
|---|---|---|---|---|
| MemoryTier | memory | a dictionary | the stored buffer itself | the buffer itself |
| DiskTier | disk | a directory, shared by processes of a node | one pass, by layers | temporary name, rename |
| RayTier | ray | object stores of a Ray cluster | shared memory of the node | one object |
| FsspecTier | fsspec | any fsspec file system (`gs://`, `memory://`, ...) | one GET | one PUT |
| S3Tier | s3 | `s3://` | one GET, parallel ranges if large | one PUT |

A key is a relative path of plain names joined by "/". Every tier passes `tests/tier_conformance.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa

from kvstore.errors import InvalidKey, TierUnavailable

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_KEY = re.compile(rf"{_NAME}(?:/{_NAME})*")
QUARANTINE = "quarantine/"


@dataclass(frozen=True)
class Entry:
    """One blob of a tier: its key, size in bytes, and when it was last used (Unix seconds)."""

    key: str
    size: int
    used: float


ReadThrough = Callable[[int, int], Iterator[memoryview]]


class Blob(NamedTuple):
    """A blob that a tier found: `buffer` is what `Tier.get` gives.

    `read(start, end)`, where it is given, yields the same bytes in order, for a caller that goes through all of them
    once: faster than `buffer`, which may also still be on its way. A byte of it counts once `read` has yielded it. A
    chunk is valid until the next one. It may raise TierUnavailable, or BlobReplaced: then open the blob again.
    """

    buffer: pa.Buffer
    read: ReadThrough | None = None


def check_key(key: str) -> str:
    """`key` itself. Raises InvalidKey unless it is a relative path of plain names."""
    if not _KEY.fullmatch(key):
        raise InvalidKey(f"not a valid key: {key!r}")
    return key


class Lifetime(IntEnum):
    """End of a tier's blobs: with this process, with a node of the cluster, or with neither."""

    PROCESS = 0
    NODE = 1
    STORE = 2


class Tier(ABC):
    """The contract of a storage tier.

    All methods may be called from any thread and raise InvalidKey or TierUnavailable, nothing else.

    A reader sees a blob either whole or not at all, also while it is written, replaced or deleted.
    """

    name: str
    lifetime = Lifetime.STORE
    tells_use = True  # whether `Entry.used` is when a blob was last used, not when it was written

    @abstractmethod
    def get(self, key: str) -> pa.Buffer | None:
        """The blob, read-only, or None; valid while the buffer is held, even if it is deleted."""

    def open(self, key: str) -> Blob | None:
        """The blob, for a caller that reads all of it once, as one that verifies checksums does."""
        buffer = self.get(key)
        return None if buffer is None else Blob(buffer)

    @abstractmethod
    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        """Store the concatenated buffers, replacing what was there.

        The caller must not change them afterwards.
        """

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove the blob. True if there was one.

        An object store that cannot tell answers by looking first.
        """

    def delete_all(self, keys: Collection[str]) -> int:
        """Remove blobs, in any order.

        How many there were; of a tier that would have to look first, how many keys.

        Tiers for which that is worth it remove many at once. Raises TierUnavailable if any may be left.
        """
        return sum(map(self.delete, keys))

    def leave(self, nodes: Sequence[str], until: float) -> tuple[int, int]:
        """Have other nodes keep the blobs that would end with this one; by default there are none.

        Args:
            nodes: Ray's ids of nodes that stay.
            until: when to stop (`time.monotonic`).

        Returns:
            How many blobs they took, and how many were let go of.
        """
        return 0, 0

    @abstractmethod
    def contains(self, key: str) -> bool:
        """True if the blob exists. Reads no data."""

    def stored(self, keys: Collection[str]) -> set[str]:
        """The keys that have a blob.

        Tiers for which that is worth it ask for all of them at once.

        Raises TierUnavailable if it could not be told of all; what was `found` is told with it.
        """
        answers = dict(zip(keys, self._ask_each(keys), strict=True))
        found = {key for key, answer in answers.items() if answer is True}
        for answer in answers.values():
            if isinstance(answer, TierUnavailable):
                answer.found = frozenset(found)
                raise answer
        return found

    def _ask_each(self, keys: Collection[str]) -> Iterable[bool | TierUnavailable]:
        return map(self._ask, keys)

    def _ask(self, key: str) -> bool | TierUnavailable:
        try:
            return self.contains(key)
        except TierUnavailable as error:
            return error

    @abstractmethod
    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Every blob whose key starts with `prefix`, in no order.

        Blobs written meanwhile may or may not appear.
        """

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that start with `prefix`, in no order."""
        return (entry.key for entry in self.entries(prefix))

    def size_bytes(self, prefix: str = "") -> int:
        """Bytes of all blobs whose key starts with `prefix`; lists the tier."""
        return sum(entry.size for entry in self.entries(prefix))

    def touch(self, key: str) -> None:  # noqa: B027 (a tier that cannot tell recency may do nothing)
        """Mark the blob as used now, where the tier can."""

    def quarantine(self, key: str) -> bool:
        """Move a bad blob aside, under `quarantine/`, out of readers' sight. True if there was one."""
        buffer = self.get(key)
        if buffer is None:
            return False
        self.put(QUARANTINE + check_key(key), [buffer])
        return self.delete(key)


class Guard:
    """Context manager: turn a backend's errors into TierUnavailable; pass `kvstore`'s own."""

    def __init__(
        self,
        tier: str,
        action: str,
        key: str,
        errors: tuple[type[Exception], ...],
        reason: Callable[[BaseException], str] = str,
    ) -> None:
        self.what = f"{tier}: cannot {action} {key}".rstrip()
        self._errors = errors
        self._reason = reason

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._errors) and not isinstance(error, InvalidKey | TierUnavailable):
            raise TierUnavailable(f"{self.what}: {self._reason(error)}") from error
