"""A small OpenAI-like server that answers as slowly and as badly as a test wants, to inject faults with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class MockServer:
    """What it does with a request is decided by its number, counted from 0."""

    first_token_s: float = 0.0
    token_s: float = 0.0
    tokens: int = 3
    at_once: int = 1000  # requests that it works on together; others wait, as in a busy server
    faults: dict[int, str] = field(default_factory=dict)  # number -> 429, 500, drop, error, malformed, hang, empty
    details: dict[str, Any] = field(default_factory=lambda: {"cached_tokens": 30})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)
    url: str = ""
    lists_models: bool = True

    async def models(self, _: web.Request) -> web.Response:
        if not self.lists_models:
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        return web.json_response({"data": [{"id": "mock"}]})

    async def files(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.uploads.append(form["file"].file.read())
        return web.json_response({"id": f"file-{len(self.uploads)}"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.headers.append(request.headers.get("Authorization"))
        fault = self.faults.get(number, "")
        if fault.isdigit():
            return web.json_response({"error": {"message": f"fault {fault}"}}, status=int(fault))
        async with self._gate:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self._stream(response, request, fault)
        return response

    async def _stream(self, response: web.StreamResponse, request: web.Request, fault: str) -> None:
        async def event(document: Any) -> None:
            await response.write(f"data: {json.dumps(document)}\n\n".encode())

        await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(3600 if fault == "hang" else self.first_token_s)
        for _ in range(0 if fault == "empty" else self.tokens):
            await event({"choices": [{"delta": {"content": "x"}}]})
            await asyncio.sleep(self.token_s)
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
            return
        if fault == "cut":
            return
        if fault == "error":
            await event({"error": {"message": "the engine died"}})
        if fault == "malformed":
            await response.write(b"data: {nonsense\n\n")
        usage = {"prompt_tokens": 40, "completion_tokens": self.tokens, "prompt_tokens_details": self.details}
        orbit = {
            "chunks": [{"operating_point": "patched"}, {"operating_point": "encoded"}],
            "stages_ms": {"link": 20.0, "decode": 5.0},
        }
        await event({"choices": [], "usage": usage, "orbit": orbit})
        await response.write(b"data: [DONE]\n\n")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MockServer]:
        """Listen on a free port while the block runs."""
        self._gate = asyncio.Semaphore(self.at_once)
        application = web.Application(client_max_size=1 << 26)
        application.add_routes(
            [
                web.get("/v1/models", self.models),
                web.post("/v1/files", self.files),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()
