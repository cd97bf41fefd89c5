"""The contract of embedders.

| embedder   | module  | what it embeds                         | needs                         |
|------------|---------|----------------------------------------|-------------------------------|
| `lexical`  | lexical | nothing: words alone                   |                               |
| `static`   | static  | text, by a table of tokens             | a wheel with 16 MB of it      |
| `model`    | model   | images; words, where its tower does so | the served model's tower      |
| `path:DIR` | path    | text; images by CLIP and SigLIP        | a model in a directory        |
| `http:URL` | http    | text; images, where it can             | a server for `/v1/embeddings` |

Queries and documents are separate calls, because models want other prompts before them. A result is always a list of
[m, dims] arrays, fp32, one per item: m is 1 for single vectors, more for late interaction, 0 where nothing can be made
of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvstore.search.grown import Array

Modality = Literal["text", "image"]


class EmbedderFailed(RuntimeError):
    """An embedder did not answer, or not as it should."""


class InputRefused(EmbedderFailed):
    """An embedder refuses what it is to embed; asking again changes nothing."""


@dataclass(frozen=True)
class Item:
    """Input of an embedder: a text, an image (the bytes of its file), or both."""

    text: str = ""
    image: bytes | None = None


class Embedder(Protocol):
    """The contract of an embedder.

    Attributes:
        fingerprint: of model and settings; vectors of different ones are never compared.
        dims: numbers of a vector; 0: it makes none.
        modalities: what it can embed.
    """

    fingerprint: str
    dims: int
    modalities: frozenset[Modality]

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        """Vectors of questions. Raises EmbedderFailed."""

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        """Vectors of parts of documents. Raises EmbedderFailed, InputRefused."""


def unit(vectors: Array) -> Array:
    """Vectors [..., dims] of length 1, fp32; those of length 0 stay."""
    whole = vectors.astype(np.float32)
    lengths = np.linalg.norm(whole, axis=-1, keepdims=True)
    scaled: Array = whole / np.where(lengths > 0, lengths, 1.0)
    return scaled
