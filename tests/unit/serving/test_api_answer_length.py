"""How long an answer may become where the request does not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from serving.api.chat import OrbitServingChat


@pytest.mark.parametrize(
    ("checkpoint", "setting", "expected"),
    [({}, 40, 40), ({}, None, None), ({"max_tokens": 128}, 40, 128), ({"max_tokens": 128}, None, 128)],
    ids=["as configured", "whatever the prompt leaves", "as the checkpoint says", "so without a setting"],
)
def test_a_checkpoint_that_says_how_long_goes_before_the_setting(
    monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, int], setting: int | None, expected: int | None
):
    def begin(chat: Any) -> None:
        chat.default_sampling_params = dict(checkpoint)
        tokenizer = SimpleNamespace(max_chars_per_token=4)
        chat.renderer = SimpleNamespace(get_tokenizer=lambda: tokenizer, _executor=None)
        chat.model_config = SimpleNamespace(max_model_len=100)

    monkeypatch.setattr(OpenAIServingChat, "__init__", begin)
    none: Any = SimpleNamespace()
    chat = OrbitServingChat(media=none, documents=none, retrieval=none, default_max_tokens=setting)
    assert chat.default_sampling_params.get("max_tokens") == expected
