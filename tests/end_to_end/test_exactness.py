"""`exact` through the whole service against one multimodal vLLM engine, in fp32 and bf16."""

from __future__ import annotations

from typing import Any

import pytest
from client import Service, picture, text, user

pytestmark = pytest.mark.service

CASES: dict[str, list[dict[str, Any]]] = {
    "text only": user("Say something about the sea."),
    "one image": user(picture(1), "What is this?"),
    "three images": user(picture(1), picture(2), picture(3), "Compare them."),
    "interleaved text": user("Look: ", picture(4), " then ", picture(5), " and at last ", picture(4), " what changed?"),
    "different sizes": user(picture(6, width=84, height=308), picture(7, width=420, height=112), "Which is wider?"),
    "system prompt": [{"role": "system", "content": "You are terse."}, *user("First: ", picture(8), "Well?")],
    "multi-turn": [
        *user(picture(9), "What is on this page?"),
        {"role": "assistant", "content": "A great many coloured dots."},
        *user("And on this one?", picture(10)),
    ],
}


def token_logprobs(answer: dict[str, Any]) -> list[dict[str, float]]:
    return [
        {entry["token"]: entry["logprob"] for entry in position["top_logprobs"]}
        for position in answer["choices"][0]["logprobs"]["content"]
    ]


ASK = {"logprobs": True, "top_logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.mark.parametrize("mode", ["exact", "off"])
@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_that_of_one_multimodal_engine(service: Service, reference: Any, case: str, mode: str):
    expected = reference.chat(CASES[case])
    answer = service.chat(CASES[case], mode, **ASK)
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    assert answer["choices"][0]["message"]["content"] == expected.text
    for ours, theirs in zip(token_logprobs(answer), expected.logprobs, strict=True):
        for token, entry in theirs.items():
            assert ours[f"token_id:{token}"] == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize("mode", ["exact", "off", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_so_is_one_whose_first_token_the_prefill_worker_gives(service: Service, reference: Any, case: str, mode: str):
    """Log-probabilities, as asked for above, are the decode engine's."""
    expected = reference.chat(CASES[case])
    answer = service.chat(CASES[case], mode, return_token_ids=True)
    assert answer["orbit"]["first_token"] == "prefill"
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason


def test_a_first_auto_request_is_exact_too(service: Service, reference: Any):
    messages = user(picture(21), "then", picture(22), "Which came first?")
    answer = service.chat(messages, "auto", **ASK)
    assert [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]] == ["encoded", "encoded"]
    assert answer["choices"][0]["token_ids"] == list(reference.chat(messages).token_ids)


@pytest.mark.parametrize("case", ["text only", "three images", "multi-turn"])
def test_streaming_says_the_same(service: Service, case: str):
    whole = service.chat(CASES[case], "exact")
    events = service.stream(CASES[case], "exact")
    deltas = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert sum(bool(delta) for delta in deltas) > 3, "the answer must come in pieces"
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-1]["orbit"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_the_images_matter(service: Service):
    """Otherwise the comparisons above would show nothing."""
    answers = {service.chat(user(picture(n), "What is this?"), "exact")["choices"][0]["message"]["content"]
               for n in range(30, 34)}  # fmt: skip
    assert len(answers) > 1


def test_text_parts_keep_their_order(service: Service, reference: Any):
    messages = user(text("a"), picture(40), text("b"), text("c"), picture(41), text("d"))
    answer = service.chat(messages, "exact", **ASK)
    assert answer["choices"][0]["token_ids"] == list(reference.chat(messages).token_ids)
