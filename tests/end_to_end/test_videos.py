"""Videos over the whole service: exact as vLLM's, and segments that stay are linked when the window moves."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from client import Reference, Service, user
from video_support import video

pytestmark = pytest.mark.service


def part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"}}


CLIP = part(video())


def test_a_video_is_answered_as_vllm_answers_it_and_encoded_once(service: Service, reference: Reference):
    messages = user(CLIP, "What happens?")
    answers = []
    for _ in range(2):
        answers.append(service.chat(messages, "exact"))
        service.settle()
    said = reference.chat(messages).text
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [said, said]
    assert [answer["orbit"]["vision_tokens_encoded"] > 0 for answer in answers] == [True, False]
    assert all(answer["orbit"]["notices"] == [] for answer in answers)


def test_an_upload_is_the_same_clip_and_its_sound_is_left_out(service: Service):
    data = video(has_sound=True)
    uploaded = service.openai().files.create(file=("clip.mp4", data), purpose="vision")
    answers = []
    for shown in (part(data), {"type": "file", "file": {"file_id": uploaded.id}}):
        answers.append(service.chat(user(shown, "What happens?"))["orbit"])
        service.settle()
    assert [report["vision_tokens_encoded"] > 0 for report in answers] == [True, False]
    assert [report["notices"] for report in answers] == [
        ["sound is left out: of 1 videos, first messages[0].content[0]"]
    ] * 2


def test_prefill_workers_encode_clips_where_there_is_no_vision_encoder(couples: Service, reference: Reference):
    messages = user(CLIP, "What happens?")
    answer = couples.chat(messages, "exact")
    assert answer["choices"][0]["message"]["content"] == reference.chat(messages).text
    assert answer["orbit"]["vision_tokens_encoded"] > 0


def test_a_window_that_moves_encodes_what_is_new(service: Service):
    def asked(start: float, end: float) -> dict[str, Any]:
        window = {"segment_seconds": 4, "start_seconds": start, "end_seconds": end}
        answer = service.chat(user(CLIP, "What happens?"), orbit={"video": window})
        service.settle()
        return answer["orbit"]

    first, second, again = asked(0, 8), asked(4, 12), asked(4, 12)
    assert [len(report["chunks"]) for report in (first, second)] == [2, 2]
    assert second["vision_tokens_encoded"] == first["vision_tokens_encoded"] / 2, "one of two segments is new"
    assert again["vision_tokens_encoded"] == 0
    assert {chunk["operating_point"] for chunk in again["chunks"]} == {"patched"}


def test_what_is_no_video_is_refused_by_its_place(service: Service):
    refused = service.post(service.body(user(part(b"no video"), "?")))
    assert refused.status_code == 400
    assert "messages[0].content[0]" in refused.json()["error"]["message"]
