"""The S3 tier against moto, which answers at once; `tests/integration/test_s3.py` has a real server and its faults."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
import s3fs
from s3_mock import s3_mock
from tier_conformance import TierConformance, buffers

from kvstore import s3_tier
from kvstore.errors import TierUnavailable
from kvstore.s3_tier import S3Tier
from kvstore.tiers import Tier, tier_for_url

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


def test_a_blob_replaced_while_it_is_read_is_read_anew(tier: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "_RANGE_BYTES", 1000)
    tier.put("k", buffers(b"a" * 3000))
    fetch, replaced = tier._fetch, False

    async def replace_after_the_first_range(place: dict[str, str], **asked: str) -> Any:
        nonlocal replaced
        answer = await fetch(place, **asked)
        if not replaced:
            replaced = True
            client = await tier._fs.set_session()
            await client.put_object(**place, Body=b"b" * 2500)
        return answer

    monkeypatch.setattr(tier, "_fetch", replace_after_the_first_range)
    assert bytes(tier.get("k") or b"") == b"b" * 2500
    assert replaced


def test_a_blob_that_never_stands_still_is_unavailable(tier: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "_RANGE_BYTES", 1000)
    tier.put("k", buffers(b"0" * 3000))
    fetch, versions = tier._fetch, itertools.count(1)

    async def replace_after_every_first_range(place: dict[str, str], **asked: str) -> Any:
        answer = await fetch(place, **asked)
        if "IfMatch" not in asked:
            client = await tier._fs.set_session()
            await client.put_object(**place, Body=str(next(versions)).encode() * 3000)
        return answer

    monkeypatch.setattr(tier, "_fetch", replace_after_every_first_range)
    with pytest.raises(TierUnavailable, match="cannot read k"):
        tier.get("k")


def test_a_missing_bucket_is_named(options: dict[str, Any]) -> None:
    tier = tier_for_url("s3://no-such-bucket/x", options)
    for call in (lambda: tier.get("k"), lambda: tier.put("k", [pa.py_buffer(b"x")])):
        with pytest.raises(TierUnavailable, match="the bucket 'no-such-bucket' does not exist"):
            call()
