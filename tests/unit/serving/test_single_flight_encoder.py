"""One encoding for all requests of a tenant that wait for the same image."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from serving.errors import RoleUnavailable
from serving.frontend.single_flight_encoder import RequestEncoder, SingleFlightEncoder


class Encoder:
    """Notes its calls and holds them until `release` is set."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.cancelled = 0
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def encode(self, items: Sequence[Any]) -> list[str]:
        self.calls.append(list(items))
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [f"embedding of {item}" for item in items]


def start(encodings: SingleFlightEncoder, tenant: str, *names: str) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(encodings.get(tenant, {name: name.upper() for name in names}))


async def test_requests_that_overlap_share_calls_and_each_gets_its_own():
    encoder = Encoder()
    encodings = SingleFlightEncoder(encoder.encode)
    one, two, three = start(encodings, "t", "a", "b"), start(encodings, "t", "c", "b"), start(encodings, "t", "a")
    await asyncio.sleep(0)
    encoder.release.set()
    assert await one == {"a": "embedding of A", "b": "embedding of B"}
    assert await two == {"c": "embedding of C", "b": "embedding of B"}
    assert await three == {"a": "embedding of A"}
    assert encoder.calls == [["A", "B"], ["C"]]


async def test_what_has_ended_is_encoded_again():
    encoder = Encoder()
    encoder.release.set()
    encodings = SingleFlightEncoder(encoder.encode)
    for _ in range(2):
        await start(encodings, "t", "a")
    assert encoder.calls == [["A"], ["A"]]


async def test_tenants_share_nothing():
    encoder = Encoder()
    encodings = SingleFlightEncoder(encoder.encode)
    tasks = [start(encodings, tenant, "a") for tenant in ("one", "two")]
    await asyncio.sleep(0)
    encoder.release.set()
    await asyncio.gather(*tasks)
    assert encoder.calls == [["A"], ["A"]]


async def test_a_call_goes_on_while_somebody_waits_and_ends_when_nobody_does():
    encoder = Encoder()
    encodings = SingleFlightEncoder(encoder.encode)
    one, two = start(encodings, "t", "a"), start(encodings, "t", "a")
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait([one])
    assert encoder.cancelled == 0
    two.cancel()
    await asyncio.wait([two])
    assert one.cancelled()
    assert two.cancelled(), "a failure would be tried again"
    late = start(encodings, "t", "a")  # must not join the call that has just been given up
    encoder.release.set()
    assert await late == {"a": "embedding of A"}
    assert (encoder.cancelled, len(encoder.calls)) == (1, 2)


async def test_a_failure_reaches_all_who_wait_and_is_not_kept():
    encoder = Encoder()
    encoder.error = RoleUnavailable("gone")
    encodings = SingleFlightEncoder(encoder.encode)
    tasks = [start(encodings, "t", "a") for _ in range(2)]
    await asyncio.sleep(0)
    encoder.release.set()
    for task in tasks:
        with pytest.raises(RoleUnavailable):
            await task
    encoder.error = None
    assert await start(encodings, "t", "a") == {"a": "embedding of A"}


async def test_a_call_is_nobodys_own_and_who_did_not_cancel_it_may_try_again():
    """With a cancelled request Serve cancels the calls in its name that have no replica yet."""
    mine: ContextVar[str] = ContextVar("mine", default="nobody's")
    seen: list[str] = []

    async def encode(items: Sequence[Any]) -> Sequence[Any]:
        seen.append(mine.get())
        raise asyncio.CancelledError

    mine.set("a request's")
    with pytest.raises(RoleUnavailable, match="cancelled"):
        await start(SingleFlightEncoder(encode), "t", "a")
    assert seen == ["nobody's"]


def of_request(encoder: Encoder, lacking: Awaitable[list[str]]) -> RequestEncoder:
    return SingleFlightEncoder(encoder.encode).of_request("t", {name: name.upper() for name in "abc"}, lacking)


async def told(*contents: str) -> list[str]:
    return list(contents)


async def test_what_is_lacking_begins_before_it_is_asked_for_and_waits_when_it_is_done():
    encoder = Encoder()
    encoder.release.set()
    encodings = of_request(encoder, told("a", "b", "of another prompt"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert encoder.calls == [["A", "B"]]
    assert await encodings.get({"a", "c"}) == {"a": "embedding of A", "c": "embedding of C"}
    assert await encodings.get({"b"}) == {"b": "embedding of B"}
    assert encoder.calls == [["A", "B"], ["C"]]
    encodings.close()


async def test_an_answer_that_comes_too_late_begins_nothing_again():
    encoder = Encoder()
    encoder.release.set()
    late: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    encodings = of_request(encoder, late)
    assert await encodings.get({"a"}) == {"a": "embedding of A"}
    late.set_result(["a", "b"])
    assert await encodings.get({"b"}) == {"b": "embedding of B"}
    assert encoder.calls == [["A"], ["B"]]
    encodings.close()


async def test_a_request_that_needs_no_more_ends_what_it_began():
    encoder = Encoder()
    encodings = of_request(encoder, told("a"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert encoder.calls == [["A"]]
    encodings.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert encoder.cancelled == 1


async def test_a_failure_ahead_is_the_failure_of_who_asks():
    encoder = Encoder()
    encoder.error = RoleUnavailable("no vision encoder")
    encoder.release.set()
    encodings = of_request(encoder, told("a"))
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(RoleUnavailable):
        await encodings.get({"a"})
    encodings.close()


async def test_without_an_answer_everything_begins_when_it_is_asked_for():
    async def fails() -> list[str]:
        raise RoleUnavailable("no prefill worker")

    encoder = Encoder()
    encoder.release.set()
    encodings = of_request(encoder, fails())
    for _ in range(10):
        await asyncio.sleep(0)
    assert await encodings.get({"a"}) == {"a": "embedding of A"}
    encodings.close()
