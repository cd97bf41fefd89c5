"""Many requests at once, many of them cancelled: nobody hangs, nobody's answer changes, nothing is lost."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from client import Service, picture, user

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


@pytest.mark.timeout(300)
async def test_200_requests_a_third_of_them_cancelled_mid_stream(service: Service):
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        for kind in KINDS:
            await ask(client, service, kind)
        await asyncio.to_thread(service.settle)
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

    def nothing_held() -> bool:
        loop = service.role("PrefillWorker", "stats")["loop"]
        decode = service.role("DecodeWorker", "stats")
        return (
            (loop.blocks_free, loop.leases, loop.leases_expired) == (loop.blocks_total, 0, 0)
            and (decode.blocks_reserved, decode.running, decode.waiting) == (0, 0, 0)
            and service.role("DecodeWorker", "all_blocks_free")
        )

    await asyncio.to_thread(service.wait_until, nothing_held)
    assert service.chat(KINDS[0].messages)["choices"]
