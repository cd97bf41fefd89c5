"""Conversations over HTTP: a turn computes what is new, and answers as if nothing had come before."""

from __future__ import annotations

import string
from typing import Any

import httpx
import pytest
from client import Service, picture, user

from prefill_workers.prefix_digests import GRAIN

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


def test_a_turn_that_sends_an_answer_back_computes_what_is_new(ingresses: Service):
    """The prefill worker reads the answer's KV back from the decode worker once it has ended."""
    letters = ingresses.post({"prompt": string.ascii_lowercase, "add_special_tokens": False}, "/tokenize").json()[
        "tokens"
    ]
    asked = {"max_tokens": 48, "ignore_eos": True, "allowed_token_ids": letters}  # which come back as the same tokens
    messages, read = user(picture(183), "What is this?"), _read_back(ingresses)
    first = ingresses.chat(messages, "exact", **asked)
    ingresses.wait_until(lambda: _read_back(ingresses) > read)
    ingresses.wait_until(lambda: all(ingresses.everywhere("DecodeWorker", "all_blocks_free")))
    ingresses.settle()
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, *user("Are you sure of that?")]
    second = ingresses.chat(messages, "exact")
    assert second["orbit"]["prefix_tokens_reused"] >= first["usage"]["prompt_tokens"] + 48 - GRAIN
    alone = ingresses.chat(messages, "off")
    assert second["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]


def _read_back(service: Service) -> float:
    """Tokens of answers whose KV came from decode workers."""
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("orbitserve_answer_tokens_pulled_total{"))


def test_a_system_prompt_is_computed_once(ingresses: Service):
    system = {"role": "system", "content": "You look at pages for people who have no time, and answer in one word."}
    ingresses.chat([system, *user(picture(151), "What is this?")], "exact")
    orbit = ingresses.chat([system, *user(picture(152), "And this?")], "exact")["orbit"]
    assert [chunk["operating_point"] for chunk in orbit["chunks"]] == ["encoded"]
    assert orbit["tokens_reused"] == orbit["prefix_tokens_reused"] >= 16
    assert orbit["tokens_reused"] + orbit["tokens_computed"] == orbit["prompt_tokens"]


def test_a_window_that_slides_in_a_session_computes_what_is_new(service: Service):
    steps = [[*user(picture(190 + n)), {"role": "assistant", "content": f"click button {n}"}] for n in range(4)]
    task = {"role": "system", "content": "You operate a computer."}

    def ask(window: list[list[dict[str, Any]]]) -> dict[str, Any]:
        messages = [task, *(message for step in window for message in step), *user("What next?")]
        return service.chat(messages, orbit={"session": {"id": "agent-1"}})["orbit"]

    first = ask(steps[:3])
    assert first["tokens_reused"] == 0
    service.settle()
    slid = ask(steps[1:])
    oldest, next_one, new = [chunk["operating_point"] for chunk in slid["chunks"]]
    assert {oldest, next_one} <= {"survived", "prefix"}, "as idle time has computed them anew by then, or not"
    assert new == "encoded"
    assert slid["session"]["prefix"] + slid["session"]["survived"] >= 4, "pages, and the words between them"
    assert slid["vision_tokens_encoded"] <= first["vision_tokens_encoded"] / 3
    assert slid["tokens_computed"] < slid["prompt_tokens"] / 2
    messages = [task, *(message for step in steps[1:] for message in step), *user("What next?")]
    weighed = service.chat(messages, orbit={"load_bearing": True})
    service.settle()
    found = httpx.get(service.url + weighed["orbit"]["load_bearing"]).json()
    assert (found["id"], found["state"]) == (weighed["id"], "measured")
    assert [chunk["tokens"] for chunk in found["chunks"]] == [chunk["tokens"] for chunk in slid["chunks"]]
    assert all(chunk["left_out"]["kl_nats"] > 0 for chunk in found["chunks"])
    session = service.url + "/v1/orbit/sessions/agent-1"
    assert httpx.get(session).json()["id"] == "agent-1"
    assert httpx.delete(session).status_code == 200
    assert httpx.get(session).status_code == 404


def test_a_window_of_two_that_slides_answers_word_for_word_as_without_a_session(service: Service):
    """Idle time has computed what stays behind what stands in front of it now."""
    steps = [[*user(picture(200 + n)), {"role": "assistant", "content": f"click button {n}"}] for n in range(3)]
    task, asked = {"role": "system", "content": "You operate a computer."}, {"max_tokens": 16, "ignore_eos": True}

    def messages(window: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [task, *(message for step in window for message in step), *user("What next?")]

    service.chat(messages(steps[:2]), orbit={"session": {"id": "agent-2"}}, **asked)
    service.settle()
    slid = service.chat(messages(steps[1:]), orbit={"session": {"id": "agent-2"}}, **asked)
    assert [chunk["operating_point"] for chunk in slid["orbit"]["chunks"]] == ["prefix", "encoded"]
    assert slid["orbit"]["session"]["refreshed"] >= 1
    alone = service.chat(messages(steps[1:]), "off", **asked)
    assert slid["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
