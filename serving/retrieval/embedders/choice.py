"""The embedder that a configuration names."""

from __future__ import annotations

from serving.retrieval.embedders.base import Embedder
from serving.retrieval.embedders.http import HttpEmbedder
from serving.retrieval.embedders.lexical import LexicalEmbedder
from serving.retrieval.embedders.static import StaticEmbedder
from serving.retrieval.settings import RetrieverSettings

_HTTP = "http:"


async def open_embedder(settings: RetrieverSettings) -> Embedder:
    """The embedder of these settings, ready. Raises EmbedderFailed."""
    if settings.embedder == "lexical":
        return LexicalEmbedder()
    if settings.embedder == "static":
        return StaticEmbedder()
    return await HttpEmbedder.connect(
        settings.embedder.removeprefix(_HTTP),
        settings.embedder_model,
        key=settings.embedder_key.get_secret_value(),
        prompts=(settings.query_prompt, settings.document_prompt),
        has_images=settings.embedder_images,
    )
