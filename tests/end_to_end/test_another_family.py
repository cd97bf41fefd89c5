"""Another attention through the whole service: Kimi-VL, whose layers keep a latent and a rotary key.

There is no vision encoder: prefill workers encode. How its patches answer: `test_fidelity_over_http`.
"""

from __future__ import annotations

import pytest
from client import LATENT, Service, picture, token_ids_alone, user
from ray import serve

from infra.reference import weights
from serving.deploy.launch import APPLICATION

# Slow: without HTTP, `tests/integration/test_hand_off.py` shows it each time.
pytestmark = [pytest.mark.service, pytest.mark.slow]

PAGES = user("Look: ", picture(1), " then ", picture(2), " what changed?")


def points(answer: dict) -> list[str]:
    return [chunk["operating_point"] for chunk in answer["orbit"]["chunks"]]


def test_the_answer_is_that_of_one_engine_whether_pages_are_new_or_known(latent: Service):
    expected = token_ids_alone("float32", weights(LATENT), True, PAGES)
    first = latent.chat(PAGES, return_token_ids=True)
    latent.settle()
    again = latent.chat(PAGES, mode="exact", return_token_ids=True)
    linked = latent.chat(PAGES)
    assert [*map(points, (first, again, linked))] == [["encoded"] * 2, ["recomputed"] * 2, ["patched"] * 2]
    assert first["choices"][0]["token_ids"] == expected
    assert again["choices"][0]["token_ids"] == expected
    encoded = [answer["orbit"]["vision_tokens_encoded"] for answer in (first, again, linked)]
    assert encoded[0] > encoded[1] == encoded[2] == 0
    assert first["orbit"]["stages_ms"]["vision"] > 0
    assert "VisionEncoder" not in serve.status().applications[APPLICATION].deployments
