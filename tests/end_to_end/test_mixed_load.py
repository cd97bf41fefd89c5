"""Every role killed under a mixed load: answers are those of requests served one by one, or an error that says so."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import ray
from client import Service
from test_stress import KINDS, Ask

pytestmark = [pytest.mark.service, pytest.mark.slow]

ROLES = ("PrefillWorker", "DecodeWorker", "VisionEncoder", "PatchCompiler", "LibraryKeeper", "Ingress")
CLIENTS, CALM_SECONDS, RESTART_SECONDS = 6, 8.0, 180.0
REFUSALS = (500, 502, 503, 504)  # of requests that met a role's end
CUT = "cut without an error event"


async def ask(client: httpx.AsyncClient, service: Service, kind: Ask) -> str | httpx.Response | dict[str, Any]:
    """A streamed answer: its text; the response if it is refused; the error that ends it; or `CUT`."""
    body = service.body(kind.messages, kind.mode, stream=True, max_tokens=kind.max_tokens)
    said, ended = "", False
    try:
        async with client.stream("POST", service.url + "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return response
            async for line in response.aiter_lines():
                ended = ended or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    return event["error"]
                (choice,) = event["choices"]
                said += choice["delta"].get("content") or ""
    except httpx.RemoteProtocolError:
        return CUT
    return said if ended else CUT


def replicas(role: str) -> list[Any]:
    """The actors of a role."""
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    found = [name for name in names if name.startswith("SERVE_REPLICA::") and f"#{role}#" in name]
    return [ray.get_actor(name, namespace="serve") for name in found]


async def kill_in_turn(service: Service, client: httpx.AsyncClient, roles: Sequence[str]) -> None:
    """Kill a replica of each role, a while apart, each once all kinds of requests are served again."""
    loop = asyncio.get_running_loop()
    for role in roles:
        await asyncio.sleep(CALM_SECONDS)
        ray.kill(random.choice(replicas(role)), no_restart=False)
        deadline = loop.time() + RESTART_SECONDS
        while not all([isinstance(await ask(client, service, kind), str) for kind in KINDS]):
            assert loop.time() < deadline, f"the service did not outlive its {role}"
            await asyncio.sleep(1)


@pytest.mark.timeout(1500)
async def test_whoever_dies_no_answer_is_wrong_and_no_stream_is_cut_in_silence(ingresses: Service):
    service = ingresses
    assert {role for role in ROLES if not replicas(role)} == set()
    async with httpx.AsyncClient(timeout=120) as client:
        for kind in KINDS:
            await ask(client, service, kind)
        await asyncio.to_thread(service.settle)
        serial = [await ask(client, service, kind) for kind in KINDS]
        assert all(isinstance(said, str) and said != CUT for said in serial)
        over, outcomes, wrong = asyncio.Event(), Counter[str](), []

        async def load(first: int) -> None:
            number = first
            while not over.is_set():
                answer = await ask(client, service, KINDS[number % len(KINDS)])
                match answer:
                    case str() if answer == serial[number % len(KINDS)]:
                        outcomes["right"] += 1
                    case httpx.Response(status_code=status) if status in REFUSALS:
                        assert answer.json()["error"]["message"]
                        outcomes["refused"] += 1
                        await asyncio.sleep(0.5)
                    case dict():
                        assert answer["message"]
                        outcomes["ended by an error event"] += 1
                    case _:
                        wrong.append((number % len(KINDS), getattr(answer, "text", answer)))
                number += 1

        clients = [asyncio.create_task(load(first)) for first in range(CLIENTS)]
        try:
            await kill_in_turn(service, client, ROLES)
        finally:
            over.set()
            await asyncio.gather(*clients)
    assert wrong == []
    assert outcomes["right"] > len(ROLES) * len(KINDS), outcomes

    def nothing_held() -> bool:
        loop, decode = service.role("PrefillWorker", "stats")["loop"], service.role("DecodeWorker", "stats")
        return (loop.leases, decode.blocks_reserved, decode.running, decode.waiting) == (0, 0, 0, 0)

    await asyncio.to_thread(service.wait_until, nothing_held, 120)
    found = httpx.get(service.url + "/health", timeout=60)
    assert found.status_code == 200, found.text
