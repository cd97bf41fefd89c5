"""What replicas report: from a real library and a real admission, and a loop that says what it is told to say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from kvstore_support import MakeLibrary, canonical

from decode_workers.admission import Admission
from kvstore.tiers.memory import MemoryTier
from prefill_workers.engine.device_cache import DeviceCache
from prefill_workers.prefix_digests import MARK_BYTES
from serving.routing.decode_policy import DecodeReport
from serving.routing.policy import parsed
from serving.routing.prefill_policy import PrefillReport, mark_of
from serving.routing.reports import DecodeReporter, PrefillReporter


def loop(**fields: float | None) -> SimpleNamespace:
    stats = {"tokens_queued": 70, "waiting": 2, "running": 1, "fixed_tokens": 16.0, "seconds_per_token": None}
    begun = {"marks_version": 3, "marks": lambda limit: b"beginning"[: 8 * limit]}
    return SimpleNamespace(stats=lambda: SimpleNamespace(**stats | fields), **begun)


def test_a_prefill_report_names_what_is_in_memory_and_is_numbered(make_library: MakeLibrary):
    library = make_library(MemoryTier())
    reporter = PrefillReporter(loop(), library, bytes_per_token=1024, hot_chunks=2)
    first = reporter.stats()
    assert parsed(PrefillReport, first) == PrefillReport(
        70, 3, 16.0, None, None, 1024, b"", library.hot_version, b"beginning", 3
    )
    records = [canonical(name) for name in "abc"]
    for record in records:
        library.put(record)
    second, third = reporter.stats(), reporter.stats()
    assert [one["sequence"] for one in (first, second, third)] == [0, 1, 2]
    marks = {second["hot"][i : i + MARK_BYTES] for i in (0, MARK_BYTES)}
    assert len(second["hot"]) == 2 * MARK_BYTES
    assert marks < {mark_of(record.content) for record in records}
    assert second["hot_version"] == third["hot_version"] != first["hot_version"]


def test_a_prefill_report_names_what_its_gpu_has(make_library: MakeLibrary):
    library, cache = make_library(MemoryTier()), DeviceCache[object](1 << 20)
    records = [canonical(name) for name in "abc"]
    for record in records:
        library.put(record)

    def on_device(chunks):
        return cache.version, [cache.holds(kv) for kv in chunks]

    reporter = PrefillReporter(loop(), library, 1024, hot_chunks=9, on_device=on_device)
    first = reporter.stats()
    assert first["on_device"] == b""
    cache.put(records[1].kv, object(), 100)
    second = reporter.stats()
    assert second["on_device"] == mark_of(records[1].content)
    assert second["device_version"] != first["device_version"]
    assert cache.hits == cache.misses == 0, "a look is no use"
    assert PrefillReporter(loop(), library, 1024, hot_chunks=9).stats()["on_device"] is None


def test_a_prefill_report_tells_how_fast_loads_were(make_library: MakeLibrary):
    tier, record = MemoryTier(), canonical()
    library = make_library(tier)
    library.put(record)
    library.flush()
    again = make_library(tier)
    again.get_canonical(record.key, "acme")
    busy = loop(fixed_tokens=40.0, seconds_per_token=0.5)
    report = parsed(PrefillReport, PrefillReporter(busy, again, 1024, 2).stats())
    assert report is not None
    assert (report.fixed_tokens, report.seconds_per_token) == (40.0, 0.5)
    stats = again.stats()
    assert report.bytes_per_second == pytest.approx(stats.loaded_bytes / (stats.load_ms / 1e3))


async def test_a_decode_report_counts_what_waits():
    admission = Admission(blocks=10, block_size=16)
    engine = SimpleNamespace(
        admission=admission,
        is_alive=True,
        max_model_len=512,
        stats=lambda: SimpleNamespace(
            blocks_reserved=admission.reserved,
            blocks_awaited=admission.blocks_awaited,
            blocks_total=admission.total,
            running=admission.running,
            waiting=admission.waiting,
        ),
    )
    reporter = DecodeReporter(engine, max_sequences=4)
    async with admission.admit(tokens=64, sequences=1):

        async def enter() -> None:
            async with admission.admit(tokens=80, sequences=1):
                pass

        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0)
        assert parsed(DecodeReport, reporter.stats()) == DecodeReport(5 + 6, 10, 2, 4, 16, 512)
    await waiting
    assert parsed(DecodeReport, reporter.stats()) == DecodeReport(0, 10, 0, 4, 16, 512)
    engine.is_alive = False  # it has no load, and must not draw requests by that
    assert parsed(DecodeReport, reporter.stats()) == DecodeReport(10, 10, 4, 4, 16, 512)
