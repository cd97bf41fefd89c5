"""Malformed messages: each is refused by the part that is wrong, and none is an internal error."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.api_router import router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.auth import Authenticate
from serving.api.chat import OrbitServingChat, fixed_prefix, readable, refuse_longer
from serving.api.errors import NotFound, TooLarge, answer_errors
from serving.api.media import MediaResolver
from serving.api.prefix import Prefixes
from serving.api_keys import KeyRing
from serving.frontend.documents import Documents
from serving.frontend.errors import InvalidRequest
from serving.placement.orderer import PatchAwareOrderer
from serving.settings import HttpSettings

ROLES = ("user", "system", "developer", "assistant", "tool", "function", "reader")


class Tokenizer:
    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


class Chat(OrbitServingChat):
    """The handler without an engine; `asked` is what vLLM was to answer."""

    def __init__(self, media: MediaResolver, documents: Documents) -> None:
        self._media, self._documents = media, documents
        self._prefixes, self._max_characters = Prefixes(Tokenizer()), 1000
        self.engine_client: Any = SimpleNamespace(
            orderer=PatchAwareOrderer(), prefetch=lambda *_: None, request_timeout_s=None
        )
        self.asked: list[Any] = []


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaResolver:
    files = FileStore(str(tmp_path_factory.mktemp("files")), FileSettings())
    return MediaResolver(HttpSettings(), files, VectorStores(files), Documents(Tokenizer()))


@pytest.fixture
def chat(media: MediaResolver, monkeypatch: pytest.MonkeyPatch) -> Chat:
    async def answer(self: Chat, request: ChatCompletionRequest, _: Any = None) -> ChatCompletionResponse:
        self.asked = request.messages
        return ChatCompletionResponse(model="m", choices=[], usage=UsageInfo())

    monkeypatch.setattr(OpenAIServingChat, "create_chat_completion", answer)
    return Chat(media, Documents(Tokenizer()))


@pytest.fixture
def app(chat: Chat) -> FastAPI:
    app = FastAPI()
    app.state.openai_serving_chat = chat
    app.router.routes += [route for route in router.routes if route.path == "/v1/chat/completions"]
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing({}))
    return app


async def post(app: FastAPI, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        content = json.dumps({"model": "m", **body})  # in ASCII: halves of surrogate pairs can be sent
        return await client.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})


def chat_of(role: str, *parts: Any) -> list[dict[str, Any]]:
    message = {"role": role, "content": list(parts)}
    named = {"tool": {"tool_call_id": "1"}, "function": {"name": "f"}}
    return [{"role": "user", "content": "Hello."}, {**message, **named.get(role, {})}]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "text", "text": 5},
        {"type": "text", "text": ["words"]},
        {"type": "refusal"},
        {"type": "refusal", "refusal": None},
        {"type": "refusal", "text": "words"},
        {"type": 5, "text": "words"},
        {"text": "words"},
        {},
        "words",
        None,
        5,
        [],
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_part_without_its_text_is_refused_by_name(app: FastAPI, chat: Chat, role: str, part: Any, place: int):
    parts: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    parts.insert(place, part)
    answer = await post(app, messages=chat_of(role, *parts))
    assert answer.status_code == 400, answer.text
    assert chat.asked == []
    if isinstance(part, dict | str) or role not in ("function", "reader"):  # of these pydantic refuses the rest itself
        assert f"messages[1].content[{place}]: " in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == f"messages[1].content[{place}]"


@pytest.mark.parametrize("content", [5, {"type": "text", "text": "x"}, {"a": 1}, [[]], True], ids=str)
@pytest.mark.parametrize("role", ROLES)
async def test_content_of_another_kind_is_refused(app: FastAPI, role: str, content: Any):
    answer = await post(app, messages=[{"role": role, "content": content, "tool_call_id": "1"}])
    assert answer.status_code == 400, answer.text


async def test_of_a_text_part_nothing_but_its_text_is_read(app: FastAPI, chat: Chat):
    """By its other fields vLLM would fetch an image, and templates write a place for one."""
    more = {"uuid": "another's", "image_url": "http://169.254.169.254/latest", "image": 1, "image_pil": None}
    messages = chat_of("user", {"type": "text", "text": "words", **more}, {"type": "refusal", "refusal": "no", **more})
    assert (await post(app, messages=messages)).status_code == 200
    assert chat.asked[1]["content"] == [{"type": "text", "text": "words"}, {"type": "refusal", "refusal": "no"}]


async def test_the_deadline_holds_before_an_answer_is_begun(app: FastAPI, chat: Chat, monkeypatch: pytest.MonkeyPatch):
    async def waits(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(chat._media, "resolve_messages", waits)
    chat.engine_client.request_timeout_s = 0.01
    answer = await post(app, messages=[{"role": "user", "content": "Hello."}])
    assert (answer.status_code, chat.asked) == (504, [])


async def test_json_that_is_nested_too_deeply_is_refused(app: FastAPI):
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    answer = await post(app, messages=[{"role": "user", "content": "x"}], tools=[tool])
    assert answer.status_code in (200, 400), answer.text


scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
urls = st.sampled_from(
    ["data:,", "data:image/png;base64,AAAA", "http://", "http://[", "file:///etc/passwd", "\ud800", "\0"]
)
parts = values | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "refusal", "image_url", "file", "input_audio", "image_pil", "video_url"])
        | values,
        "text": values,
        "refusal": values,
        "image_url": values | urls | st.fixed_dictionaries({"url": values | urls}),
        "file": values | st.dictionaries(st.sampled_from(["file_id", "file_data", "filename"]), values | urls),
        "uuid": values,
    },
)
messages = values | st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(ROLES) | values,
        "content": values | st.lists(parts, max_size=3),
        "tool_calls": values | st.lists(values, max_size=2),
        "tool_call_id": values,
        "name": values,
        "reasoning": values,
    },
)


@given(given_messages=st.lists(messages, min_size=1, max_size=3))
@settings(max_examples=300)
def test_the_checks_raise_nothing_but_refusals(media: MediaResolver, given_messages: list[Any]):
    request: Any = SimpleNamespace(tools=None)
    with suppress(InvalidRequest, NotFound, TooLarge):
        found = readable(given_messages)
        refuse_longer(found, fixed_prefix(found, request), 1000)
        asyncio.run(media.resolve_messages(found, "local"))


@given(given_messages=st.lists(messages, min_size=1, max_size=3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_malformed_message_is_an_internal_error(app: FastAPI, given_messages: list[Any]):
    body = json.loads(json.dumps(given_messages).replace("NaN", "null").replace("Infinity", "0"))
    answer = asyncio.run(post(app, messages=body))
    assert answer.status_code < 500, answer.text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {}}, "image_url.url: Field required"),
        ({"type": "image_url"}, "image_url: Field required"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio.data: Field required"),
        ({"type": "wat"}, "parts of type 'wat' are not supported; use text, image_url, video_url or file"),
        (5, "valid dictionary"),
    ],
    ids=str,
)
async def test_a_part_is_refused_as_what_it_says_it_is(app: FastAPI, part: Any, words: str):
    answer = await post(app, messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
