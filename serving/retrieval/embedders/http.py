"""Embedders of other servers: OpenAI's `/v1/embeddings`, and vLLM's with images.

Texts go as OpenAI takes them, in batches. An image goes as vLLM's chat form of the same route takes it, one a call.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from blake3 import blake3

from kvstore.search.grown import Array
from kvstore.tiers.base import Tier
from serving.retrieval.embedders.base import EmbedderFailed, InputRefused, Item, Modality, unit

logger = logging.getLogger(__name__)
_BATCH = 64  # texts of a call
_AT_ONCE = 4  # calls
_REFUSED = (400, 413, 422)  # statuses of an input that is too long, too large, or not readable
_LONGEST_ERROR = 200  # characters of a server's answer that are told


class HttpEmbedder:
    """Embedder behind a URL, such as `http://embedder:8000/v1`. Open it with `connect`.

    Args:
        dims: of its vectors.
        has_images: whether it embeds images.
    """

    def __init__(
        self,
        url: str,
        model: str,
        client: httpx.AsyncClient,
        dims: int,
        prompts: tuple[str, str] = ("", ""),
        has_images: bool = False,
    ) -> None:
        self._url, self._model, self._client = url.rstrip("/"), model, client
        self._query_prompt, self._document_prompt = prompts
        self.dims = dims
        self.modalities: frozenset[Modality] = frozenset({"text", "image"} if has_images else {"text"})
        told = "\0".join([self._url, model, *prompts, str(dims)])
        self.fingerprint = f"http-{blake3(told.encode()).hexdigest()[:16]}"
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    async def connect(
        cls,
        url: str,
        model: str,
        *,
        key: str = "",
        prompts: tuple[str, str] = ("", ""),
        has_images: bool = False,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
        noted: Tier | None = None,
    ) -> HttpEmbedder:
        """Embedder whose dimensions its server tells, or has told before.

        Args:
            prompts: what stands before queries, and before documents.
            noted: where dimensions are noted for a start at which the server does not answer.

        Raises:
            EmbedderFailed: it does not answer, and never has.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.AsyncClient(headers=headers, timeout=timeout_s, trust_env=False, transport=transport)
        probe = cls(url, model, client, 0, prompts, has_images)
        key_of_dims = f"embedders/{probe.fingerprint}"
        try:
            (vector,) = await probe._embed([Item("size")], "")
        except EmbedderFailed as failure:
            known = None if noted is None else await asyncio.to_thread(noted.get, key_of_dims)
            if known is None:
                raise
            logger.warning("searching by words alone until it answers: %s", failure)
            dims = int(memoryview(known).tobytes())
        else:
            dims = vector.shape[1]
            if noted is not None:
                await asyncio.to_thread(noted.put, key_of_dims, [pa.py_buffer(str(dims).encode())])
        return cls(url, model, client, dims, prompts, has_images)

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        return await self._embed(items, self._query_prompt)

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        return await self._embed(items, self._document_prompt)

    async def _embed(self, items: Sequence[Item], prompt: str) -> list[Array]:
        with_image = "image" in self.modalities
        pictures = [i for i, item in enumerate(items) if with_image and item.image is not None]
        texts = [i for i, item in enumerate(items) if i not in set(pictures) and item.text.strip()]
        batches = [texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH)]
        calls = [self._ask({"input": [prompt + items[i].text for i in batch]}, len(batch)) for batch in batches]
        calls += [self._ask({"messages": _message(items[i], prompt)}, 1) for i in pictures]
        answers = await asyncio.gather(*calls)
        found = [np.zeros((0, self.dims), np.float32) for _ in items]
        for places, vectors in zip([*batches, *([i] for i in pictures)], answers, strict=True):
            for i, vector in zip(places, vectors, strict=True):
                found[i] = vector
        return found

    async def _ask(self, body: dict[str, Any], count: int) -> list[Array]:
        asked = {"model": self._model, "encoding_format": "float", **body}
        try:
            async with self._at_once:
                response = await self._client.post(f"{self._url}/embeddings", json=asked)
        except httpx.HTTPError as error:
            raise EmbedderFailed(
                f"the embedder at {self._url} does not answer: {error or type(error).__name__}"
            ) from error
        if response.status_code != httpx.codes.OK:
            failure = InputRefused if response.status_code in _REFUSED else EmbedderFailed
            raise failure(
                f"the embedder at {self._url} answered {response.status_code}: {response.text[:_LONGEST_ERROR]}"
            )
        try:
            listed = sorted(response.json()["data"], key=lambda one: one["index"])
            vectors = [unit(np.array(one["embedding"], np.float32).reshape(1, -1)) for one in listed]
        except (KeyError, TypeError, ValueError) as error:
            raise EmbedderFailed(f"the embedder at {self._url} answered something else than embeddings") from error
        sizes = {vector.shape[1] for vector in vectors}
        if len(vectors) != count or (self.dims and sizes != {self.dims}):
            raise EmbedderFailed(
                f"the embedder at {self._url} gave {len(vectors)} vectors of {sorted(sizes)} numbers for "
                f"{count} inputs; they should have {self.dims}"
            )
        return vectors


def _message(item: Item, prompt: str) -> list[dict[str, Any]]:
    """An image, with its text, as a chat message."""
    assert item.image is not None
    kind = "png" if item.image.startswith(b"\x89PNG") else "jpeg"
    url = f"data:image/{kind};base64,{base64.b64encode(item.image).decode()}"
    text = [{"type": "text", "text": prompt + item.text}] if prompt or item.text else []
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, *text]}]
