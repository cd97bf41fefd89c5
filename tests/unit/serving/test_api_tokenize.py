"""POST /tokenize: a chat's chunks are resolved before vLLM's handler, which would fetch and name them itself."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image
from vllm.entrypoints.serve.tokenize.api_router import router
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

from kvstore.settings import FileSettings
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from serving.api.app import OrbitServingTokenization
from serving.api.auth import Authenticate
from serving.api.errors import answer_errors
from serving.api.media import MediaResolver
from serving.api_keys import KeyRing
from serving.frontend.documents import Documents, Mark
from serving.frontend.video_options import VideoOptions
from serving.settings import ApiKey, HttpSettings


class Tokenizer:
    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


class Tokenization(OrbitServingTokenization):
    """The handler without a renderer; `asked` is what vLLM was to tokenise."""

    def __init__(self, media: MediaResolver) -> None:
        self._media = media
        self._max_tokens, self._max_characters = 4, 100
        self.asked: list[Any] = []


@pytest.fixture
def tokenization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenization:
    async def answer(self: Tokenization, request: TokenizeRequest, _: Any) -> TokenizeResponse:
        self.asked.append(request)
        return TokenizeResponse(count=0, max_model_len=1, tokens=[])

    async def words(self: Tokenization, request: DetokenizeRequest, _: Any) -> DetokenizeResponse:
        self.asked.append(request)
        return DetokenizeResponse(prompt="words")

    monkeypatch.setattr(ServingTokenization, "create_tokenize", answer)
    monkeypatch.setattr(ServingTokenization, "create_detokenize", words)
    files = FileStore(str(tmp_path), FileSettings())
    return Tokenization(MediaResolver(HttpSettings(), files, VectorStores(files), Documents(Tokenizer())))


async def post(tokenization: Tokenization, path: str = "/tokenize", **body: Any) -> httpx.Response:
    app = FastAPI()
    app.state.serving_tokenization = tokenization
    app.include_router(router)
    answer_errors(app)
    app.add_middleware(Authenticate, KeyRing({"key": ApiKey(tenant="acme")}))
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers) as client:
        return await client.post(path, json={"model": "m", **body})


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("option", ["media_io_kwargs", "mm_processor_kwargs"])
async def test_what_would_rename_or_change_images_is_refused(tokenization: Tokenization, option: str):
    messages = [{"role": "user", "content": "What is this?"}]
    answer = await post(tokenization, messages=messages, **{option: {"image": {"quality": 1}}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == option
    assert not tokenization.asked


async def test_a_message_without_a_role_is_refused(tokenization: Tokenization):
    answer = await post(tokenization, messages=[{"author": {"role": "user"}, "content": []}])
    assert answer.status_code == 400
    assert "messages[0]: a message needs a role" in answer.json()["error"]["message"]


async def test_images_are_opened_and_named_here(tokenization: Tokenization):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    data = buffer.getvalue()
    image = {"type": "image_url", "image_url": {"url": data_url("image/png", data)}, "uuid": "another's"}
    document = {"type": "file", "file": {"file_data": data_url("text/plain", b"Some words.")}}
    answer = await post(tokenization, messages=[{"role": "user", "content": [image, document]}])
    assert answer.status_code == 200
    ((message,),) = [request.messages for request in tokenization.asked]
    first, second = message["content"]
    assert (first["type"], first["uuid"]) == ("image_pil", tokenization._media.open(data, "acme", "").content)
    assert second["type"] == "text"
    assert isinstance(second["text"], Mark)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, "not allowed here"),
        ({"type": "image_pil", "image_pil": None, "uuid": "another's"}, "not supported"),
        ({"image_url": "http://169.254.169.254/latest"}, "not supported"),
        ({"type": "video_url", "video_url": {"url": "http://169.254.169.254/latest"}}, "takes no videos"),
    ],
)
async def test_what_chats_may_not_send_is_refused(tokenization: Tokenization, part: Any, said: str):
    answer = await post(tokenization, messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert tokenization.asked == []


async def test_a_prompt_of_text_goes_on_as_it_is(tokenization: Tokenization):
    assert (await post(tokenization, prompt="Hello.")).status_code == 200
    assert [request.prompt for request in tokenization.asked] == ["Hello."]


TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 100}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "a" * 100})}}
ONE_LETTER = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {"prompt": "x" * 101}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 60}] * 2}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, "messages"),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "x", "reasoning": "r" * 100}]}, "messages"),
        ("/tokenize", {**ONE_LETTER, "chat_template_kwargs": {"day": "d" * 100}}, "messages"),
        ("/detokenize", {"tokens": [1] * 5}, "tokens"),
    ],
    ids=["text", "chat", "tools", "call", "reasoning", "variables", "tokens"],
)
async def test_more_than_a_prompt_can_hold_is_refused_before_anything_is_done(
    tokenization: Tokenization, path: str, body: dict[str, Any], parameter: str
):
    answer = await post(tokenization, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
    assert tokenization.asked == []


async def test_as_many_tokens_as_a_prompt_holds_become_words(tokenization: Tokenization):
    assert (await post(tokenization, "/detokenize", tokens=[1] * 4)).json() == {"prompt": "words"}


async def test_parts_that_can_be_read_only_once_are_tokenised(tokenization: Tokenization):
    message = {"role": "assistant", "content": [{"type": "text", "text": "Words."}], "refusal": None}
    assert (await post(tokenization, messages=[message])).status_code == 200
    ((asked,),) = [request.messages for request in tokenization.asked]
    assert [part["text"] for part in asked["content"]] == ["Words."]


async def test_a_chats_tool_calls_are_a_list_for_all_that_read_them(tokenization: Tokenization):
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert (await post(tokenization, messages=messages)).status_code == 200
    (asked,) = tokenization.asked
    assert asked.messages[0]["tool_calls"] == [call]


async def test_pages_and_videos_are_chosen_as_for_an_answer(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
):
    chosen: list[Any] = []

    async def resolved(messages: list[Any], *how: Any) -> list[Any]:
        chosen.append(how)
        return messages

    monkeypatch.setattr(tokenization._media, "resolve_messages", resolved)
    orbit = {"pages": "2", "video": {"segment_seconds": 4}, "explain": True}
    assert (await post(tokenization, **ONE_LETTER, orbit=orbit)).status_code == 200
    assert chosen == [("acme", "2", VideoOptions(segment_seconds=4))]


@pytest.mark.parametrize(
    ("body", "option", "value"),
    [
        (ONE_LETTER, "retrieve", {"vector_store_ids": ["vs_1"]}),
        (ONE_LETTER, "order", "free"),
        ({"prompt": "x"}, "pages", "1"),
        ({"prompt": "x"}, "video", {"segment_seconds": 4}),
    ],
)
async def test_an_option_that_would_change_the_prompt_is_refused(
    tokenization: Tokenization, body: dict[str, Any], option: str, value: Any
):
    answer = await post(tokenization, **body, orbit={option: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"orbit.{option}")
    assert tokenization.asked == []
