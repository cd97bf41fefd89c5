"""Many requests at once, many of them cancelled: nobody hangs, nobody's answer changes, nothing is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from client import Service, picture, user

from prefill_workers.scheduler.loop_stats import LoopStats

pytestmark = pytest.mark.service

REQUESTS, AT_ONCE = 200, 8


@dataclass(frozen=True)
class Ask:
    """One kind of request."""

    messages: list[dict[str, Any]]
    mode: str
    max_tokens: int


KINDS = [
    Ask(user("Only text, and short."), "auto", 24),
    Ask(user("Text again. " * 20), "exact", 40),
    Ask(user(picture(301), "One picture."), "exact", 24),
    Ask(user(picture(302), picture(303), "Two pictures."), "auto", 32),
    Ask(user(picture(303), "The other", picture(302), "way round."), "auto", 24),
    Ask(user(picture(301), picture(302), picture(303), "Three."), "full-reuse", 24),
    Ask(user(picture(304, width=308, height=308), "A larger one."), "off", 24),
]


async def ask(client: httpx.AsyncClient, service: Service, kind: Ask, cancel_after: int | None = None) -> str | None:
    """The streamed answer; None if it was cancelled, by closing the connection, after some events."""
    body = service.body(kind.messages, kind.mode, stream=True, max_tokens=kind.max_tokens)
    said, events = "", 0
    async with client.stream("POST", service.url + "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            events += 1
            if cancel_after is not None and events > cancel_after:
                return None
            (choice,) = json.loads(line[len("data: ") :])["choices"]
            said += choice["delta"].get("content") or ""
    return said


def loop_of(service: Service) -> LoopStats:
    return service.role("PrefillWorker", "stats")["loop"]


def held(service: Service, expired: int) -> dict[str, int]:
    """What the service still holds of requests that are over, by name; leases beyond `expired` ran out unread."""
    loop, decode = loop_of(service), service.role("DecodeWorker", "stats")
    found = {
        "prefill blocks": loop.blocks_total - loop.blocks_free,
        "leases": loop.leases,
        "leases that ran out": loop.leases_expired - expired,
        "decode blocks reserved": decode.blocks_reserved,
        "running": decode.running,
        "waiting": decode.waiting,
        "decode blocks": int(not service.role("DecodeWorker", "all_blocks_free")),
    }
    return {name: count for name, count in found.items() if count}


@pytest.mark.timeout(300)
async def test_200_requests_a_third_of_them_cancelled_mid_stream(service: Service):
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        for kind in KINDS:
            await ask(client, service, kind)
        await asyncio.to_thread(service.settle)
        await asyncio.to_thread(service.wait_until, lambda: loop_of(service).leases == 0)  # those of earlier tests
        expired = (await asyncio.to_thread(loop_of, service)).leases_expired
        serial = [await ask(client, service, kind) for kind in KINDS]
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> str | None:
            async with gate:
                cancel_after = number % 7 if number % 3 == 2 else None
                return await ask(client, service, KINDS[number % len(KINDS)], cancel_after)

        answers = await asyncio.gather(*(one(number) for number in range(REQUESTS)))

    assert sum(answer is None for answer in answers) == REQUESTS // 3
    for number, answer in enumerate(answers):
        assert answer is None or answer == serial[number % len(KINDS)], f"request {number}"

    with suppress(AssertionError):  # what is still held then says more
        await asyncio.to_thread(service.wait_until, lambda: held(service, expired) == {})
    assert await asyncio.to_thread(held, service, expired) == {}
    assert service.chat(KINDS[0].messages)["choices"]
