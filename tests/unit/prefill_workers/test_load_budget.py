"""What links load of stored KV is bounded for all of a worker's together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from prefill_workers.modes import Mode
from prefill_workers.protocol import ChunkSpan, LinkRequest
from prefill_workers.scheduler.load_budget import KVLoadBudget

BYTES = 10  # of a token's KV


def request(chunks: int, mode: Mode = Mode.AUTO, patched: tuple[bool, ...] = ()) -> LinkRequest:
    """Chunks of 4 tokens each, and 5 tokens of text behind them."""
    spans = tuple(ChunkSpan(f"c{i}", "image", 4 * i, 4 * i + 4, 4 * i, 4) for i in range(chunks))
    return LinkRequest("r", [0] * (4 * chunks + 5), spans, mode, patched=patched)


async def hold(loaded: KVLoadBudget, chunks: int, release: asyncio.Event, log: list[int]) -> None:
    async with loaded.room_for(request(chunks)):
        log.append(chunks)
        await release.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("mode", "held"), [(Mode.AUTO, 80), (Mode.FULL_REUSE, 80), (Mode.EXACT, 80), (Mode.OFF, 0)])
async def test_room_is_held_for_all_of_a_links_chunks_where_anything_is_looked_up(mode: Mode, held: int):
    loaded = KVLoadBudget(100, BYTES)
    async with loaded.room_for(request(2, mode)):
        assert loaded.held == held
    assert loaded.held == 0


async def test_room_comes_back_from_a_link_that_fails():
    loaded = KVLoadBudget(100, BYTES)
    with pytest.raises(RuntimeError):
        async with loaded.room_for(request(2)):
            raise RuntimeError
    assert loaded.held == 0


async def test_links_wait_in_their_order_and_one_that_has_more_goes_alone():
    loaded, release, log = KVLoadBudget(100, BYTES), asyncio.Event(), list[int]()
    first = asyncio.create_task(hold(loaded, 2, release, log))
    await turns()
    large, small = (asyncio.create_task(hold(loaded, chunks, release, log)) for chunks in (7, 1))
    await turns()
    assert log == [2]
    assert (loaded.waiting, loaded.tokens) == (2, 2 * 5), "all chunks count as patched until it is known"
    release.set()
    await asyncio.gather(first, large, small)
    assert log == [2, 7, 1]
    assert (loaded.held, loaded.waiting, loaded.tokens) == (0, 0, 0)


async def test_a_link_without_chunks_waits_for_nobody():
    loaded, release, log = KVLoadBudget(100, BYTES), asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(hold(loaded, chunks, release, log)) for chunks in (2, 2, 0)]
    await turns()
    assert log == [2, 0]
    release.set()
    await asyncio.gather(*tasks)


async def test_who_leaves_while_it_waits_leaves_no_trace():
    loaded, release, log = KVLoadBudget(100, BYTES), asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(hold(loaded, chunks, release, log)) for chunks in (1, 2, 1)]
    await turns()
    assert log == [1], "the last one waits behind one that was there before"
    tasks[1].cancel()
    await turns()
    assert log == [1, 1]
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (loaded.held, loaded.waiting, loaded.tokens) == (0, 0, 0)


async def test_what_waits_counts_with_the_chunks_that_no_patch_is_known_for():
    loaded = KVLoadBudget(100, BYTES)
    async with loaded.room_for(request(2)):
        waits = asyncio.create_task(loaded.room_for(request(2, patched=(False, True))).__aenter__())
        await turns()
        assert loaded.tokens == 4 + 5
        waits.cancel()
        await turns()
    assert loaded.tokens == 0


async def test_how_long_it_was_waited_is_told(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("prefill_workers.scheduler.load_budget.time", SimpleNamespace(perf_counter=lambda: now))
    loaded = KVLoadBudget(100, BYTES)
    async with loaded.room_for(request(2)) as waited:
        assert waited == 0
        later = asyncio.create_task(loaded.room_for(request(2)).__aenter__())
        await turns()
        now += 3
    assert await later == 3
