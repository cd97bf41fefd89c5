"""The library on a real S3 server: whatever happens, a miss or the right record, and a log that says why."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import s3fs
import torch
from kvstore_support import FINGERPRINT, canonical
from tcp_proxy import TcpProxy
from tier_conformance import TierConformance, buffers

from infra.s3_server import S3Server, S3ServerUnavailable, install, s3_server
from kvstore.errors import BlobReplaced, TierUnavailable
from kvstore.library import Library
from kvstore.records.format import encode
from kvstore.records.record import CanonicalRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import path_of
from kvstore.tiers.stack import tier_for_url
from serving.cli.doctor import check_library

_buckets = (f"bucket-{number}" for number in itertools.count())
OpenLibrary = Callable[..., Library]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    try:
        install()
    except S3ServerUnavailable as reason:
        pytest.skip(f"no S3 server here: {reason}")
    with s3_server() as running:  # what is installed has to start
        yield running


@pytest.fixture
def bucket(server: S3Server) -> str:
    """A new, empty bucket."""
    name = next(_buckets)
    s3fs.S3FileSystem(**server.storage_options()).mkdir(name)
    return name


@pytest.fixture
def proxy(server: S3Server) -> Iterator[TcpProxy]:
    """A way to the server that can be disturbed."""
    between = TcpProxy(server.port)
    yield between
    between.close()


@pytest.fixture
def library(server: S3Server, bucket: str, request: pytest.FixtureRequest) -> OpenLibrary:
    """Opens a library on the bucket alone, without a memory of its own; closed after the test."""

    def open_library(
        url: str = f"s3://{bucket}/library", options: dict[str, Any] | None = None, **fields: Any
    ) -> Library:
        settings = LibrarySettings(
            directory=None,
            url=url,
            storage_options=server.storage_options() if options is None else options,
            **{"memory_bytes": 0, "load_timeout_s": 30, "tier_failures": 100} | fields,
        )
        opened = Library(settings, FINGERPRINT)
        request.addfinalizer(lambda: opened.close(20))
        return opened

    return open_library


def big(value: float = 1.0) -> CanonicalRecord:
    """A record of 48 MiB, several ranges' worth, all of whose numbers are `value`."""
    return canonical(kv=torch.full((3, 1 << 17, 32), value))


def put(library: Library, record: CanonicalRecord) -> None:
    library.put(record)
    assert library.flush(60)


class TestRealS3(TierConformance):
    @pytest.fixture
    def tier(self, server: S3Server, bucket: str) -> Tier:
        return tier_for_url(f"s3://{bucket}/prefix", server.storage_options())


def test_records_come_back_bit_for_bit(library: OpenLibrary, server: S3Server, bucket: str) -> None:
    small, large = canonical(), canonical("large", kv=torch.randn(3, 1 << 17, 32))
    writer = library()
    for record in (small, large):
        put(writer, record)
    assert all(finding.ok for finding in check_library(writer.settings))
    reader = library()
    for record in (small, large):
        found = reader.get_canonical(record.key, "acme")
        assert found is not None
        assert torch.equal(found.kv, record.kv)
    stored = s3fs.S3FileSystem(**server.storage_options()).find(f"{bucket}/library/records")
    assert len(stored) == 2
    assert reader.stats().tier_errors == 0


@pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "no:body"}])
def test_wrong_credentials_cost_misses_and_say_so(
    library: OpenLibrary, server: S3Server, caplog: pytest.LogCaptureFixture, wrong: dict[str, str]
) -> None:
    refused = library(options=server.storage_options(**wrong))
    put(refused, canonical())
    assert refused.get_canonical(canonical().key, "acme") is None
    stats = refused.stats()
    assert (stats.misses, stats.dropped_writes) == (1, 1)
    assert stats.tier_errors >= 2
    assert "access key and secret key do not belong together" in caplog.text


def test_a_missing_bucket_costs_misses_and_is_named(library: OpenLibrary, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = library(url="s3://no-such-bucket/library")
    put(nowhere, canonical())
    assert nowhere.get_canonical(canonical().key, "acme") is None
    stats = nowhere.stats()
    assert (stats.misses, stats.dropped_writes) == (1, 1)
    assert "the bucket 'no-such-bucket' does not exist" in caplog.text
    (finding,) = check_library(nowhere.settings)
    assert not finding.ok
    assert "the bucket 'no-such-bucket' does not exist" in finding.detail


def test_a_stalled_server_is_a_miss_now_and_a_hit_later(
    library: OpenLibrary, server: S3Server, proxy: TcpProxy
) -> None:
    put(library(), canonical())
    slow = library(options=server.storage_options(proxy.url), load_timeout_s=0.3)
    proxy.flowing.clear()
    assert slow.get_canonical(canonical().key, "acme") is None
    assert (slow.stats().timeouts, slow.stats().tier_errors) == (1, 1)
    pending = slow.load("canonical", canonical().key, "acme")
    proxy.flowing.set()
    found = pending.result(30)
    assert isinstance(found, CanonicalRecord)
    assert torch.equal(found.kv, canonical().kv)


def test_many_blobs_are_deleted_batch_by_batch(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.s3._BATCH", 5)
    tier = tier_for_url(f"s3://{bucket}", server.storage_options())
    keys = [f"k{number}" for number in range(13)]
    for key in keys:
        tier.put(key, buffers(b"x"))
    assert tier.delete_all(keys[1:]) == 12
    assert list(tier.keys()) == keys[:1]
    nowhere = tier_for_url("s3://no-such-bucket", server.storage_options())
    with pytest.raises(TierUnavailable, match=r"cannot delete 5 blobs, the first k0: .*the bucket 'no-such-bucket'"):
        nowhere.delete_all(keys)


def test_a_read_that_drips_is_given_up(server: S3Server, bucket: str, proxy: TcpProxy) -> None:
    from kvstore.tiers.s3 import S3Tier

    tier = S3Tier(f"s3://{bucket}", server.storage_options(proxy.url), timeout_s=0.3)
    proxy.flowing.clear()
    with pytest.raises(TierUnavailable, match=r"no whole answer within 0\.3 s"):
        tier.get("k")


def test_a_dropped_connection_is_taken_up_again(library: OpenLibrary, server: S3Server, proxy: TcpProxy) -> None:
    put(library(), big())
    reader = library(options=server.storage_options(proxy.url))
    proxy.cut("answer", times=2, after=3 << 20)
    found = reader.get_canonical(big().key, "acme")
    assert found is not None
    assert torch.equal(found.kv, big().kv)


def test_connections_that_always_drop_cost_a_miss(library: OpenLibrary, server: S3Server, proxy: TcpProxy) -> None:
    put(library(), big())
    reader = library(options=server.storage_options(proxy.url))
    proxy.cut("answer", times=1_000_000, after=3 << 20)
    assert reader.get_canonical(big().key, "acme") is None
    stats = reader.stats()
    assert (stats.misses, stats.tier_errors, stats.corrupt) == (1, 1, 0)


def test_an_upload_that_is_cut_leaves_what_was_there(library: OpenLibrary, server: S3Server, proxy: TcpProxy) -> None:
    put(library(), big(1.0))
    writer = library(options=server.storage_options(proxy.url))
    proxy.cut("request", times=1_000_000, after=10 << 20)
    put(writer, big(2.0))
    assert writer.stats().dropped_writes == 1
    found = library().get_canonical(big().key, "acme")
    assert found is not None
    assert torch.equal(found.kv, big(1.0).kv)


def test_a_half_written_object_is_moved_aside_and_stored_again(
    library: OpenLibrary, server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = canonical()
    files, whole = s3fs.S3FileSystem(**server.storage_options()), bytes(encode(record))
    place = f"{bucket}/library/{path_of(record)}"
    files.pipe_file(place, whole[: len(whole) // 2])
    again = library()
    assert again.get_canonical(record.key, "acme") is None
    assert (again.stats().corrupt, again.stats().quarantined) == (1, 1)
    assert "quarantined" in caplog.text
    assert files.find(bucket) == [f"{bucket}/library/quarantine/{path_of(record)}"]
    put(again, record)
    assert library().get_canonical(record.key, "acme") is not None


def test_two_writers_of_one_key_leave_a_whole_record(server: S3Server, bucket: str) -> None:
    """Whole versions only, also for a reader that fetches one in several ranges while another replaces it."""
    tiers = [tier_for_url(f"s3://{bucket}", server.storage_options()) for _ in range(3)]
    versions = [bytes([n]) * (40 << 20) for n in (1, 2)]
    tiers[0].put("k", buffers(versions[0]))
    done = threading.Event()
    seen: list[pa.Buffer | None] = []

    def read() -> None:
        while not done.is_set():
            with suppress(BlobReplaced):  # at every attempt, by four writes one after the other
                seen.append(tiers[2].get("k"))

    with ThreadPoolExecutor(3) as pool:
        reading = pool.submit(read)
        writing = [
            pool.submit(tier.put, "k", buffers(v)) for _ in range(2) for tier, v in zip(tiers, versions, strict=False)
        ]
        for future in writing:
            future.result()
        done.set()
        reading.result()
    seen.append(tiers[2].get("k"))
    assert {bytes(memoryview(found)[:: 1 << 20]) for found in seen if found is not None} <= {b"\1" * 40, b"\2" * 40}
    assert len(seen) > 1
    assert all(found is not None for found in seen)


def test_a_server_that_dies_and_comes_back(
    library: OpenLibrary, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    before, during = canonical("before"), canonical("during")
    used = library(tier_failures=2, tier_cooldown_s=0.001)
    put(used, before)
    server.kill()
    try:
        assert used.get_canonical(before.key, "acme") is None
        put(used, during)
        assert used.stats().dropped_writes == 1
        assert used.stats().tier_errors >= 1
        assert "Could not connect to the endpoint" in caplog.text
        with pytest.raises(TierUnavailable):
            used.delete("canonical", before.key, "acme")
    finally:
        server.start()
    found = used.get_canonical(before.key, "acme")
    assert found is not None
    assert torch.equal(found.kv, before.kv)
    put(used, during)
    assert used.get_canonical(during.key, "acme") is not None


def test_a_server_killed_during_an_upload_has_all_of_it_or_nothing(library: OpenLibrary, server: S3Server) -> None:
    record = replace(big(), kv=torch.randn(3, 1 << 17, 32))
    writer = library()
    writer.put(record)
    server.kill()
    assert writer.flush(60)
    server.start()
    reader = library()
    found = reader.get_canonical(record.key, "acme")
    assert found is None or torch.equal(found.kv, record.kv)
    assert reader.stats().corrupt == 0
