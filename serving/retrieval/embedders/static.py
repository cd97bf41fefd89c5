"""Text by a table of token vectors: their mean, in a tenth of a millisecond.

The table is WordLlama's (MIT; 32,000 tokens x 256, from the token embeddings of large language models), read from its
wheel without running any of its code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from blake3 import blake3
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kvstore.search.grown import Array
from serving.retrieval.embedders.base import EmbedderFailed, Item, Modality, unit

_TABLE = Path("weights", "l2_supercat_256.safetensors")
_TOKENIZER = Path("tokenizers", "l2_supercat_tokenizer_config.json")
_LONGEST = 4096  # tokens of a text that count


class StaticEmbedder:
    """Embedder by a table. Thread-safe.

    Raises:
        EmbedderFailed: the package with the table is not there.
    """

    modalities: frozenset[Modality] = frozenset({"text"})

    def __init__(self) -> None:
        spec = find_spec("wordllama")
        if spec is None or not spec.submodule_search_locations:
            raise EmbedderFailed("the embedder `static` needs the package wordllama, which is not installed")
        folder = Path(spec.submodule_search_locations[0])
        try:
            (table,) = load_file(folder / _TABLE).values()
            self._tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
            digest = blake3((folder / _TABLE).read_bytes() + (folder / _TOKENIZER).read_bytes())
        except (OSError, ValueError) as error:
            raise EmbedderFailed(f"the table of wordllama cannot be read: {error}") from error
        self._tokenizer.enable_truncation(_LONGEST)
        self._tokenizer.no_padding()
        self._table = table.astype(np.float32)
        self.dims = int(table.shape[1])
        self.fingerprint = f"static-{digest.hexdigest()[:16]}"

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        return await self.embed_documents(items)

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        return await asyncio.to_thread(self._embed, [item.text for item in items])

    def _embed(self, texts: Sequence[str]) -> list[Array]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        means = [self._table[one.ids].mean(axis=0, keepdims=True) if one.ids else self._table[:0] for one in encoded]
        return [unit(mean) for mean in means]
