"""Canaries: an engine that computes is healthy, however busy; one that does not is not."""

from __future__ import annotations

import asyncio
import time

import pytest

from serving.replicas import canary
from serving.replicas.canary import Canary, EngineStalled


class Engine:
    """An engine that answers a canary when `runs` is set; what it computes for others is told by `compute`."""

    def __init__(self) -> None:
        self.progressed = time.monotonic()
        self.runs = asyncio.Event()
        self.runs.set()
        self.asked, self.cpu = 0, 0.0
        self.error: Exception | None = None

    def compute(self) -> None:
        self.progressed = time.monotonic()

    async def compute_one_token(self) -> None:
        self.asked += 1
        await self.runs.wait()
        if self.error is not None:
            raise self.error
        self.compute()

    def canary(self, timeout_s: float = 0.1) -> Canary:
        made = Canary(lambda: self.progressed, self.compute_one_token, timeout_s, lambda: self.cpu)
        self.compute()  # it has warmed up
        return made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_FRESH_SECONDS", 0.05)
    monkeypatch.setattr(canary, "_LOOK_SECONDS", 0.01)


async def test_an_engine_that_has_just_computed_is_not_asked():
    engine = Engine()
    watched = engine.canary()
    engine.compute()
    await watched.check()
    assert engine.asked == 0
    await asyncio.sleep(0.06)
    await watched.check()
    assert engine.asked == 1


async def test_an_engine_that_hangs_is_noticed_and_one_that_goes_on_is_well_again():
    engine = Engine()
    watched = engine.canary()
    await asyncio.sleep(0.06)
    engine.runs.clear()
    for _ in range(2):
        with pytest.raises(EngineStalled, match=r"nothing for 0\.1 s"):
            await watched.check()
    assert engine.asked == 1, "one request is out, not one of every check"
    engine.runs.set()
    await asyncio.sleep(0.07)
    await watched.check()
    assert engine.asked == 2


async def test_checks_that_overlap_share_a_request():
    engine = Engine()
    watched = engine.canary()
    await asyncio.sleep(0.06)
    engine.runs.clear()
    checks = [asyncio.create_task(watched.check()) for _ in range(3)]
    await asyncio.sleep(0.02)
    checks[0].cancel()
    await asyncio.sleep(0)
    engine.runs.set()
    await asyncio.gather(*checks[1:])
    assert engine.asked == 1


async def test_an_engine_whose_queue_is_long_is_proved_by_what_it_computes_for_others():
    engine = Engine()
    watched = engine.canary()
    await asyncio.sleep(0.06)
    engine.runs.clear()
    checking = asyncio.create_task(watched.check())
    await asyncio.sleep(0.05)
    engine.compute()
    await checking


async def test_a_long_step_on_a_cpu_shows_in_the_time_that_it_spends():
    engine = Engine()
    watched = engine.canary()
    await asyncio.sleep(0.06)
    engine.runs.clear()
    checking = asyncio.create_task(watched.check())
    await asyncio.sleep(0.05)
    engine.cpu += 0.09
    await checking
    with pytest.raises(EngineStalled):  # and then nothing more
        await watched.check()


async def test_an_engine_may_compile_for_the_first_it_computes():
    engine = Engine()
    watched = Canary(lambda: engine.progressed, engine.compute_one_token, 0.05)
    await asyncio.sleep(0.06)
    engine.runs.clear()
    checking = asyncio.create_task(watched.check())
    await asyncio.sleep(0.1)
    assert not checking.done()
    engine.runs.set()
    await checking


async def test_what_a_canary_dies_of_is_told():
    engine = Engine()
    watched = engine.canary()
    await asyncio.sleep(0.06)
    engine.error = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        await watched.check()
