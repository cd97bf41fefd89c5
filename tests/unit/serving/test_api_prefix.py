"""Fixed prefixes of chats: how much text is taken at all, where it is tokenised, and what is remembered."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from serving.api.chat import OrbitServingChat, fixed_prefix
from serving.api.prefix import Prefixes, with_tools_of_requests
from serving.frontend.errors import InvalidRequest


class Tokenizer:
    """One token a character; remembers what it tokenised and in which threads."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: set[int] = set()

    def encode(self, text: str, **_: Any) -> list[int]:
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return list(map(ord, text))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


async def test_a_prefix_is_tokenised_once_and_off_the_loop(tokenizer: Tokenizer):
    prefixes = Prefixes(tokenizer)
    assert await prefixes.token_ids("acme", "ab") == await prefixes.token_ids("acme", "ab") == (97, 98)
    assert tokenizer.texts == ["ab"]
    assert threading.get_ident() not in tokenizer.threads


async def test_a_prefix_is_tokenised_by_the_threads_that_have_tokenizers(tokenizer: Tokenizer):
    with ThreadPoolExecutor(1) as executor:
        own = executor.submit(threading.get_ident).result()
        prefixes = Prefixes(tokenizer, executor)
        await asyncio.gather(*(prefixes.token_ids("acme", text) for text in ("ab", "cd", "ef")))
    assert tokenizer.threads == {own}


async def test_tenants_do_not_speed_each_other_up(tokenizer: Tokenizer):
    prefixes = Prefixes(tokenizer)
    for tenant in ("acme", "other"):
        await prefixes.token_ids(tenant, "ab")
    assert tokenizer.texts == ["ab", "ab"]


async def test_what_is_remembered_is_bounded_by_size(tokenizer: Tokenizer):
    prefixes = Prefixes(tokenizer, limit=1000)
    for letter in "abcaa":
        await prefixes.token_ids("acme", letter * 400)
    assert [text[0] for text in tokenizer.texts] == ["a", "b", "c", "a"]
    await prefixes.token_ids("acme", "d" * 2000)
    assert not prefixes._kept
    for number in range(100):
        await prefixes.token_ids("acme", "" if number % 2 else f"{number}")
    assert len(prefixes._kept) < 100, "short ones weigh something, too"
    assert prefixes._kept.held <= 1000


TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"é": {}}}}},
    {"function": {"description": "Äh [1]\n", "name": "say"}, "defer_loading": True},
]


@pytest.mark.parametrize("system", ["Be brief.", '["Be"]\nbrief.', ""])
@pytest.mark.parametrize("form", [{}, {"indent": 2, "ensure_ascii": False}, {"separators": (",", ":")}])
def test_tools_are_written_as_requests_have_them_however_they_are_given(system: str, form: dict[str, Any]):
    messages = [{"role": "system", "content": system}] if system else []
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)
    given = json.dumps(TOOLS, **form) + (f"\n{system}" if system else "")
    assert with_tools_of_requests(given) == fixed_prefix(messages, request) != given
    assert with_tools_of_requests(fixed_prefix(messages, request)) == fixed_prefix(messages, request)


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "Be brief.", "[]\nBe brief.", "[1] Be brief.", "[Be brief.]", '["Be brief."]\nNow.', "[{}]", "[null]"),
        *('[{"type": "function", "function": {"name": "f"}}] may be called.', f"Tools:\n{json.dumps(TOOLS)}"),
        '{"type": "function", "function": {"name": "f"}}',
    ],
)
def test_a_prefix_without_tools_is_left_as_it_is(prefix: str):
    assert with_tools_of_requests(prefix) == prefix


class Chat(OrbitServingChat):
    """The handler as far as a request's text is looked at."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._prefixes, self._max_characters = Prefixes(tokenizer), 1000
        self.engine_client: Any = SimpleNamespace(request_timeout_s=None)


def text(characters: int) -> dict[str, Any]:
    return {"type": "text", "text": "x" * characters}


TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 600}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": "x" * 1001}]},
        {"messages": [{"role": "user", "content": "x" * 1001}]},
        {"messages": [{"role": "user", "content": [text(500), text(501)]}]},
        {"messages": [{"role": "system", "content": [text(500)]}, {"role": "user", "content": "x" * 501}]},
        {"messages": [{"role": "user", "content": "x" * 400}], "tools": [TOOL]},
    ],
    ids=["system", "user", "parts", "together", "tools"],
)
async def test_more_text_than_a_prompt_holds_is_refused_before_it_is_tokenised(tokenizer: Tokenizer, body: Any):
    request = ChatCompletionRequest(model="m", **body)
    with pytest.raises(InvalidRequest, match=r"1\d\d\d characters.* at most 1000") as refused:
        await Chat(tokenizer).create_chat_completion(request)
    assert refused.value.parameter == "messages"
    assert tokenizer.texts == []


async def test_as_much_as_a_prompt_holds_is_not(tokenizer: Tokenizer):
    messages: Any = [{"role": "system", "content": "x" * 300}, {"role": "user", "content": [text(300), text(400)]}]
    with pytest.raises(AttributeError, match="_media"):  # where it would go on
        await Chat(tokenizer).create_chat_completion(ChatCompletionRequest(model="m", messages=messages))
    assert tokenizer.texts == ["x" * 300]
