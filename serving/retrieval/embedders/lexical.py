"""No vectors: parts are found by their words alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.search.grown import Array
from serving.retrieval.embedders.base import Item, Modality


class LexicalEmbedder:
    """Embedder that embeds nothing."""

    fingerprint = "lexical"
    dims = 0
    modalities: frozenset[Modality] = frozenset()

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        return await self.embed_documents(items)

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        return [np.zeros((0, 0), np.float32) for _ in items]
