"""A tier at any fsspec URL."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any

import fsspec
import pyarrow as pa

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Entry, Guard, Tier, check_key

_ASKING = 16  # look-ups at once: fsspec cannot ask for several


class FsspecTier(Tier):
    """Blobs on any fsspec file system; `url` names the root, such as `gs://bucket/prefix`.

    One PUT per blob. Local paths belong to `DiskTier` (see `tier_for_url`): fsspec does not write them atomically.
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


def _modified(info: Mapping[str, Any]) -> float:
    """Last modification in Unix seconds, by any of the names in use; 0 if unknown."""
    for name in ("LastModified", "mtime", "created", "last_modified", "updated"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0
