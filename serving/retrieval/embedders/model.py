"""The served model itself: images by its vision tower, words by its own embeddings of them.

| item             | a tower that writes words (`aligned_words`)       | any other tower                    |
|------------------|---------------------------------------------------|------------------------------------|
| image            | what the tower makes of it, a vector a token      | the mean of that: image to image   |
| text of a query  | the embeddings of its tokens, each once           | nothing: words are searched by BM25 |
| text of a file   | nothing                                           | nothing                            |

`aligned_words` stands in the model card. Of such a model the tokens of a page lie beside the embeddings of the words
for what is drawn there, so that by late interaction (MaxSim) a question finds the page that shows what it names; words
for nothing that is drawn are about as far from every page. Of ordinary checkpoints layer 0 tells nothing of the kind:
there a model that was trained to retrieve does (`path:`, `http:`).
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt

from kvstore.search.grown import Array
from prefill_workers.engine.fingerprint import fingerprint
from prefill_workers.engine.image_batches import Pixels
from prefill_workers.engine.vision_encoder import VisionEncoder
from prefill_workers.model_card import measured
from serving.config import OrbitServeConfig
from serving.engine_spec import front_end_config, vision_spec
from serving.frontend.prompt_segments import Delimiters
from serving.retrieval.embedders.base import EmbedderFailed, Item, Modality, unit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AT_ONCE = 8  # images that are processed before the tower sees them
_MOST_WORDS = 64  # different tokens of a query that count
_SAMPLE = (56, 56)  # pixels

Encode = Callable[[Sequence[Pixels]], Sequence[Tensor]]  # processed images to [tokens, hidden or more] each


class ModelEmbedder:
    """Embedder by the served model. Thread-safe.

    Args:
        front_end: of a process that renders this model's prompts.
        encode: the vision tower; one call at a time.
        words: embeddings of tokens [vocabulary, hidden]; None: the tower does not write words.
        name: of model and weights.

    Raises:
        EmbedderFailed: the model takes no images.
    """

    def __init__(self, front_end: VllmConfig, encode: Encode, words: Array | None, name: str) -> None:
        self._renderer: BaseRenderer = renderer_from_config(front_end)
        self._tokenizer: Any = self._renderer.get_tokenizer()
        written = dict(Delimiters.of(front_end.model_config, self._tokenizer).written)
        if "image" not in written:
            raise EmbedderFailed("the embedder `model` needs a served model that takes images")
        self._image, self._encode, self._words = list(written["image"]), encode, words
        self._turn = threading.Lock()
        self.dims = int(front_end.model_config.get_hidden_size())
        self.modalities: frozenset[Modality] = frozenset({"image"} if words is None else {"image", "text"})
        self.fingerprint = f"model-{name[:16]}-{'mean' if words is None else 'tokens'}"
        self._seen([Image.new("RGB", _SAMPLE)])

    @classmethod
    def of(cls, config: OrbitServeConfig) -> ModelEmbedder:
        """The embedder of a deployment's model, with a vision tower of its own.

        Raises:
            EmbedderFailed: the model takes no images; its card says that its tower writes words, and the embeddings of
                these cannot be found.
        """
        model = config.model
        if model.is_text_only:
            raise EmbedderFailed("the embedder `model` needs a served model that takes images")
        card = measured(model.path)
        words = word_embeddings(model.path) if card is not None and card.aligned_words else None
        encoder = VisionEncoder(vision_spec(config))
        return cls(front_end_config(model, 0.0), encoder.encode, words, fingerprint(model.path, model.load_format))

    async def embed_queries(self, items: Sequence[Item]) -> list[Array]:
        return await asyncio.to_thread(self._embed, items, with_words=True)

    async def embed_documents(self, items: Sequence[Item]) -> list[Array]:
        return await asyncio.to_thread(self._embed, items, with_words=False)

    def _embed(self, items: Sequence[Item], with_words: bool) -> list[Array]:
        found: list[Array] = [np.zeros((0, self.dims), np.float32) for _ in items]
        pictures = [i for i, item in enumerate(items) if item.image is not None]
        for first in range(0, len(pictures), _AT_ONCE):
            some = pictures[first : first + _AT_ONCE]
            for i, tokens in zip(some, self._seen([_opened(items[i].image or b"") for i in some]), strict=True):
                found[i] = unit(tokens if self._words is not None else tokens.mean(axis=0, keepdims=True))
        if with_words and self._words is not None:
            for i, item in enumerate(items):
                if item.image is None and item.text.strip():
                    found[i] = unit(self._words[self._token_ids(item.text)])
        return found

    def _token_ids(self, text: str) -> list[int]:
        """Different tokens of a query, in order; names in it as they stand within a sentence."""
        ids = self._tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        return list(dict.fromkeys(ids))[:_MOST_WORDS]

    def _seen(self, images: Sequence[Image.Image]) -> list[Array]:
        """Embeddings of images by the tower: [tokens, dims] each, fp32."""
        with self._turn:
            found = self._encode([self._processed(image) for image in images])
        # Behind the embedding itself some families have those of deeper layers (deepstack).
        return [tokens[:, : self.dims].float().cpu().numpy() for tokens in found]

    def _processed(self, image: Image.Image) -> Pixels:
        prompt = {"prompt_token_ids": self._image, "multi_modal_data": {"image": [image]}}
        parsed = parse_model_prompt(self._renderer.model_config, prompt)
        (rendered,) = self._renderer.render_cmpl([parsed], skip_mm_cache=True)
        (item,) = rendered["mm_kwargs"]["image"]
        return "image", item


def word_embeddings(folder: Path) -> Array:
    """A checkpoint's embeddings of tokens, [vocabulary, hidden], fp32.

    Raises:
        EmbedderFailed: they are not there, or not once.
    """
    found: list[Array] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118
            found += [tensors.get_tensor(name).float().numpy() for name in names]
    if len(found) != 1:
        raise EmbedderFailed(f"{folder}: its weights have {len(found)} tensors of word embeddings, not one")
    return found[0]


def _opened(data: bytes) -> Image.Image:
    """Raises EmbedderFailed."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (OSError, ValueError) as error:
        raise EmbedderFailed(f"an image cannot be read: {error}") from error
