"""One fp32 service for all end-to-end tests, and one multimodal vLLM engine to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from client import CHECKPOINT, MAX_MODEL_LEN, Service, running
from vllm import LLM, SamplingParams

from infra.checkpoints import checkpoint_path


class Reference:
    """vLLM by itself: the model's vision tower and language model in one engine, nothing reused."""

    def __init__(self, dtype: str) -> None:
        self._llm = LLM(
            model=str(checkpoint_path(CHECKPOINT)),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 8},
        )

    def chat(self, messages: list[dict[str, Any]], max_tokens: int = 12, top: int = 5) -> Any:
        """The greedy answer: `token_ids`, `text`, and `logprobs`, one {token id: Logprob} per token."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=top)
        (answer,) = self._llm.chat(messages, params, use_tqdm=False, chat_template_content_format="openai")
        return answer.outputs[0]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    engine = Reference("float32")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def service(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running("float32", tmp_path_factory.mktemp("service")) as started:
        yield started
