"""Embedders from directories: vectors equal those of the models by themselves, one item at a time."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    PreTrainedTokenizerFast,
)

from serving.config import OrbitServeConfig
from serving.retrieval.embedders.base import EmbedderFailed, Item
from serving.retrieval.embedders.choice import open_embedder
from serving.retrieval.embedders.path import PathEmbedder

WORDS = ["<pad>", "<unk>", "bees", "boats", "sail", "fly", "query", "end"]


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="end", model_max_length=16
    )


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in sentence-transformers' layout that pools means."""
    folder = tmp_path_factory.mktemp("sentences")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in types.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query "}}))
    return folder


async def test_texts_are_pooled_as_one_by_one_and_queries_have_their_prompt(sentences: Path):
    config = OrbitServeConfig(model={"path": sentences}, retriever={"embedder": f"path:{sentences}"})
    embedder = await open_embedder(config)
    assert (embedder.dims, embedder.modalities) == (32, {"text"})
    model, words = BertModel.from_pretrained(sentences).eval(), tokenizer()

    def alone(text: str) -> np.ndarray:
        with torch.inference_mode():
            mean = model(**words(text, return_tensors="pt")).last_hidden_state.mean(1)
        return torch.nn.functional.normalize(mean).numpy()

    texts = ["bees fly", "boats sail sail sail boats", "bees"]
    for text, vectors in zip(texts, await embedder.embed_documents([Item(text) for text in texts]), strict=True):
        np.testing.assert_allclose(vectors, alone(text), atol=1e-5)
    (query,) = await embedder.embed_queries([Item("bees")])
    np.testing.assert_allclose(query, alone("query bees"), atol=1e-5)
    (nothing,) = await embedder.embed_documents([Item(" ")])
    assert nothing.shape == (0, 32)


async def test_images_and_texts_of_a_clip_share_a_space(tmp_path: Path):
    torch.manual_seed(0)
    part = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CLIPConfig(
        text_config={**part, "vocab_size": len(WORDS), "max_position_embeddings": 16, "eos_token_id": 7},
        vision_config={**part, "image_size": 32, "patch_size": 16},
        projection_dim=24,
    )
    model = CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=pixels, tokenizer=tokenizer()).save_pretrained(tmp_path)
    embedder = PathEmbedder(tmp_path)
    assert (embedder.dims, embedder.modalities) == (24, {"text", "image"})
    buffer = io.BytesIO()
    picture = Image.new("RGB", (40, 48), (200, 30, 60))
    picture.save(buffer, "PNG")
    image, text = await embedder.embed_documents([Item("bees", buffer.getvalue()), Item("bees end")])
    with torch.inference_mode():
        features = model.get_image_features(**pixels(images=[picture], return_tensors="pt"))
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    np.testing.assert_allclose(image, torch.nn.functional.normalize(features).numpy(), atol=1e-5)
    assert text.shape == image.shape == (1, 24)
    with pytest.raises(EmbedderFailed, match="cannot be read"):
        await embedder.embed_documents([Item(image=b"none")])


def test_layouts_that_are_not_known_are_refused(sentences: Path, tmp_path: Path):
    with pytest.raises(EmbedderFailed, match="neither"):
        PathEmbedder(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}])
    )
    with pytest.raises(EmbedderFailed, match="Dense"):
        PathEmbedder(tmp_path)
    one, other = PathEmbedder(sentences), PathEmbedder(sentences, ("ask: ", ""))
    assert one.fingerprint != other.fingerprint
