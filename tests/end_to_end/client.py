"""What the end-to-end tests say to the service, and what they compare it with."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from openai import OpenAI
from PIL import Image
from ray import serve
from rich.console import Console
from vllm import LLM, SamplingParams

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES
from infra.ports import free_port
from infra.reference import weights
from infra.vllm_arguments import cpu_engine_arguments
from serving.bench.fidelity.storage import forms
from serving.bench.fidelity.tables import STORED_RANK
from serving.config import OrbitServeConfig
from serving.deploy.launch import APPLICATION, application

CHECKPOINT = "qwen2_5_vl-tiny"
MAX_MODEL_LEN = 2048
RANK = 16  # of the patches of the bundled model
LATENT = "kimi_vl"  # another family's reference model, and the form of its patches: 8 bits too, but alike in all layers
EQUAL_RANK = forms(STORED_RANK)["int8"]
MAX_IMAGE_PIXELS = 1_000_000
MAX_IMAGE_BYTES = 6 << 20
MAX_BODY_BYTES = 12 << 20
ORIGIN = "https://pages.example"  # whose pages may call
LIMITS = {
    "max_image_pixels": MAX_IMAGE_PIXELS,
    "max_image_bytes": MAX_IMAGE_BYTES,
    "cors_origins": [ORIGIN],
    "max_body_bytes": MAX_BODY_BYTES,
    "max_images_per_request": 8,
}


def model(family: str) -> dict[str, Any]:
    """A configuration's `model` for a reference model."""
    path, own_code = weights(family), FAMILIES[family].trust_remote_code
    return {"path": path, "dtype": "float32", "max_model_len": MAX_MODEL_LEN, "trust_remote_code": own_code}


def png(number: int, width: int = 168, height: int = 224) -> bytes:
    """A noisy picture; the same number gives the same bytes."""
    pixels = (np.random.default_rng(number).random((height, width, 3)) * 255).astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def inline(data: bytes) -> dict[str, Any]:
    """An image part with the image in it."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def picture(number: int, **size: int) -> dict[str, Any]:
    return inline(png(number, **size))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    """One user turn."""
    return [{"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}]


class Holdings(NamedTuple):
    """Files below the service's folder, leases, and KV blocks in use."""

    stored: frozenset[str]
    leases: int
    blocks: int


@dataclass
class Service:
    """A running application."""

    url: str
    model: str
    root: Path  # of the library and the uploaded files
    logs: Path  # of the access logs

    def body(self, messages: list[dict[str, Any]], mode: str | None = None, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        return body if mode is None else {**body, "orbit": {"mode": mode}}

    def chat(self, messages: list[dict[str, Any]], mode: str | None = None, **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed."""
        response = self.post(self.body(messages, mode, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300, **options)

    def stream(self, messages: list[dict[str, Any]], mode: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """The events of a streamed chat completion."""
        body = self.body(messages, mode, stream=True, stream_options={"include_usage": True}, **fields)
        with httpx.stream("POST", self.url + "/v1/chat/completions", json=body, timeout=300) as response:
            assert response.status_code == 200, response.read()
            lines = [line[len("data: ") :] for line in response.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def openai(self, key: str = "none") -> OpenAI:
        """The official client, unchanged."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=300, max_retries=0)

    def role(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a role's replica directly."""
        return getattr(serve.get_deployment_handle(name, APPLICATION), method).remote(*arguments).result(timeout_s=300)

    def everywhere(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Call every replica of a role directly."""
        called = serve.get_deployment_handle(name, APPLICATION).broadcast(method, *arguments)
        return list(called.results(timeout_s=300))

    def settle(self) -> None:
        """Wait until everything learnt so far, by any replica, is stored."""
        self.everywhere("PrefillWorker", "flush")
        self.everywhere("PatchCompiler", "flush")

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Blocks come free a moment after an answer has ended: NIXL tells the prefill worker."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.05)

    def holdings(self) -> Holdings:
        """What is stored and held at the moment."""
        self.settle()
        loop = self.role("PrefillWorker", "stats")["loop"]
        stored = frozenset(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        return Holdings(stored, loop.leases, loop.blocks_total - loop.blocks_free)

    def wait_until_nothing_is_left_since(self, before: Holdings) -> None:
        """Wait until no more is held than before. Less may be: what earlier tests left expires meanwhile."""

        def nothing_left() -> bool:
            now = self.holdings()
            return now.stored <= before.stored and now.leases <= before.leases and now.blocks <= before.blocks

        self.wait_until(nothing_left)


@contextmanager
def running(dtype: str, root: Path, **sections: Any) -> Iterator[Service]:
    """Start the whole application on the tiny model and take it down again.

    Nothing is checked unless a test asks for it: on random weights the text around a chunk, which patches do not know,
    moves the answer by more than the default bound. Nor does a prompt begin with an earlier one's blocks: most tests
    ask the same again to see how chunks are linked. Two processes fewer start: no retriever, no planner.
    """
    logs = root.with_name(f"{root.name}-logs")
    config = OrbitServeConfig.model_validate(
        {
            "access_log": {"directory": logs},
            "model": {"path": checkpoint_path(CHECKPOINT), "dtype": dtype, "max_model_len": MAX_MODEL_LEN},
            "files_url": str(root / "files"),
            "retriever": {"replicas": 0},
            "autoscale": {"mode": "off"},
            **sections,
            "library": {"directory": root / "library", **sections.get("library", {})},
            "prefill": {"fidelity": {"share": 0}, "prefix_cache": False, **sections.get("prefill", {})},
            "http": {**LIMITS, **sections.get("http", {}), "port": free_port()},
        }
    )
    with application(config, Console(quiet=True)) as url:
        yield Service(url, config.model.served_name, root, logs)


class Reference:
    """vLLM by itself: the model's vision tower and language model in one engine, nothing reused."""

    def __init__(self, dtype: str, model: Path | None = None, trust_remote_code: bool = False) -> None:
        self._llm = LLM(
            model=str(model or checkpoint_path(CHECKPOINT)),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 8},
            **cpu_engine_arguments(),
        )

    def chat(self, messages: list[dict[str, Any]], max_tokens: int = 12, top: int = 5) -> Any:
        """The greedy answer: `token_ids`, `text`, and `logprobs`, one {token id: Logprob} per token."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=top)
        (answer,) = self._llm.chat(messages, params, use_tqdm=False, chat_template_content_format="openai")
        return answer.outputs[0]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def token_ids_alone(dtype: str, model: Path, trust_remote_code: bool, messages: list[dict[str, Any]]) -> list[int]:
    """What vLLM by itself answers, in a process of its own: beside a dense engine one of experts does not start."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_token_ids, dtype, model, trust_remote_code, messages).result()


def _token_ids(dtype: str, model: Path, trust_remote_code: bool, messages: list[dict[str, Any]]) -> list[int]:
    engine = Reference(dtype, model, trust_remote_code)
    try:
        return list(engine.chat(messages).token_ids)
    finally:
        engine.close()
