"""Streams: what fails before the first event has a status, and whatever happens the engine's stream is closed.

vLLM's own generators turn the engine's outputs, and its errors, into events.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError

from serving.api.app import OrbitServingCompletion
from serving.api.auth import Authenticate
from serving.api.chat import OrbitServingChat
from serving.api.errors import answer_errors
from serving.api.prefix import Prefixes
from serving.api.streams import opened
from serving.api_keys import KeyRing
from serving.frontend.errors import DeadlineExceeded, OverloadedError
from serving.frontend.report import FoundReport, RequestTrace, RetrievalReport
from serving.placement.orderer import PatchAwareOrderer

EVENTS = ['data: {"id":"1"}\n\n', 'data: {"id":"2","choices":[{"finish_reason":"stop"}]}\n\n', "data: [DONE]\n\n"]


class Events:
    """A stream of events, or of what an engine raises; `closed` once it is over or closed."""

    def __init__(self, *events: str, error: Exception | None = None) -> None:
        self._events, self._error = events, error
        self.closed = False
        self.waits = False  # for ever, before the first event

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            if self.waits:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
            for event in self._events:
                yield event
        finally:
            self.closed = True


async def read(stream: Any) -> list[str]:
    return [event async for event in stream]


async def test_a_stream_has_all_its_events_once():
    assert await read(await opened(Events(*EVENTS)())) == EVENTS
    assert await read(await opened(Events()())) == []


async def test_a_later_error_is_an_event():
    events = [EVENTS[0], 'data: {"error": {"message": "m", "type": "t", "code": 429}}\n\n']
    assert await read(await opened(Events(*events)())) == events


async def test_a_stream_that_nobody_reads_is_closed():
    events = Events(*EVENTS)
    stream: Any = await opened(events())
    assert not events.closed
    await stream.aclose()
    assert events.closed


async def test_a_stream_that_nobody_reads_to_its_end_is_closed():
    events = Events(*EVENTS)
    stream: Any = await opened(events())
    assert [await anext(stream), await anext(stream)] == EVENTS[:2]
    await stream.aclose()
    assert events.closed


async def test_a_client_that_goes_before_the_first_event_closes_the_stream():
    events = Events()
    events.waits = True
    opening = asyncio.create_task(opened(events()))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert events.closed


class Chat(OrbitServingChat):
    """The handler without an engine."""

    parser_cls = None
    enable_force_include_usage = False

    def __init__(self) -> None:
        self._prefixes, self._max_characters = Prefixes(SimpleNamespace(encode=lambda text, **_: [])), 1000
        self._media: Any = SimpleNamespace(resolve_messages=self._resolved)
        self._documents: Any = SimpleNamespace(marked=lambda _: [])
        self.engine_client: Any = SimpleNamespace(
            orderer=PatchAwareOrderer(), prefetch=lambda *_: None, request_timeout_s=None
        )

    async def _resolved(self, messages: list[Any], *_: str | None) -> list[Any]:
        return messages


class Completion(OrbitServingCompletion):
    """The handler without an engine."""

    enable_force_include_usage = False

    def __init__(self) -> None:
        self._max_characters = 1000


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What vLLM's handlers get of the engine; events of a stream that does not fail pass as they are."""
    outputs = Events(*EVENTS)
    metadata = RequestResponseMetadata(request_id="1")

    async def chat(self: Chat, request: ChatCompletionRequest, _: Any = None) -> AsyncGenerator[str, None]:
        if outputs._error is None:
            return outputs()
        return self.chat_completion_stream_generator(request, outputs(), "1", "m", [], None, metadata)  # type: ignore

    async def completion(self: Completion, request: CompletionRequest, _: Any = None) -> AsyncGenerator[str, None]:
        if outputs._error is None:
            return outputs()
        return self.completion_stream_generator(request, [], outputs(), "1", 0, "m", 1, None, metadata)

    monkeypatch.setattr(OpenAIServingChat, "create_chat_completion", chat)
    monkeypatch.setattr(OpenAIServingCompletion, "create_completion", completion)
    return outputs


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.openai_serving_chat, app.state.openai_serving_completion = Chat(), Completion()
    app.router.routes += [route for route in chat_router.routes if route.path == "/v1/chat/completions"]
    app.include_router(completion_router)
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing({}))
    return app


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello."}]},
    "/v1/completions": {"prompt": "Hello."},
}


async def post(app: FastAPI, path: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post(path, json={"model": "m", "stream": True, **BODIES[path], **more})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("the queue is full"), 429),
        (DeadlineExceeded(600), 504),
        (VLLMValidationError("the request is too large"), 400),
        (RetryableRequestError("a worker was lost"), 503),
        (GenerationError("a worker was lost"), 500),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_what_fails_before_the_first_event_has_a_status(
    app: FastAPI,
    outputs: Events,
    path: str,
    error: Exception,
    status: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """And only what is nobody's refusal leaves a traceback in the log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    outputs._error = error
    answer = await post(app, path)
    assert bool(caplog.records) == isinstance(error, RuntimeError)
    assert answer.status_code == status
    assert answer.headers.get("Retry-After") == ("1" if status == 429 else None)
    assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == (status, str(error))
    assert outputs.closed


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_does_not_fail_is_sent_whole(app: FastAPI, outputs: Events, path: str):
    answer = await post(app, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [line[:14] for line in answer.text.split("\n\n")] == [event.strip()[:14] for event in [*EVENTS, ""]]
    assert ('"orbit":{' in answer.text) == (path == "/v1/chat/completions")
    assert outputs.closed


CHAT = ChatCompletionRequest.model_validate({"model": "m", "stream": True, **BODIES["/v1/chat/completions"]})


async def test_an_engine_is_let_go_however_a_stream_ends(outputs: Events):
    chat = Chat()
    stream: Any = await chat.create_chat_completion(CHAT.model_copy())
    assert len(await read(stream)) == len(EVENTS)
    assert outputs.closed

    outputs.closed = False
    unread: Any = await chat.create_chat_completion(CHAT.model_copy())
    await unread.aclose()
    assert outputs.closed

    outputs.waits, outputs.closed = True, False
    gone = asyncio.create_task(chat.create_chat_completion(CHAT.model_copy()))
    await asyncio.sleep(0.05)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert outputs.closed


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"orbit": {"mode": "sideways"}}, "sideways"),
        ({"orbit": {"sideways": 1}}, "sideways"),
        ({"cache_salt": "mine"}, "cache_salt"),
    ],
)
async def test_what_cannot_be_followed_is_refused_whatever_the_endpoint(
    app: FastAPI, outputs: Events, path: str, given: dict[str, Any], named: str
):
    response = await post(app, path, **given)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


async def test_a_completions_options_are_those_of_its_prompts(
    app: FastAPI, outputs: Events, monkeypatch: pytest.MonkeyPatch
):
    traces: list[Any] = []
    monkeypatch.setattr("serving.api.app.set_trace", traces.append)
    assert (await post(app, "/v1/completions", orbit={"mode": "off"})).status_code == 200
    assert [trace.report.mode for trace in traces] == ["off"]


@pytest.mark.parametrize("fields", [{"prompt": "x" * 1001}, {"prompt": ["x", "x" * 1001]}, {"suffix": "x" * 1001}])
async def test_more_text_than_a_prompt_holds_is_refused_also_where_it_would_be_cut(
    app: FastAPI, outputs: Events, fields: dict[str, Any]
):
    answer = await post(app, "/v1/completions", truncate_prompt_tokens=5, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "1001 characters; the longest has at most 1000" in answer.json()["error"]["message"]


async def test_each_choice_has_the_citations_of_its_own_text():
    def event(index: int, content: str, finish: str | None = None) -> str:
        choice = {"index": index, "delta": {"content": content}, "finish_reason": finish}
        return f"data: {json.dumps({'choices': [choice]}, separators=(',', ':'))}\n\n"

    trace = RequestTrace()
    found = [FoundReport(chunk=n, file_id=f"file-{n}", filename="a.pdf", score=1) for n in (0, 1)]
    trace.report.retrieval = RetrievalReport(query="words", results=found, stages_ms={})
    events = Events(event(0, "See [1]."), event(1, "See [2]."), event(0, "", "stop"), event(1, "", "stop"))
    told = [json.loads(one[len("data: ") :])["choices"][0] for one in await read(Chat()._reported(events(), trace))]
    cited = [[one["file_id"] for one in choice["delta"].get("annotations", ())] for choice in told]
    assert cited == [[], [], ["file-0"], ["file-1"]]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("retrieve", {"vector_store_ids": ["vs_1"]}),
        ("pages", "1"),
        ("video", {"segment_seconds": 4}),
        ("order", "free"),
        ("explain", True),
    ],
)
async def test_a_completion_refuses_options_that_chats_alone_heed(
    app: FastAPI, outputs: Events, option: str, value: Any
):
    answer = await post(app, "/v1/completions", orbit={option: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"orbit.{option}")
    heeded = await post(app, "/v1/completions", orbit={"mode": "exact", "order": "fixed", "explain": False})
    assert heeded.status_code == 200
