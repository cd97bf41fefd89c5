"""The forget registry: every cache is asked, on its thread, and a failure is told."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.forget import ForgetRegistry


class Cache:
    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.asked: list[tuple[str, str, str]] = []

    def forget(self, content: str, tenant: str) -> None:
        self.asked.append((content, tenant, threading.current_thread().name))
        if self.failure:
            raise self.failure


async def test_every_cache_forgets_on_its_own_thread():
    registry = ForgetRegistry()
    here = registry.group().register(Cache())
    with ThreadPoolExecutor(1, thread_name_prefix="loop") as thread:
        group = registry.group(thread.submit)
        there = [group.register(Cache()) for _ in range(2)]
        await registry.forget("page", "acme")
    assert here.asked == [("page", "acme", threading.current_thread().name)]
    assert [cache.asked for cache in there] == [[("page", "acme", "loop_0")]] * 2


async def test_a_cache_that_fails_keeps_no_other_from_forgetting_and_its_failure_is_raised():
    registry = ForgetRegistry()
    group = registry.group()
    group.register(Cache(ValueError("a defect")))
    others = [group.register(Cache()), registry.group().register(Cache())]
    with pytest.raises(ValueError, match="a defect"):
        await registry.forget("page", "acme")
    assert all(cache.asked for cache in others)


async def test_a_thread_that_has_ended_keeps_no_other_from_forgetting():
    registry, thread = ForgetRegistry(), ThreadPoolExecutor(1)
    thread.shutdown()
    lost, other = registry.group(thread.submit).register(Cache()), registry.group().register(Cache())
    with pytest.raises(RuntimeError):
        await registry.forget("page", "acme")
    assert (len(lost.asked), len(other.asked)) == (0, 1)


async def test_who_gives_up_waiting_does_not_end_the_deletion():
    registry, gate = ForgetRegistry(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gate.wait)
        cache = registry.group(thread.submit).register(Cache())
        waiting = asyncio.create_task(registry.forget("page", "acme"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
    assert cache.asked
