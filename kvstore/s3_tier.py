"""S3 and what speaks its protocol. s3fs brings session, credentials and uploads; reads and look-ups go to its client.

A read is one ranged GET for a small blob. A larger one fetches the rest in parallel ranges, all of the version that
answered first. A look-up is one HEAD. What a server may refuse is said in words that name the setting to look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import pyarrow as pa
from botocore.exceptions import BotoCoreError, ClientError
from fsspec.asyn import sync

from kvstore.tiers import QUARANTINE, FsspecTier, check_key

_Answer = TypeVar("_Answer")
_RANGE_BYTES = 16 << 20  # one range of a parallel read; smaller blobs take one request
_PARALLEL = 4  # ranges of one blob under way at once
_ATTEMPTS = 3  # of a read whose connection broke, or whose blob was replaced meanwhile
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


class S3Tier(FsspecTier):
    """Blobs in an S3 bucket; `url` is `s3://bucket/prefix`. One PUT per blob, so that readers never see half of one.

    `timeout_s` bounds one read or look-up as a whole, however slowly its bytes drip in.
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
        place = self._place(key)
        with self._guarded("read", key):
            return self._wait(self._read(place))

    def put(self, key: str, buffers: Sequence[pa.Buffer]) -> None:
        path = self._path(key)
        with self._guarded("write", key):
            self._fs.pipe_file(path, b"".join(memoryview(part) for part in buffers), chunksize=_PART_BYTES)

    def contains(self, key: str) -> bool:
        place = self._place(key)
        with self._guarded("look up", key):
            return self._wait(self._exists(place))

    def delete(self, key: str) -> bool:
        place = self._place(key)
        with self._guarded("delete", key):
            return self._wait(self._remove(place))

    def quarantine(self, key: str) -> bool:
        source, target = self._place(key), self._place(QUARANTINE + check_key(key))
        with self._guarded("quarantine", key):
            return self._wait(self._move(source, target))

    async def _read(self, place: Mapping[str, str]) -> pa.Buffer | None:
        for attempt in range(_ATTEMPTS):
            try:
                return await self._read_version(place)
            except ClientError as error:
                if _code(error) in _ABSENT:
                    return None
                if _code(error) not in _REPLACED or attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("every attempt returns or raises")

    async def _read_version(self, place: Mapping[str, str]) -> pa.Buffer:
        """The blob as it was when its first range was answered. Raises ClientError if it is absent or replaced."""
        try:
            start, answer = await self._fetch(place, Range=f"bytes=0-{_RANGE_BYTES - 1}")
        except ClientError as error:
            if _code(error) not in {"416", "InvalidRange"}:
                raise
            return pa.py_buffer(b"")  # an empty blob has no first byte
        size = int(answer["ContentRange"].rpartition("/")[2]) if "ContentRange" in answer else len(start)
        if size == len(start):
            return pa.py_buffer(start)
        whole = pa.allocate_buffer(size)
        view, turn = memoryview(whole).cast("B"), asyncio.Semaphore(_PARALLEL)
        view[: len(start)] = start

        async def fill(first: int, end: int) -> None:
            async with turn:
                part, _ = await self._fetch(place, Range=f"bytes={first}-{end - 1}", IfMatch=answer["ETag"])
                view[first:end] = part

        try:
            async with asyncio.TaskGroup() as group:
                for first in range(len(start), size, _RANGE_BYTES):
                    group.create_task(fill(first, min(first + _RANGE_BYTES, size)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return whole

    async def _fetch(self, place: Mapping[str, str], **options: str) -> tuple[bytes, Mapping[str, Any]]:
        """The bytes of one GET and its headers. Tries again when the connection breaks while they arrive."""
        client = await self._fs.set_session()
        for left in reversed(range(_ATTEMPTS)):
            answer = await client.get_object(**place, **options)
            try:
                return await answer["Body"].read(), answer
            except (BotoCoreError, aiohttp.ClientError, OSError):
                if not left:
                    raise
            finally:
                answer["Body"].close()
        raise AssertionError("every attempt returns or raises")

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

    async def _move(self, source: Mapping[str, str], target: Mapping[str, str]) -> bool:
        """Copies on the server, then deletes."""
        client = await self._fs.set_session()
        try:
            await client.copy_object(**target, CopySource=dict(source))
        except ClientError as error:
            if _code(error) in _ABSENT:
                return False
            raise
        await client.delete_object(**source)
        return True

    def _wait(self, work: Awaitable[_Answer]) -> _Answer:
        """Runs `work` on s3fs's event loop, which is a thread of its own. Raises TimeoutError."""
        return sync(self._fs.loop, asyncio.wait_for, work, self._timeout_s)

    def _place(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _reason(self, error: BaseException) -> str:
        cause = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(cause, ClientError) and _code(cause) in _REASONS:
            return f"{_code(cause)}: {_REASONS[_code(cause)].format(bucket=self._bucket)}"
        if isinstance(error, TimeoutError):
            return f"no whole answer within {self._timeout_s:g} s"
        return super()._reason(error)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
