"""Models in a directory, read by transformers: sentence-transformers, CLIP and SigLIP.

| layout                | told by              | a text is                     | an image is          |
|-----------------------|----------------------|-------------------------------|----------------------|
| sentence-transformers | `modules.json`       | the mean, or the first, token | not embedded         |
| CLIP, SigLIP          | `get_image_features` | `get_text_features`           | `get_image_features` |

Other modules of sentence-transformers (dense layers, several pools) are refused rather than left out.
"""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from PIL import Image
from torch import Tensor

from kvstore.search.grown import Array
from serving.retrieval.embedders.base import EmbedderFailed, Item, Modality, unit

_AT_ONCE = 16  # items of a forward
_POOLS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class PathEmbedder:
    """Embedder by a model in a directory, on the CPU in fp32. Thread-safe.

    Args:
        prompts: before queries and before documents; "" leaves them to the directory.

    Raises:
        EmbedderFailed: the directory has no model of a known layout.
    """

    def __init__(self, folder: Path, prompts: tuple[str, str] = ("", "")) -> None:
        from transformers import AutoModel, AutoProcessor, AutoTokenizer

        if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
            raise EmbedderFailed(f"the embedder's directory {folder} has neither a config.json nor a modules.json")
        self._pool, self._prompts, root = "", prompts, folder
        if (folder / "modules.json").is_file():
            root, self._pool = _sentence_layout(folder)
            self._prompts = _prompts(folder, prompts)
        try:
            self._model: Any = AutoModel.from_pretrained(root, dtype=torch.float32, local_files_only=True).eval()
            has_images = hasattr(self._model, "get_image_features") and not self._pool
            reader = AutoProcessor if has_images else AutoTokenizer
            self._reader: Any = reader.from_pretrained(root, local_files_only=True)
        except (OSError, ValueError) as error:
            raise EmbedderFailed(f"the embedder in {folder} cannot be read: {error}") from error
        if not has_images and not self._pool:
            raise EmbedderFailed(f"{folder}: neither sentence-transformers' layout nor a model of text and images")
        self.modalities: frozenset[Modality] = frozenset({"text", "image"} if has_images else {"text"})
        self._longest = _longest(self._model.config, self._reader)
        self._turn = threading.Lock()  # one forward at a time: further ones would only share its cores
        self.fingerprint = f"path-{_digest(folder, self._prompts)}"
        self.dims = len(self._texts(["a"])[0])

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        return await asyncio.to_thread(self._embed, items, self._prompts[0])

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        return await asyncio.to_thread(self._embed, items, self._prompts[1])

    def _embed(self, items: Sequence[Item], prompt: str) -> list[Array]:
        """Vectors of images where there are some, else of texts."""
        found: list[Array] = [np.zeros((0, self.dims), np.float32) for _ in items]
        pictures = [i for i, item in enumerate(items) if item.image is not None and "image" in self.modalities]
        texts = [i for i, item in enumerate(items) if i not in set(pictures) and item.text.strip()]
        for first in range(0, len(pictures), _AT_ONCE):
            some = pictures[first : first + _AT_ONCE]
            for i, vector in zip(some, self._images([items[i].image or b"" for i in some]), strict=True):
                found[i] = unit(vector[None])
        texts.sort(key=lambda i: len(items[i].text))  # texts of a forward are padded to the longest
        for first in range(0, len(texts), _AT_ONCE):
            some = texts[first : first + _AT_ONCE]
            for i, vector in zip(some, self._texts([prompt + items[i].text for i in some]), strict=True):
                found[i] = unit(vector[None])
        return found

    @torch.inference_mode()
    def _texts(self, texts: Sequence[str]) -> Array:
        """[n, dims]"""
        # SigLIP was trained on texts of one length, padded.
        padding: Any = "max_length" if self._model.config.model_type.startswith("siglip") else True
        tokenizer = getattr(self._reader, "tokenizer", self._reader)
        inputs = tokenizer(list(texts), padding=padding, truncation=True, max_length=self._longest, return_tensors="pt")
        with self._turn:
            if not self._pool:
                return _tensor(self._model.get_text_features(**inputs)).numpy()
            states = self._model(**inputs).last_hidden_state  # [n, tokens, dims]
        if self._pool == "first":
            return states[:, 0].numpy()
        mask = inputs["attention_mask"][..., None].to(states.dtype)
        pooled: Tensor = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return pooled.numpy()

    @torch.inference_mode()
    def _images(self, files: Sequence[bytes]) -> Array:
        """[n, dims]. Raises EmbedderFailed."""
        try:
            pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        except (OSError, ValueError) as error:
            raise EmbedderFailed(f"an image cannot be read: {error}") from error
        inputs = self._reader.image_processor(images=pictures, return_tensors="pt")
        with self._turn:
            return _tensor(self._model.get_image_features(**inputs)).numpy()


def _tensor(output: Any) -> Tensor:
    """Features, which transformers 5 wraps in an output."""
    found: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return found


def _sentence_layout(folder: Path) -> tuple[Path, str]:
    """The transformer's folder, and how its tokens are pooled. Raises EmbedderFailed."""
    modules = json.loads((folder / "modules.json").read_text())
    paths = {module["type"].rpartition(".")[2]: folder / module["path"] for module in modules}
    if others := paths.keys() - set(_MODULES):
        raise EmbedderFailed(f"{folder}: modules {', '.join(sorted(others))} are not supported")
    if "Transformer" not in paths or "Pooling" not in paths:
        raise EmbedderFailed(f"{folder}: modules.json names no transformer with pooling")
    pooling = json.loads((paths["Pooling"] / "config.json").read_text())
    pools = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
    if len(pools) != 1 or pools[0] not in _POOLS:
        raise EmbedderFailed(f"{folder}: pooling by {', '.join(pools) or 'nothing'} is not supported")
    return paths["Transformer"], _POOLS[pools[0]]


def _prompts(folder: Path, given: tuple[str, str]) -> tuple[str, str]:
    """Prompts before queries and documents, as given or else as the directory names them."""
    path = folder / "config_sentence_transformers.json"
    named = json.loads(path.read_text()).get("prompts") or {} if path.is_file() else {}
    document = named.get("document") or named.get("passage") or ""
    return given[0] or named.get("query") or "", given[1] or document


def _longest(config: Any, reader: Any) -> int:
    """Most tokens of a text."""
    text = getattr(config, "text_config", config)
    tokenizer = getattr(reader, "tokenizer", reader)
    return int(min(getattr(text, "max_position_embeddings", 512), tokenizer.model_max_length))


def _digest(folder: Path, prompts: tuple[str, str]) -> str:
    """Digest of all that decides vectors."""
    digest = blake3(json.dumps(prompts).encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors", ".bin", ".txt")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update_mmap(path)
    return digest.hexdigest()[:16]
