"""Storage tiers: named blobs, nothing more. What the blobs mean is the library's business (`kvstore.library`).

| tier | backing | read | write |
|---|---|---|---|
| MemoryTier | a dictionary | the stored buffer itself | the buffer itself |
| DiskTier (`kvstore.tiers.disk`) | a directory, shared by processes of a node | memory map | temporary name, rename |
| FsspecTier | any fsspec file system (`gs://`, `memory://`, ...) | one GET | one PUT |
| S3Tier (`kvstore.tiers.s3`) | `s3://` | one GET, parallel ranges if large | one PUT |

A key is a relative path of plain names joined by "/". Every tier passes `tests/tier_conformance.py`.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa

from kvstore.errors import InvalidKey, TierUnavailable

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_KEY = re.compile(rf"{_NAME}(?:/{_NAME})*")
QUARANTINE = "quarantine/"
_ASKING = 16  # look-ups at once, of a file system that cannot be asked for several


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


class Tier(ABC):
    """The contract. All methods may be called from any thread and raise InvalidKey or TierUnavailable, nothing else.

    A reader sees a blob either whole or not at all, also while it is written, replaced or deleted.
    """

    name: str
    tells_use = True  # whether `Entry.used` is when a blob was last used, not when it was written

    @abstractmethod
    def get(self, key: str) -> pa.Buffer | None:
        """The blob, read-only and valid for as long as the buffer is held, even if it is deleted; None if absent."""

    def open(self, key: str) -> Blob | None:
        """The blob, for a caller that reads all of it once, as one that verifies checksums does."""
        buffer = self.get(key)
        return None if buffer is None else Blob(buffer)

    @abstractmethod
    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        """Stores the concatenated buffers, replacing what was there. The caller must not change them afterwards."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Removes the blob. True if there was one. (An object store that cannot tell answers by looking first.)"""

    def delete_all(self, keys: Collection[str]) -> int:
        """Removes blobs, in any order. How many there were; of a tier that would have to look first, how many keys.

        Tiers for which that is worth it remove many at once. Raises TierUnavailable if any may be left.
        """
        return sum(map(self.delete, keys))

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether the blob exists. Reads no data."""

    def stored(self, keys: Collection[str]) -> set[str]:
        """Those of the keys that have a blob. Tiers for which that is worth it ask for all of them at once.

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
        """Every blob whose key starts with `prefix`, in no order; blobs written meanwhile may or may not appear."""

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that start with `prefix`, in no order."""
        return (entry.key for entry in self.entries(prefix))

    def size_bytes(self, prefix: str = "") -> int:
        """Bytes of all blobs whose key starts with `prefix`; lists the tier."""
        return sum(entry.size for entry in self.entries(prefix))

    def touch(self, key: str) -> None:  # noqa: B027 (a tier that cannot tell recency may do nothing)
        """Marks the blob as used now, where the tier can."""

    def quarantine(self, key: str) -> bool:
        """Moves a bad blob aside, under `quarantine/`, so that nobody reads it again. True if there was one."""
        buffer = self.get(key)
        if buffer is None:
            return False
        self.put(QUARANTINE + check_key(key), [buffer])
        return self.delete(key)


class MemoryTier(Tier):
    """Blobs in this process, for tests and for hosts without a disk."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[pa.Buffer, float]] = {}

    def get(self, key: str) -> pa.Buffer | None:
        with self._lock:
            found = self._blobs.get(check_key(key))
        return None if found is None else found[0]

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        check_key(key)
        blob = buffers[0] if len(buffers) == 1 else pa.py_buffer(b"".join(memoryview(part) for part in buffers))
        with self._lock:
            self._blobs[key] = (blob, time.time())

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._blobs.pop(check_key(key), None) is not None

    def contains(self, key: str) -> bool:
        return check_key(key) in self._blobs

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            found = [Entry(key, blob.size, used) for key, (blob, used) in self._blobs.items() if key.startswith(prefix)]
        return iter(found)

    def touch(self, key: str) -> None:
        with self._lock:
            if key in self._blobs:
                self._blobs[key] = (self._blobs[key][0], time.time())


class FsspecTier(Tier):
    """Blobs on any fsspec file system; `url` names the root, such as `gs://bucket/prefix`. One PUT per blob.

    Local paths belong to `DiskTier` (see `tier_for_url`): fsspec does not write them atomically.
    """

    tells_use = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, name: str = "remote") -> None:
        self.name = name
        # Listings must be fresh: other processes write to the same store.
        options = {"use_listings_cache": False, **(storage_options or {})}
        with self._guarded("open", url):
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/")
        self._asking = ThreadPoolExecutor(_ASKING, thread_name_prefix="kvstore-look-up")

    def get(self, key: str) -> pa.Buffer | None:
        path = self._path(key)
        with self._guarded("read", key):
            try:
                return pa.py_buffer(self._fs.cat_file(path))
            except (FileNotFoundError, IsADirectoryError):
                return None

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        path = self._path(key)
        with self._guarded("write", key):
            self._fs.pipe_file(path, b"".join(memoryview(part) for part in buffers))

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("delete", key):
            if not self._is_blob(path):
                return False
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)
            return True

    def contains(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("look up", key):
            return self._is_blob(path)

    def _ask_each(self, keys: Collection[str]) -> Iterable[bool | TierUnavailable]:
        return self._asking.map(self._ask, keys)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        base = f"{self._root}/{folder}" if folder else self._root
        with self._guarded("list", prefix):
            try:
                found = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return
            for path, info in found.items():
                key = path[len(self._root) + 1 :]
                if key.startswith(prefix):
                    yield Entry(key, int(info.get("size") or 0), _modified(info))

    def _is_blob(self, path: str) -> bool:
        """fsspec's own `isfile` answers False when it could not look."""
        try:
            return bool(self._fs.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _reason(self, error: BaseException) -> str:
        """Why the backend failed, in words for the log."""
        return f"{type(error).__name__}: {error}"

    def _guarded(self, action: str, key: str) -> Guard:
        # Backends raise their own client's errors (botocore, aiohttp, ...), which share no base class.
        return Guard(self.name, action, key, (Exception,), self._reason)


def tier_for_url(url: str, storage_options: Mapping[str, Any] | None = None, durable: bool = True) -> Tier:
    """The tier that fits a URL: DiskTier for `file:` and plain paths, S3Tier for `s3://`, else FsspecTier."""
    from kvstore.tiers.disk import DiskTier  # these build on this module
    from kvstore.tiers.s3 import S3Tier

    if "://" not in url and not url.startswith("file:"):
        return DiskTier(url, durable=durable)  # whatever its name has in it that would mean something in a URL
    parts = urlsplit(url)
    if parts.scheme == "file":
        return DiskTier(unquote(parts.path), durable=durable)
    if parts.scheme in ("s3", "s3a"):
        return S3Tier(url, storage_options)
    return FsspecTier(url, storage_options)


def _modified(info: Mapping[str, Any]) -> float:
    """Last modification in Unix seconds, however the file system calls it; 0 where it does not say."""
    for name in ("LastModified", "mtime", "created", "last_modified", "updated"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0


class Guard:
    """Turns a backend's errors into TierUnavailable; `kvstore`'s own pass unchanged."""

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
