"""Where a chunk begins and ends in a prompt: with what its family writes around its placeholders."""

from __future__ import annotations

from array import array

import pytest
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES
from serving.engine_spec import front_end_config
from serving.frontend.documents import Document
from serving.frontend.prompt_segments import Delimiters, image_delimiters, segment
from serving.settings import ModelSettings

KIMI = "image", (1, 7, 8, 2, 9, 3)  # start, "image" in two tokens, content, placeholder, end
QWEN_IMAGE, QWEN_VIDEO = ("image", (4, 10, 5)), ("video", (4, 11, 5))


@pytest.mark.parametrize(
    ("written", "prompt", "placeholders", "span"),
    [
        ((KIMI,), [0, 1, 7, 8, 2, 9, 9, 9, 3, 0], (5, 8), (1, 9)),
        ((KIMI,), [1, 7, 8, 2, 9, 3], (4, 5), (0, 6)),
        ((KIMI,), [0, 7, 8, 2, 9, 9, 3, 0], (4, 6), (4, 6)),  # its beginning is cut off
        ((KIMI,), [1, 7, 8, 2, 9, 9, 0], (4, 6), (4, 6)),  # its end is missing
        ((KIMI,), [8, 2, 9, 9, 3], (2, 4), (2, 4)),
        ((QWEN_IMAGE, QWEN_VIDEO), [0, 4, 11, 11, 5], (2, 4), (1, 5)),
        ((QWEN_IMAGE, QWEN_VIDEO), [0, 4, 12, 11, 5], (2, 4), (2, 4)),  # a placeholder of another kind
        ((("image", (10,)),), [0, 10, 10, 0], (1, 3), (1, 3)),  # nothing is written around it
        ((), [0, 10, 10, 0], (1, 3), (1, 3)),
    ],
)
def test_a_chunk_takes_what_is_written_around_its_placeholders_if_all_of_it_is_there(
    written: tuple[tuple[str, tuple[int, ...]], ...],
    prompt: list[int],
    placeholders: tuple[int, int],
    span: tuple[int, int],
):
    assert Delimiters(written).around(prompt, *placeholders) == span


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_vl", "llava", "qwen2"])
def test_a_familys_delimiters_are_those_that_it_writes(family: str):
    from vllm.tokenizers import get_tokenizer

    one = FAMILIES[family]
    path = str(checkpoint_path(one.checkpoint))
    model = ModelConfig(model=path, trust_remote_code=one.trust_remote_code)
    tokenizer = get_tokenizer(path, trust_remote_code=one.trust_remote_code)
    written = Delimiters.of(model, tokenizer).written
    if not one.image:
        assert written == ()
        return
    modality, image = written[0]
    assert (modality, image) == ("image", tuple(tokenizer.encode(one.image, add_special_tokens=False)))
    assert Delimiters(written).around([0, *image, 0], *_placeholder(image)) == (1, 1 + len(image))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_vl", "llava", "qwen2"])
def test_an_images_delimiters_are_known_before_the_first_prompt(family: str):
    one = FAMILIES[family]
    path = checkpoint_path(one.checkpoint)
    config = front_end_config(ModelSettings(path=path, trust_remote_code=one.trust_remote_code), processor_cache_gib=0)
    renderer = renderer_from_config(config)
    delimiters = Delimiters.of(config.model_config, renderer.get_tokenizer())
    known = image_delimiters(renderer, delimiters)
    if not one.image:
        assert known == ()
        return
    prompt = {"prompt": f"See {one.image} there.", "multi_modal_data": {"image": [Image.new("RGB", (300, 200))]}}
    (rendered,) = renderer.render_cmpl([parse_model_prompt(config.model_config, prompt)], skip_mm_cache=True)
    (span,), tokens = segment(rendered, delimiters).chunks, rendered["prompt_token_ids"]
    assert known == (*tokens[span.start : span.first], *tokens[span.first + span.count : span.stop])
    assert len(known) == len(renderer.get_tokenizer().encode(one.image, add_special_tokens=False)) - 1


def _placeholder(written: tuple[int, ...]) -> tuple[int, int]:
    """Where the placeholder of what is written behind one token stands: one token before the closing ones."""
    at = len(written) - (1 if len(written) == 1 else 2)
    return 1 + at, 2 + at


def test_a_document_of_what_stands_around_an_image_is_behind_it():
    """Not within it: its chunk would overlap the image's, whoever writes such a document."""
    document = Document("closing", array("i", [5]))
    rendered = {
        "type": "multimodal",
        "prompt_token_ids": [0, 4, 10, 10, 5, 1, 5, 1],
        "mm_placeholders": {"image": [PlaceholderRange(offset=2, length=2)]},
        "mm_hashes": {"image": ["picture"]},
        "mm_kwargs": {"image": [MultiModalKwargsItem({})]},
    }
    found = segment(rendered, Delimiters((QWEN_IMAGE,)), [document])
    assert [(span.content, span.start, span.stop) for span in found.chunks] == [("picture", 1, 5), ("closing", 6, 7)]
