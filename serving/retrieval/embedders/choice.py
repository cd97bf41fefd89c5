"""The embedder that a configuration names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore.tiers.base import Tier
from serving.config import OrbitServeConfig
from serving.retrieval.embedders.base import Embedder
from serving.retrieval.embedders.http import HttpEmbedder
from serving.retrieval.embedders.lexical import LexicalEmbedder
from serving.retrieval.embedders.static import StaticEmbedder

_HTTP, _PATH = "http:", "path:"


async def open_embedder(config: OrbitServeConfig, noted: Tier | None = None) -> Embedder:
    """The embedder of a deployment, ready. Raises EmbedderFailed.

    `noted`: see `HttpEmbedder.connect`.
    """
    settings = config.retriever
    if settings.embedder == "lexical":
        return LexicalEmbedder()
    if settings.embedder == "static":
        return StaticEmbedder()
    if settings.has_model:
        from serving.retrieval.embedders.model import ModelEmbedder

        return await asyncio.to_thread(ModelEmbedder.of, config)
    prompts = (settings.query_prompt, settings.document_prompt)
    if settings.embedder.startswith(_PATH):
        from serving.retrieval.embedders.path import PathEmbedder

        return await asyncio.to_thread(PathEmbedder, Path(settings.embedder.removeprefix(_PATH)), prompts)
    return await HttpEmbedder.connect(
        settings.embedder.removeprefix(_HTTP),
        settings.embedder_model,
        key=settings.embedder_key.get_secret_value(),
        prompts=prompts,
        has_images=settings.embedder_images,
        noted=noted,
    )
