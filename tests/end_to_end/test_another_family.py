"""Another attention through the whole service: Kimi-VL, whose layers keep a latent and a rotary key.

There is no vision encoder: prefill workers encode.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from client import MAX_MODEL_LEN, Service, picture, token_ids_alone, user
from ray import serve

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES
from serving.launch import APPLICATION

pytestmark = pytest.mark.service

KIMI = FAMILIES["kimi_vl"]
PAGES = user("Look: ", picture(1), " then ", picture(2), " what changed?")


@pytest.fixture
def kimi(only_service: Callable[..., Service]) -> Service:
    model = {
        "path": checkpoint_path(KIMI.checkpoint),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "trust_remote_code": True,
    }
    sections = {"patch": {"rank": None, "factors": "model"}, "vision": {"replicas": 0}}
    return only_service("kimi", "float32", model=model, **sections)


def points(answer: dict) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


def test_the_answer_is_that_of_one_engine_computed_and_linked(kimi: Service):
    expected = token_ids_alone("float32", KIMI.checkpoint, True, PAGES)
    first = kimi.chat(PAGES, return_token_ids=True)
    kimi.settle()
    again = kimi.chat(PAGES, return_token_ids=True)
    assert (points(first), points(again)) == (["encoded", "encoded"], ["patched", "patched"])
    assert first["choices"][0]["token_ids"] == expected
    assert again["choices"][0]["token_ids"] == expected
    encoded = [answer["orbit"]["vision_tokens_encoded"] for answer in (first, again)]
    assert encoded[0] > encoded[1] == 0
    assert first["orbit"]["stages_ms"]["vision"] > 0
    assert "VisionEncoder" not in serve.status().applications[APPLICATION].deployments
