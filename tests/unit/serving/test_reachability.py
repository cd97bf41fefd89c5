"""Calls that wait for a role: who is pinged when, and when a wait ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from serving.errors import NoReplica, RoleUnavailable
from serving.frontend import reachability
from serving.frontend.reachability import Reachability

TICK = 0.04


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, ticks in (("QUIET_S", 2), ("PERIOD_S", 1), ("PATIENCE_S", 8), ("LOST_S", 4)):
        monkeypatch.setattr(reachability, name, ticks * TICK)
    return


class Replicas:
    """Pings of replicas, of which those in `alive` answer; without any as Serve has it: an error."""

    def __init__(self, *alive: str) -> None:
        self.alive, self.pings = list(alive), 0

    async def ping(self) -> list[str]:
        self.pings += 1
        if not self.alive:
            raise RuntimeError("no replica")
        return list(self.alive)


async def wait(reach: Reachability, seconds: float, replica: str | None = None) -> str:
    async with reach.required(replica):
        await asyncio.sleep(seconds)
        return "answered"


async def test_a_call_that_ends_soon_has_nobody_pinged():
    replicas = Replicas()
    reach = Reachability("prefill", replicas.ping)
    assert await asyncio.gather(*(wait(reach, TICK) for _ in range(3))) == ["answered"] * 3
    await asyncio.sleep(3 * TICK)
    assert replicas.pings == 0


async def test_a_call_waits_as_long_as_any_replica_answers():
    replicas = Replicas("one")
    assert await wait(Reachability("prefill", replicas.ping), 20 * TICK) == "answered"
    assert replicas.pings > 3


async def test_waits_end_together_where_nobody_answers_and_further_ones_too():
    replicas = Replicas()
    reach = Reachability("prefill", replicas.ping)
    outcomes = await asyncio.gather(*(wait(reach, 9) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in outcomes] == [NoReplica] * 3
    assert str(outcomes[0]) == "no replica of the prefill role answers"
    with pytest.raises(NoReplica):
        await wait(reach, 9)
    replicas.alive = ["one"]
    assert await wait(reach, 12 * TICK) == "answered", "it is not held against a role that it was away before"


async def test_a_short_silence_ends_no_wait():
    replicas = Replicas()
    waiting = asyncio.create_task(wait(Reachability("prefill", replicas.ping), 25 * TICK))
    await asyncio.sleep(6 * TICK)
    replicas.alive = ["one"]
    assert await waiting == "answered"


async def test_the_replica_that_holds_what_is_waited_for_must_be_there_itself():
    replicas = Replicas("one", "two")
    reach = Reachability("prefill", replicas.ping)
    others = asyncio.create_task(wait(reach, 15 * TICK, "one")), asyncio.create_task(wait(reach, 15 * TICK))
    gone = asyncio.create_task(wait(reach, 9, "two"))
    await asyncio.sleep(3 * TICK)
    replicas.alive = ["one"]
    with pytest.raises(RoleUnavailable, match="prefill replica that holds the prompt's KV does not answer") as error:
        await gone
    assert not isinstance(error.value, NoReplica), "another one can link the prompt again"
    assert await asyncio.gather(*others) == ["answered"] * 2


async def test_what_the_call_itself_raises_comes_as_it_is_and_a_cancellation_too():
    reach = Reachability("prefill", Replicas("one").ping)
    with pytest.raises(TimeoutError, match="its own"):
        async with reach.required():
            raise TimeoutError("its own")
    waiting = asyncio.create_task(wait(reach, 9))
    await asyncio.sleep(5 * TICK)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
