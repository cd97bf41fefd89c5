"""Openings of prompts: what the chat template makes of a fixed prefix."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from prefill_workers.protocol import ChunkSpan
from serving.api.opening import Openings, token_ids_of
from serving.frontend.prompt_segments import Segments

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


class Template:
    """A chat template of one token a character, which remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[ChatCompletionRequest] = []

    async def render(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        self.asked.append(request)
        if "!" in str(request.messages):
            raise ValueError("this template takes no such conversation")
        told = "".join(f"<{message['role']}>{message['content']}</>" for message in request.messages)
        return tuple(map(ord, f"{request.chat_template_kwargs or ''}{told}<assistant>"))


def chat(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="model", messages=list(messages), **fields)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def test_an_opening_is_the_fixed_prefix_as_the_template_writes_it():
    template = Template()
    openings = Openings(template.render)
    brief = {"role": "system", "content": "Be brief."}
    asked = chat(brief, user({"type": "text", "text": "What?"}, IMAGE), chat_template_kwargs={"date": "today"})
    messages = [brief, user({"type": "text", "text": "What?"}, IMAGE)]
    found = await openings.token_ids("acme", "Be brief.", asked, messages)
    assert "".join(map(chr, found)) == "<system>Be brief.</><user></><assistant>"
    assert await openings.token_ids("acme", "Be brief.", chat(brief, user(IMAGE)), [brief, user(IMAGE)]) == found
    assert len(template.asked) == 1
    assert asked.chat_template_kwargs == {"date": "today"}, "the request itself is left as it was"
    await openings.token_ids("rival", "Be brief.", asked, messages)
    assert len(template.asked) == 2, "tenants do not speed each other up"
    assert await openings.token_ids("acme", "Be brief.", asked, [{**brief, "role": "developer"}]) != found
    parts = {"role": "system", "content": [IMAGE, {"type": "text", "text": "Be brief."}]}
    await openings.token_ids("acme", "Be brief.", asked, [parts, user(IMAGE)])
    assert template.asked[-1].messages[0]["content"] == [{"type": "text", "text": "Be brief."}], "no image is decoded"


async def test_without_an_opening_requests_go_on():
    refused = {"role": "system", "content": "!"}
    found = await Openings(Template().render).token_ids("acme", "!", chat(refused), [refused])
    assert found == ()
    assert token_ids_of("an error of vLLM's") == ()
    assert token_ids_of(([], [{"prompt_token_ids": [1, 2]}])) == (1, 2)


@pytest.mark.parametrize(("opening", "head"), [((1, 2, 3, 9), 3), ((1, 2, 3, 4, 5, 6), 4), ((7,), 0), ((), 0)])
def test_the_head_of_a_prompt_is_what_it_has_in_common_with_its_opening_before_any_chunk(
    opening: tuple[int, ...], head: int
):
    segments = Segments([1, 2, 3, 4, 5, 6], (ChunkSpan("page", "image", 4, 6, 4, 2),), (None,))
    assert segments.head(opening) == head
