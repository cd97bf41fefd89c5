"""Clients that leave before their answer: nothing goes on being generated for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import pytest
from client import MAX_MODEL_LEN, Service, picture, user

pytestmark = pytest.mark.service

CHOICES, LONG = 4, MAX_MODEL_LEN - 500  # the tiny model takes twenty seconds for so much


@pytest.mark.parametrize("begun", [False, True], ids=["before it is decoded", "while it is decoded"])
async def test_nobody_generates_for_a_client_that_left(service: Service, begun: bool):
    """Whose answer would come as a whole; a stream ends with its connection, which `test_stress` tries."""

    def busy() -> bool:
        stats = service.role("DecodeWorker", "stats")
        return bool(stats.running or stats.waiting)

    await asyncio.to_thread(service.wait_until, lambda: not busy())
    messages = user(picture(601), picture(602), "Go on for long.")
    body = service.body(messages, n=CHOICES, max_tokens=LONG, ignore_eos=True, temperature=1.0)
    async with httpx.AsyncClient(timeout=60) as client:
        asked = asyncio.create_task(client.post(service.url + "/v1/chat/completions", json=body))
        if begun:
            await asyncio.to_thread(service.wait_until, busy)
        else:
            await asyncio.sleep(0.1)
        assert not asked.done()
        asked.cancel()  # httpx closes the connection
        with suppress(asyncio.CancelledError):
            await asked
    loop = lambda: service.role("PrefillWorker", "stats")["loop"]  # noqa: E731
    await asyncio.to_thread(service.wait_until, lambda: loop().leases == 0)
    await asyncio.to_thread(service.wait_until, lambda: not busy(), 8)
