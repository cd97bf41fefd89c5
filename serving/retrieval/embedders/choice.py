"""The embedder that a configuration names."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serving.retrieval.embedders.base import Embedder
from serving.retrieval.embedders.http import HttpEmbedder
from serving.retrieval.embedders.lexical import LexicalEmbedder
from serving.retrieval.embedders.static import StaticEmbedder
from serving.retrieval.settings import RetrieverSettings

_HTTP, _PATH = "http:", "path:"


async def open_embedder(settings: RetrieverSettings) -> Embedder:
    """The embedder of these settings, ready. Raises EmbedderFailed."""
    if settings.embedder == "lexical":
        return LexicalEmbedder()
    if settings.embedder == "static":
        return StaticEmbedder()
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
    )
