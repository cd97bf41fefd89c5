"""The S3 tier against moto, which answers at once; `tests/integration/test_s3.py` has a real server and its faults."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
import s3fs
from s3_mock import s3_mock
from tier_conformance import TierConformance, buffers

from kvstore.errors import BlobReplaced, TierUnavailable
from kvstore.tiers import s3 as s3_tier
from kvstore.tiers.base import Tier
from kvstore.tiers.s3 import S3Tier
from kvstore.tiers.stack import tier_for_url

_buckets = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """storage_options of a running server."""
    with s3_mock() as options:
        yield options


@pytest.fixture
def bucket(options: dict[str, Any]) -> str:
    """A new, empty bucket."""
    name = next(_buckets)
    s3fs.S3FileSystem(**options).mkdir(name)
    return name


@pytest.fixture
def tier(options: dict[str, Any], bucket: str) -> Tier:
    return tier_for_url(f"s3://{bucket}/prefix", options)


class TestS3Tier(TierConformance):
    @pytest.fixture
    def tier(self, tier: Tier) -> Tier:
        return tier


def test_s3_urls_get_the_s3_tier(tier: Tier) -> None:
    assert isinstance(tier, S3Tier)


def test_a_bucket_without_prefix_is_a_root_too(options: dict[str, Any], bucket: str) -> None:
    tier = tier_for_url(f"s3://{bucket}", options)
    tier.put("a/b", buffers(b"x"))
    assert bytes(tier.get("a/b") or b"") == b"x"
    assert list(tier.keys()) == ["a/b"]


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 2000, 5432])
def test_ranges_of_any_number_make_up_the_blob(tier: Tier, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "_RANGE_BYTES", 1000)
    blob = os.urandom(size)
    tier.put("k", buffers(blob))
    assert bytes(tier.get("k") or b"") == blob


def replace_after_first_answers(tier: S3Tier, monkeypatch: pytest.MonkeyPatch, bodies: Iterator[bytes]) -> None:
    """Writes the next of `bodies` in a blob's place each time its first range was answered."""
    fill = tier._fill

    async def replace_then_fill(download: Any, place: dict[str, str], answer: Any) -> None:
        body = next(bodies, None)
        if body is not None:
            client = await tier._fs.set_session()
            await client.put_object(**place, Body=body)
        await fill(download, place, answer)

    monkeypatch.setattr(s3_tier, "_RANGE_BYTES", 1000)
    monkeypatch.setattr(tier, "_fill", replace_then_fill)


def test_a_blob_replaced_while_it_is_read_is_read_anew(tier: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("k", buffers(b"a" * 3000))
    bodies = iter([b"b" * 2500])
    replace_after_first_answers(tier, monkeypatch, bodies)
    assert bytes(tier.get("k") or b"") == b"b" * 2500
    assert next(bodies, None) is None


def test_a_reader_that_uses_bytes_as_they_come_in_hears_of_a_replacement(
    tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put("k", buffers(b"a" * 3000))
    replace_after_first_answers(tier, monkeypatch, iter([b"b" * 2500]))
    blob = tier.open("k")
    assert blob is not None
    assert blob.read is not None
    with pytest.raises(BlobReplaced):
        b"".join(blob.read(0, 3000))


def test_bytes_may_be_used_while_later_ones_are_on_their_way(tier: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "_RANGE_BYTES", 1000)
    blob, fetch, held = os.urandom(2500), tier._fetch, threading.Event()

    async def hold_later_ranges(download: Any, place: Any, first: int, *others: Any) -> None:
        if first:
            await asyncio.to_thread(held.wait, 20)
        await fetch(download, place, first, *others)

    monkeypatch.setattr(tier, "_fetch", hold_later_ranges)
    tier.put("k", buffers(blob))
    opened = tier.open("k")
    assert opened is not None
    assert opened.read is not None
    assert b"".join(opened.read(0, 1000)) == blob[:1000]
    held.set()
    assert b"".join(opened.read(1000, 2500)) == blob[1000:]
    assert bytes(opened.buffer) == blob


def test_a_blob_that_never_stands_still_is_unavailable(tier: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.put("k", buffers(b"0" * 3000))
    replace_after_first_answers(tier, monkeypatch, (str(n).encode() * 3000 for n in itertools.count(1)))
    with pytest.raises(TierUnavailable, match="cannot read k"):
        tier.get("k")


def test_an_upload_that_nobody_takes_is_given_up(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "_SLOWEST", 1 << 30)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and reads nothing
        place = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        tier = S3Tier("s3://bucket/prefix", options | place, timeout_s=0.5)
        with pytest.raises(TierUnavailable, match=r"within 0\.5 s"):
            tier.put("key", buffers(bytes(32 << 20)))


def test_a_missing_bucket_is_named(options: dict[str, Any]) -> None:
    tier = tier_for_url("s3://no-such-bucket/x", options)
    for call in (lambda: tier.get("k"), lambda: tier.put("k", [pa.py_buffer(b"x")])):
        with pytest.raises(TierUnavailable, match="the bucket 'no-such-bucket' does not exist"):
            call()
