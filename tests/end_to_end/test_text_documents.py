"""Text files as chunks, through the whole service."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from client import Service, picture, text, user

pytestmark = pytest.mark.service

PAGES = [f"Chapter {number}. " + " ".join(f"word{number * 37 + i}" for i in range(20)) for number in range(6)]


def document(number: int) -> dict[str, Any]:
    return written(PAGES[number])


def written(words: str) -> dict[str, Any]:
    encoded = base64.b64encode(words.encode()).decode()
    return {"type": "file", "file": {"filename": "page.txt", "file_data": f"data:text/plain;base64,{encoded}"}}


def points(answer: dict[str, Any]) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


ASK = {"return_token_ids": True}


@pytest.mark.parametrize(("mode", "number"), [("exact", 3), ("off", 4), ("auto", 5)])
def test_a_document_computed_in_context_is_the_same_text_written_out(
    service: Service, reference: Any, mode: str, number: int
):
    answer = service.chat(user("Read: ", document(number), " Well?"), mode, **ASK)
    expected = reference.chat(user("Read: ", text(PAGES[number]), " Well?"))
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    assert points(answer) == ["recomputed"]


def test_a_document_is_linked_the_second_time_at_another_place(service: Service):
    service.chat(user(document(1), document(2), "Compare."))
    service.settle()
    again = service.chat(user("Once more, behind other words: ", document(1), " and ", document(2), " compare."))
    assert points(again) == ["patched", "patched"]
    orbit = again["orbit"]
    assert orbit["tokens_reused"] == orbit["prefix_tokens_reused"] + sum(chunk["tokens"] for chunk in orbit["chunks"])


def test_documents_and_images_stand_in_one_prompt(service: Service, reference: Any):
    messages = user("First ", document(1), " then ", picture(71), " and ", document(2), " what follows?")
    as_text = user("First ", text(PAGES[1]), " then ", picture(71), " and ", text(PAGES[2]), " what follows?")
    answer = service.chat(messages, "exact", **ASK)
    assert answer["choices"][0]["token_ids"] == list(reference.chat(as_text).token_ids)
    assert len(points(answer)) == 3


def test_a_document_may_spell_what_stands_for_images_and_ends_turns(service: Service):
    """It would stand where the image should, or overlap it, which ends the worker that reuses both."""
    spelt = "<|vision_end|><|image_pad|><|im_end|>"
    messages = user(written(spelt), picture(81), " then ", written("<|vision_end|>"), document(4), "Well?")
    for mode in ("auto", "auto", "full-reuse", "exact"):
        answer = service.chat(messages, mode)
        first, _, *others = [chunk["tokens"] for chunk in answer["orbit"]["chunks"]]
        assert [first, *others] == [len(spelt), len("<|vision_end|>"), len(PAGES[4])]
        service.settle()
    assert service.chat(messages)["orbit"]["tokens_reused"] > 0


def test_an_uploaded_text_file_is_a_document(service: Service):
    file = service.openai().files.create(file=("notes.md", PAGES[0].encode()), purpose="user_data")
    answer = service.chat(user({"type": "file", "file": {"file_id": file.id}}, "Well?"))
    assert answer["orbit"]["chunks"][0]["tokens"] == len(PAGES[0])  # the tokenizer has a token for every byte


def test_what_is_neither_text_nor_image_is_refused(service: Service):
    part = {
        "type": "file",
        "file": {"file_data": "data:application/pdf;base64," + base64.b64encode(b"%PDF\0\xff").decode()},
    }
    response = service.post(service.body(user(part, "Well?")))
    assert response.status_code == 400
    assert "nor a text file" in response.json()["error"]["message"]
