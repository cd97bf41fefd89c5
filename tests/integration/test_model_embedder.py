"""The embedder of the served model, on the bundled one: whole questions and pictures find pages by what they show."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image

from infra.reference import DEFAULT_MODEL, weights
from kvstore.search.index import IndexedFile, Part, Query, StoreIndex
from prefill_workers.engine.vision_encoder import VisionEncoder
from serving.config import OrbitServeConfig
from serving.engine_spec import front_end_config, vision_spec
from serving.retrieval.embedders.base import Item
from serving.retrieval.embedders.model import ModelEmbedder, word_embeddings
from tests.benchmarks.mrag_pages import draw_pages, draw_questions, pictures

pytestmark = pytest.mark.engine
PAGES, QUESTIONS, SHOWN = 60, 20, 4


@pytest.fixture(scope="module")
def tower(only_engines) -> Iterator[tuple[OrbitServeConfig, VisionEncoder]]:
    only_engines.close()
    model = {"path": weights(DEFAULT_MODEL), "dtype": "float32", "max_model_len": 1024}
    config = OrbitServeConfig.model_validate({"model": model})
    encoder = VisionEncoder(vision_spec(config))
    yield config, encoder
    encoder.shutdown()


def png(image: Image.Image) -> Item:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Item(image=buffer.getvalue())


def indexed(embedder: ModelEmbedder, pages: list[Image.Image]) -> StoreIndex:
    index = StoreIndex(embedder.dims)
    vectors = asyncio.run(embedder.embed_documents([png(page) for page in pages]))
    for number, one in enumerate(vectors):
        index.put(IndexedFile(str(number), "page.png", [Part(0, str(number))], [one]))
    return index


def best(index: StoreIndex, embedder: ModelEmbedder, asked: Item) -> int:
    (vectors,) = asyncio.run(embedder.embed_queries([asked]))
    return int(index.search(Query("", 1, vectors, ranker="none"))[0].file)


def test_questions_and_pictures_find_their_page(tower: tuple[OrbitServeConfig, VisionEncoder]):
    config, encoder = tower
    front_end, words = front_end_config(config.model, 0.0), word_embeddings(config.model.path)
    generator = torch.Generator().manual_seed(7)
    scenes = draw_pages(PAGES, generator)
    questions = draw_questions(scenes, QUESTIONS, SHOWN, generator)
    pages = pictures(scenes)

    named = ModelEmbedder(front_end, encoder.encode, words, "bundled")
    assert named.modalities == {"text", "image"}
    index = indexed(named, pages)
    assert [best(index, named, Item(one.query)) for one in questions] == [one.page for one in questions]

    seen = ModelEmbedder(front_end, encoder.encode, None, "bundled")
    assert (seen.modalities, seen.fingerprint != named.fingerprint) == ({"image"}, True)
    alike = indexed(seen, pages)
    noise = np.random.default_rng(0)
    for number in range(0, PAGES, 6):
        spoiled = np.clip(np.asarray(pages[number]) + noise.normal(0, 24, (*pages[number].size[::-1], 3)), 0, 255)
        assert best(alike, seen, png(Image.fromarray(spoiled.astype("uint8")))) == number
    (nothing,) = asyncio.run(seen.embed_queries([Item("words")]))
    assert nothing.shape == (0, seen.dims)
