"""A chat request over HTTP whose chunks may in part trade places: what vLLM is given to answer, and what the client is
told. Everything up to vLLM's own handler is real."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image
from vllm.entrypoints.openai.chat_completion.api_router import router
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from kvstore.catalog.index import Entry, Scope, prefix_key
from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.auth import Authenticate
from serving.api.chat import OrbitServingChat, fixed_prefix
from serving.api.errors import answer_errors
from serving.api.media import MediaResolver
from serving.api.opening import Openings
from serving.api.prefix import Prefixes
from serving.api_keys import KeyRing
from serving.frontend.documents import Documents
from serving.frontend.errors import DeadlineExceeded
from serving.frontend.report import RequestTrace, set_trace
from serving.placement.orderer import PatchAwareOrderer
from serving.settings import HttpSettings

SYSTEM = "You read pages."


class Tokenizer:
    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


class Chat(OrbitServingChat):
    """The handler without an engine; `asked` is what vLLM was to answer."""

    def __init__(self, media: MediaResolver, documents: Documents) -> None:
        self._media, self._documents = media, documents
        self._prefixes, self._max_characters = Prefixes(Tokenizer()), 1000
        self._openings = Openings(self._written_first)
        self.engine_client: Any = SimpleNamespace(
            orderer=PatchAwareOrderer(), prefetch=lambda *_: None, request_timeout_s=None
        )
        self.asked: list[Any] = []

    async def _written_first(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        return (1, *Tokenizer().encode(str(request.messages)))


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    async def answer(self: Chat, request: ChatCompletionRequest, _: Any = None) -> ChatCompletionResponse:
        self.asked = request.messages
        return ChatCompletionResponse(model="m", choices=[], usage=UsageInfo())

    monkeypatch.setattr(OpenAIServingChat, "create_chat_completion", answer)
    files, documents = FileStore(str(tmp_path), FileSettings()), Documents(Tokenizer())
    return Chat(MediaResolver(HttpSettings(), files, VectorStores(files), documents), documents)


async def post(chat: Chat, status: int = 200, **body: Any) -> dict[str, Any]:
    app = FastAPI()
    app.state.openai_serving_chat = chat
    app.router.routes += [route for route in router.routes if route.path == "/v1/chat/completions"]
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing({}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/chat/completions", json={"model": "m", **body})
    assert response.status_code == status, response.text
    return response.json()


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def image(number: int) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"},
    }


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_free_images_trade_places_behind_a_system_image_and_a_fixed_one(chat: Chat):
    logo, plan, a, b, c = (chat._media.open(png(number), "local", "").content for number in range(5))
    scope = Scope("local", prefix_key(Tokenizer().encode(SYSTEM)))
    stored = [(logo, ()), (b, (plan, logo)), (c, (logo, plan, b)), (a, (c, b, logo, plan))]
    chat.engine_client.orderer.formed(Entry(scope, *entry, ordered=False) for entry in stored)

    answer = await post(
        chat,
        messages=[
            {"role": "system", "content": [said(SYSTEM), image(0)]},
            {
                "role": "user",
                "content": [image(1), said("Pages:"), image(2), image(3), said("\n"), image(4), said("Who signed?")],
            },
        ],
        orbit={"order": "free", "explain": True},
    )

    system, user = ([part.get("uuid") or part["text"] for part in message["content"]] for message in chat.asked)
    assert system == [SYSTEM, logo]
    assert user == [plan, "Pages:", b, c, "\n", a, "Who signed?"], "text stays, and what stands alone between it"
    order = answer["orbit"]["order"]
    assert (order["chunks"], order["reason"]) == ([0, 1, 3, 4, 2], "the cheapest order found")
    patched, computed = (chat.engine_client.orderer.costs.of(256, patched=patched) / 1e6 for patched in (True, False))
    assert order["cost_ms"] == pytest.approx(4 * patched + computed, abs=1e-2)
    assert order["arrival_ms"] == pytest.approx(patched + 4 * computed, abs=1e-2)


async def test_a_computed_chunk_that_may_stand_nowhere_else_has_no_alternative(chat: Chat):
    logo = chat._media.open(png(0), "local", "").content
    scope = Scope("local", prefix_key(Tokenizer().encode(SYSTEM)))
    chat.engine_client.orderer.formed([Entry(scope, logo, (), ordered=False)])
    found: list[Any] = []
    chat.engine_client.prefetch = lambda _, trace: found.extend(trace.costs)

    messages = [
        {"role": "system", "content": [said(SYSTEM), image(0)]},
        {"role": "user", "content": [image(1), said("and"), image(2), image(3), said("Which?")]},
    ]
    await post(chat, messages=messages, orbit={"order": "free", "explain": True})

    system, alone, first, last = (costs.alternative for costs in found)
    assert (system.chunk, system.operating_point) == (0, "computed")
    assert alone is None
    assert first is not None, "the other of the two might stand there"
    assert last is None, "nothing is left for that place"


async def test_no_pixels_are_held_once_a_chat_is_rendered():
    """vLLM keeps the request until its last token. Images that its processor knows are not handed to it either."""
    seen: list[list[Any]] = []

    async def render(request: Any, **_: Any) -> str:
        seen.append([part["image_pil"] for part in request.messages[0]["content"]])
        return "rendered"

    async def right(_: Any) -> None:
        return None

    parts = [{"type": "image_pil", "image_pil": object(), "uuid": name} for name in ("known", "new")]
    request: Any = SimpleNamespace(n=1, messages=[{"role": "user", "content": parts}, {"role": "user", "content": "?"}])
    cache = SimpleNamespace(is_cached=lambda names: [name == "known" for name in names])
    chat: Any = object.__new__(OrbitServingChat)
    chat._check_model, chat._preflight = right, lambda n: None
    chat.renderer = SimpleNamespace(_mm_processor_only_cache=cache)
    chat.online_renderer = SimpleNamespace(render_chat=render)
    chat.engine_client = SimpleNamespace(request_timeout_s=None)
    assert await chat.render_chat_request(request) == "rendered"
    assert seen == [[None, parts[1]["image_pil"]]]
    assert [part["image_pil"] for part in request.messages[0]["content"]] == [None, None]
    assert request.messages[1]["content"] == "?"


def test_parts_of_a_system_message_that_are_no_objects_are_left_to_be_refused():
    message = {"role": "system", "content": ["Be brief.", {"type": "text", "text": "Be kind."}]}
    assert fixed_prefix([message], ChatCompletionRequest(messages=[])) == "Be kind."


async def test_what_would_rename_images_is_refused(chat: Chat):
    """vLLM names an image by its uuid and these, and what is stored under another name no deletion finds."""
    messages = [{"role": "user", "content": [image(1), said("Well?")]}]
    answer = await post(chat, 400, messages=messages, media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}})
    assert answer["error"]["param"] == "media_io_kwargs"
    assert not chat.asked


async def test_a_message_without_a_role_is_refused(chat: Chat):
    answer = await post(chat, 400, messages=[{"author": {"role": "user"}, "content": []}])
    assert "messages[0]: a message needs a role" in answer["error"]["message"]


async def test_pages_of_a_later_turn_keep_the_order_that_their_patches_are_of(chat: Chat):
    a, b, c, d = (chat._media.open(png(number), "local", "").content for number in range(4))
    scope = Scope("local", prefix_key(Tokenizer().encode(SYSTEM)))
    stored = [(b, ()), (a, (b,)), (d, (a, b)), (c, (a, b, d))]
    chat.engine_client.orderer.formed(Entry(scope, *entry, ordered=False) for entry in stored)
    turns = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [image(0), image(1), said("Which is newer?")]},
        {"role": "assistant", "content": "It is hard to tell."},
        {"role": "user", "content": [image(2), image(3), said("And of these?")]},
    ]
    for text, order in (("auto", [1, 0, 2, 3]), ("free", [1, 0, 3, 2])):
        answer = await post(chat, messages=turns, orbit={"order": "free", "explain": True, "text": text})
        assert answer["orbit"]["order"]["chunks"] == order
        patched, computed = (chat.engine_client.orderer.costs.of(256, patched=one) / 1e6 for one in (True, False))
        cost = 2 * patched + 2 * (patched if text == "free" else computed)
        assert answer["orbit"]["order"]["cost_ms"] == pytest.approx(cost, abs=1e-2)
    turns[1]["content"] = [image(0), said("Which?")]
    answer = await post(chat, messages=turns, orbit={"order": "free"})
    assert "keys their patches" in answer["orbit"]["order"]["reason"]


async def test_a_prompt_with_chunks_is_not_cut(chat: Chat):
    words, pages = ([{"role": "user", "content": content}] for content in ("Well?", [image(1), said("Well?")]))
    await post(chat, messages=words, truncate_prompt_tokens=5)
    answer = await post(chat, 400, messages=pages, truncate_prompt_tokens=5)
    assert "a prompt with images or documents is not cut" in answer["error"]["message"]


async def test_what_a_template_writes_first_keys_what_is_stored(chat: Chat):
    prefixes: list[Any] = []
    chat.engine_client.prefetch = lambda _, trace: prefixes.append(tuple(trace.prefix_tokens))
    messages = [{"role": "user", "content": [image(1), said("Well?")]}]
    for documents in (None, [{"text": "a"}], [{"text": "b"}]):
        await post(chat, messages=messages, documents=documents)
    assert len({*prefixes}) == 3
    for name in ("tools", "documents"):
        answer = await post(chat, 400, messages=messages, chat_template_kwargs={name: []})
        assert f"give {name} as a field of the request" in answer["error"]["message"]


async def test_a_rendered_prompt_is_not_told(chat: Chat):
    answer = await post(chat, 400, messages=[{"role": "user", "content": "Well?"}], return_prompt_text=True)
    assert "return_prompt_text is not supported" in answer["error"]["message"]


async def test_the_deadline_holds_while_a_chat_is_rendered():
    async def waits(*_: Any) -> None:
        await asyncio.Event().wait()

    chat: Any = object.__new__(OrbitServingChat)
    chat.renderer = SimpleNamespace(_mm_processor_only_cache=None)
    chat.engine_client = SimpleNamespace(request_timeout_s=0.01)
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": "?"}])
    set_trace(RequestTrace())
    with pytest.raises(DeadlineExceeded):
        await chat.with_pixels(request, waits)
