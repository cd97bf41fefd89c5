"""Tier on S3-compatible object stores.

s3fs brings session, credentials and uploads; reads and look-ups go to its client.

A read is one ranged GET for a small blob. A larger one fetches the rest in parallel ranges, all of the version that
answered first. Its bytes may be used in order as they come in (`open`). A look-up is one HEAD. What a server may
refuse is said in words that name the setting to look at.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import pyarrow as pa
from botocore.exceptions import BotoCoreError, ClientError
from fsspec.asyn import sync

from kvstore.errors import BlobReplaced, TierUnavailable
from kvstore.tiers.base import QUARANTINE, Blob, Guard, check_key
from kvstore.tiers.fsspec import FsspecTier

_Answer = TypeVar("_Answer")
_RANGE_BYTES = 16 << 20  # one range of a parallel read; smaller blobs take one request
_PARALLEL = 4  # ranges of one blob under way at once
_BATCH = 512  # blobs that one time-out covers when many are deleted
_DELETES = 32  # of them under way at once
_ATTEMPTS = 3  # of a read whose connection broke, or whose blob was replaced meanwhile
_CHUNK_BYTES = 1 << 19  # what is taken from a connection at once, and what a reader gets to see at once
_SLOWEST = 1 << 20  # bytes a second; an upload that is slower has failed
_PART_BYTES = 5 << 29  # s3fs uploads less than twice this, S3's limit of 5 GiB, with one PUT
_CONFIG = {
    "connect_timeout": 3,
    "read_timeout": 10,
    "retries": {"mode": "standard", "total_max_attempts": 2},
    "max_pool_connections": 64,
}
_ABSENT = {"404", "NoSuchKey"}
_REPLACED = {"412", "PreconditionFailed"}
_REASONS = {
    "NoSuchBucket": "the bucket {bucket!r} does not exist; create it, or correct the URL",
    "SignatureDoesNotMatch": "access key and secret key do not belong together (storage_options: key, secret)",
    "InvalidAccessKeyId": "the access key is unknown (storage_options: key)",
    "AccessDenied": "the credentials do not allow it (storage_options: key, secret; the bucket's policy)",
    "403": "the credentials do not allow it (storage_options: key, secret; the bucket's policy)",
}


class _Download:
    """A download in progress: written by s3fs's thread, read in order by one other."""

    def __init__(self, size: int) -> None:
        self.buffer = pa.allocate_buffer(size)
        self.view = memoryview(self.buffer).cast("B")
        self.task: asyncio.Task[None] | None = None  # the event loop itself holds tasks weakly
        self._ends = {first: first for first in range(0, size, _RANGE_BYTES)}  # how far each range has come
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def fill(self, first: int, position: int, part: bytes) -> None:
        """Add bytes of the range that begins at `first`."""
        self.view[position : position + len(part)] = part
        with self._changed:
            self._ends[first] = position + len(part)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the download: no more bytes will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_beyond(self, position: int) -> int:
        """Wait for the byte at `position`; returns the end of the bytes that follow it.

        Raises what ended the download.
        """
        first = position // _RANGE_BYTES * _RANGE_BYTES
        with self._changed:
            while self._ends[first] <= position:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._ends[first]


class S3Tier(FsspecTier):
    """Blobs in an S3 bucket; `url` is `s3://bucket/prefix`.

    One PUT per blob, so that readers never see half of one.

    `timeout_s` bounds one read or look-up as a whole, however slowly its bytes drip in; a write may take as long, and
    what its bytes take at _SLOWEST.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        name: str = "remote",
        timeout_s: float = 30.0,
    ) -> None:
        options = dict(storage_options or {})
        options["config_kwargs"] = _CONFIG | options.get("config_kwargs", {})
        super().__init__(url, options, name)
        self._fs.retries = 1  # botocore's own retries are enough
        self._timeout_s = timeout_s
        self._bucket, _, prefix = self._root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""

    def get(self, key: str) -> pa.Buffer | None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                blob = self.open(key)
                if blob is not None and blob.read is not None:
                    for _ in blob.read(0, blob.buffer.size):
                        pass
                return None if blob is None else blob.buffer
            except BlobReplaced:
                if not left:
                    raise
        raise AssertionError("every attempt returns or raises")

    def open(self, key: str) -> Blob | None:
        """The blob as soon as its size is known; `read` waits for its bytes."""
        place = self._place(key)
        with self._guarded("read", key):
            download = self._wait(self._start(place))
        if download is None:
            return None

        def read(start: int, end: int) -> Iterator[memoryview]:
            while start < end:
                with self._guarded("read", key):
                    arrived = download.wait_beyond(start)
                yield download.view[start : min(arrived, end)]
                start = arrived

        return Blob(download.buffer, read)

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        path = self._path(key)
        with self._guarded("write", key):
            whole = b"".join(memoryview(part) for part in buffers)
            self._wait(self._fs._pipe_file(path, whole, chunksize=_PART_BYTES), len(whole) / _SLOWEST)

    def contains(self, key: str) -> bool:
        return bool(self.stored([key]))

    def stored(self, keys: Collection[str]) -> set[str]:
        places = [self._place(key) for key in keys]
        found: set[str] = set()
        try:
            with self._guarded("look up", ", ".join(keys)):
                answers = self._wait(self._exist(places))
                found = {key for key, answer in zip(keys, answers, strict=True) if answer is True}
                for answer in answers:
                    if isinstance(answer, BaseException):
                        raise answer
        except TierUnavailable as error:
            error.found = frozenset(found)
            raise
        return found

    def delete(self, key: str) -> bool:
        place = self._place(key)
        with self._guarded("delete", key):
            return self._wait(self._remove(place))

    def delete_all(self, keys: Collection[str]) -> int:
        places = [self._place(key) for key in keys]
        for first in range(0, len(places), _BATCH):
            batch = places[first : first + _BATCH]
            with self._guarded("delete", f"{len(batch)} blobs, the first {batch[0]['Key']}"):
                self._wait(self._remove_all(batch))
        return len(places)

    def quarantine(self, key: str) -> bool:
        source, target = self._place(key), self._place(QUARANTINE + check_key(key))
        with self._guarded("quarantine", key):
            return self._wait(self._move(source, target))

    async def _start(self, place: Mapping[str, str]) -> _Download | None:
        """Request a blob's first range; the rest arrives behind the download that this returns."""
        client = await self._fs.set_session()
        try:
            answer = await client.get_object(**place, Range=f"bytes=0-{_RANGE_BYTES - 1}")
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            if _code(error) not in {"416", "InvalidRange"}:
                raise
            return _Download(0)  # an empty blob has no first byte
        size = int(answer["ContentRange"].rpartition("/")[2]) if "ContentRange" in answer else answer["ContentLength"]
        download = _Download(size)
        download.task = asyncio.create_task(self._fill(download, place, answer))
        return download

    async def _fill(self, download: _Download, place: Mapping[str, str], answer: Mapping[str, Any]) -> None:
        """Download a whole blob, of the version that answered the first range."""
        turn = asyncio.Semaphore(_PARALLEL)

        async def fill(first: int, answer: Mapping[str, Any] | None = None) -> None:
            async with turn:
                await self._fetch(download, place, first, etag, answer)

        etag = answer["ETag"]
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                group.create_task(fill(0, answer))
                for first in range(_RANGE_BYTES, download.buffer.size, _RANGE_BYTES):
                    group.create_task(fill(first))
        except* Exception as failed:
            error: BaseException = failed
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            download.fail(error)

    async def _fetch(
        self, download: _Download, place: Mapping[str, str], first: int, etag: str, answer: Mapping[str, Any] | None
    ) -> None:
        """Download one range, resuming where a connection breaks."""
        client = await self._fs.set_session()
        position, end = first, min(first + _RANGE_BYTES, download.buffer.size)
        for left in reversed(range(_ATTEMPTS)):
            if answer is None:
                answer = await client.get_object(**place, Range=f"bytes={position}-{end - 1}", IfMatch=etag)
            try:
                while position < end:
                    part = await answer["Body"].read(_CHUNK_BYTES)
                    if not part:
                        raise OSError("the connection ended before its last byte")
                    download.fill(first, position, part)
                    position += len(part)
                return
            except (BotoCoreError, aiohttp.ClientError, OSError):
                if not left:
                    raise
            finally:
                answer["Body"].close()
            answer = None

    async def _exist(self, places: Sequence[Mapping[str, str]]) -> list[bool | BaseException]:
        return await asyncio.gather(*map(self._exists, places), return_exceptions=True)

    async def _exists(self, place: Mapping[str, str]) -> bool:
        client = await self._fs.set_session()
        try:
            await client.head_object(**place)
        except ClientError as error:
            if _code(error) in _ABSENT:
                return False
            raise
        return True

    async def _remove(self, place: Mapping[str, str]) -> bool:
        if not await self._exists(place):
            return False
        client = await self._fs.set_session()
        await client.delete_object(**place)
        return True

    async def _remove_all(self, places: Sequence[Mapping[str, str]]) -> None:
        """Delete blobs one by one: not every S3 server knows the bulk request."""
        client = await self._fs.set_session()
        turn = asyncio.Semaphore(_DELETES)

        async def remove(place: Mapping[str, str]) -> None:
            async with turn:
                await client.delete_object(**place)  # succeeds where there is none

        for answer in await asyncio.gather(*map(remove, places), return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def _move(self, source: Mapping[str, str], target: Mapping[str, str]) -> bool:
        """Copy on the server, then delete."""
        client = await self._fs.set_session()
        try:
            await client.copy_object(**target, CopySource=dict(source))
        except ClientError as error:
            if _code(error) in _ABSENT:
                return False
            raise
        await client.delete_object(**source)
        return True

    def _guarded(self, action: str, key: str) -> _S3Guard:
        return _S3Guard(self.name, action, key, (Exception,), self._reason)

    def _wait(self, work: Awaitable[_Answer], longer_s: float = 0.0) -> _Answer:
        """Run `work` on s3fs's event loop, which is a thread of its own. Raises TimeoutError."""
        return sync(self._fs.loop, asyncio.wait_for, work, self._timeout_s + longer_s)

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _reason(self, error: BaseException) -> str:
        cause = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(cause, ClientError) and _code(cause) in _REASONS:
            return f"{_code(cause)}: {_REASONS[_code(cause)].format(bucket=self._bucket)}"
        if isinstance(error, TimeoutError):
            return f"no whole answer within {self._timeout_s:g} s (a write: one second more per MiB)"
        return super()._reason(error)


class _S3Guard(Guard):
    """Guard that tells a blob replaced during a read from one that cannot be read."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClientError) and _code(error) in _REPLACED:
            raise BlobReplaced(f"{self.what}: it was written anew") from error
        super().__exit__(kind, error, trace)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
