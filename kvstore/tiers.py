"""Storage tiers: named blobs, nothing more. What the blobs mean is the library's business (`kvstore.library`).

| tier | backing | read | write |
|---|---|---|---|
| MemoryTier | a dictionary | the stored buffer itself | the buffer itself |
| DiskTier | a directory, shared by processes of a node | memory map | temporary name, fsync, rename |
| FsspecTier | any fsspec file system (`s3://`, `memory://`, ...) | one GET | one PUT |

A key is a relative path of plain names joined by "/". Every tier passes `tests/tier_conformance.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa

from kvstore.errors import InvalidKey, TierUnavailable

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_KEY = re.compile(rf"{_NAME}(?:/{_NAME})*")
QUARANTINE = "quarantine/"
_WRITE_ATTEMPTS = 20


@dataclass(frozen=True)
class Entry:
    """One blob of a tier: its key, size in bytes, and when it was last used (Unix seconds)."""

    key: str
    size: int
    used: float


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

    @abstractmethod
    def get(self, key: str) -> pa.Buffer | None:
        """The blob, read-only and valid for as long as the buffer is held, even if it is deleted; None if absent."""

    @abstractmethod
    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        """Stores the concatenated buffers, replacing what was there. The caller must not change them afterwards."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Removes the blob. True if there was one. (An object store that cannot tell answers by looking first.)"""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether the blob exists. Reads no data."""

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


class DiskTier(Tier):
    """Blobs as files below `root`. Renames make writes atomic, so processes share a root without a common lock.

    A writer holds an advisory lock on its temporary file for as long as it lives; a temporary file that nobody
    holds was left by a writer that died, and is removed when a tier is opened. After a power cut a blob written last
    may be missing; it is never half there.
    """

    _TEMPORARY = ".partial"

    def __init__(self, root: Path | str, name: str = "disk") -> None:
        self.name = name
        self.root = Path(root).absolute()
        self._partial = self.root / self._TEMPORARY
        with self._guarded("open"):
            self._partial.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def get(self, key: str) -> pa.Buffer | None:
        path = self._path(key)
        with self._guarded("read", key):
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    return None
                if status.st_size == 0:
                    return pa.py_buffer(b"")
                # The mapping outlives the file object, so a cached record holds no file descriptor.
                with pa.memory_map(os.fspath(path), "r") as file:
                    return file.read_buffer()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        path = self._path(key)
        with self._guarded("write", key):
            # Another process may sweep the temporary file in the instant before it is locked, or remove the folder
            # as empty in the instant after it is made: then write again.
            for _ in range(_WRITE_ATTEMPTS - 1):
                with suppress(FileNotFoundError, FileExistsError):
                    self._write(path, buffers)
                    return
            self._write(path, buffers)

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("delete", key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return False
            # Folder names tell what a tier held; a writer that loses its folder here makes it again.
            with suppress(OSError):
                for folder in path.relative_to(self.root).parents[:-1]:
                    (self.root / folder).rmdir()
            return True

    def contains(self, key: str) -> bool:
        return self._path(key).is_file()

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        with self._guarded("list", prefix):
            yield from self._walk(self.root / folder, f"{folder}/" if folder else "", prefix)

    def touch(self, key: str) -> None:
        with suppress(OSError):
            os.utime(self._path(key))

    def quarantine(self, key: str) -> bool:
        source, target = self._path(key), self._path(QUARANTINE + key)
        with self._guarded("quarantine", key):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.replace(source, target)
            except FileNotFoundError:
                return False
            return True

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _write(self, path: Path, buffers: Sequence[pa.Buffer]) -> None:
        temporary = self._partial / uuid.uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                for buffer in buffers:
                    view = memoryview(buffer)
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
                os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _sweep(self) -> None:
        """Removes temporary files whose writer is dead."""
        for temporary in self._partial.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), temporary.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()

    def _walk(self, folder: Path, base: str, prefix: str) -> Iterator[Entry]:
        try:
            found = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in found:
            key = base + item.name
            if item.name.startswith("."):
                continue
            if item.is_dir(follow_symlinks=False):
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._walk(Path(item.path), f"{key}/", prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):
                    status = item.stat()
                    yield Entry(key, status.st_size, status.st_mtime)

    def _guarded(self, action: str, key: str = "") -> _Guard:
        return _Guard(self.name, action, key, (OSError, pa.ArrowException))


class FsspecTier(Tier):
    """Blobs on any fsspec file system; `url` names the root, such as `s3://bucket/prefix`. One PUT per blob.

    Local paths belong to `DiskTier` (see `tier_for_url`): fsspec does not write them atomically.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, name: str = "remote") -> None:
        self.name = name
        # Listings must be fresh: other processes write to the same store.
        options = {"use_listings_cache": False, **(storage_options or {})}
        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = root.rstrip("/")

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
            if not self._fs.isfile(path):
                return False
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)
            return True

    def contains(self, key: str) -> bool:
        path = self._path(key)
        with self._guarded("look up", key):
            return bool(self._fs.isfile(path))

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

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _guarded(self, action: str, key: str) -> _Guard:
        # Backends raise their own client's errors (botocore, aiohttp, ...), which share no base class.
        return _Guard(self.name, action, key, (Exception,))


def tier_for_url(url: str, storage_options: Mapping[str, Any] | None = None) -> Tier:
    """The tier that fits a URL: DiskTier for `file://` and plain paths, FsspecTier for the rest."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return DiskTier(unquote(parts.path))
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


class _Guard:
    """Turns a backend's errors into TierUnavailable; `kvstore`'s own pass unchanged."""

    def __init__(self, tier: str, action: str, key: str, errors: tuple[type[Exception], ...]) -> None:
        self._what = f"{tier}: cannot {action} {key}".rstrip()
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._errors) and not isinstance(error, InvalidKey | TierUnavailable):
            raise TierUnavailable(f"{self._what}: {error}") from error
