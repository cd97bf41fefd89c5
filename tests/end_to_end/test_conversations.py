"""Conversations over HTTP: a turn computes what is new, and answers as if nothing had come before."""

from __future__ import annotations

from typing import Any

import pytest
from client import Service, picture, user

pytestmark = pytest.mark.service

MOST_KNOWN_AGAIN = 40  # tokens of a beginning, at most: the last of it, in part, and the template's around the answer


def test_every_turn_computes_what_is_new_and_answers_like_one_that_is_computed_whole(ingresses: Service):
    """The third turn brings an image, which moves the positions of all before it."""
    turns = [(picture(181), "What is this?"), ("Are you sure of that?",), (picture(182), "And what is this?")]
    messages: list[dict[str, Any]] = []
    before = 0
    for number, parts in enumerate(turns):
        messages += user(*parts)
        answer = ingresses.chat(messages, "exact")
        usage, orbit = answer["usage"], answer["orbit"]
        known = usage["prompt_tokens_details"]["cached_tokens"]
        assert known == orbit["tokens_reused"] == orbit["prefix_tokens_reused"]
        assert known >= before - MOST_KNOWN_AGAIN
        assert bool(known) == bool(number)
        assert [chunk["operating_point"] for chunk in orbit["chunks"]][: number > 0] == ["prefix"] * (number > 0)
        alone = ingresses.chat(messages, "off")
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        said = answer["choices"][0]["message"]["content"]
        assert said == alone["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": said})
        before = usage["prompt_tokens"]
