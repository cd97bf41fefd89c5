"""Limits of each family's processor, by an image's size alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.renderers.inputs.preprocess import parse_model_prompt

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES
from serving.api.errors import TooLarge
from serving.api.image_limits import ImageLimits
from serving.engine_spec import front_end_config
from serving.frontend.errors import InvalidRequest
from serving.frontend.prompt_segments import Delimiters
from serving.settings import ModelSettings

PIXELS = 33_000_000
_renderers: dict[str, BaseRenderer] = {}


def renderer(family: str) -> BaseRenderer:
    if family not in _renderers:
        one = FAMILIES[family]
        path = checkpoint_path(one.checkpoint)
        model = ModelSettings(path=path, trust_remote_code=one.trust_remote_code, dtype="float32")
        _renderers[family] = renderer_from_config(front_end_config(model, 0, 2048))
    return _renderers[family]


def limits(family: str, most: int = PIXELS) -> ImageLimits:
    found = ImageLimits.of(renderer(family), most)
    assert found is not None
    return found


def processed_tokens(family: str, size: tuple[int, int]) -> int:
    """Tokens that the model's processor makes of an image, pixels and all."""
    of = renderer(family)
    written = dict(Delimiters.of(of.model_config, of.get_tokenizer()).written)["image"]
    prompt: Any = {"prompt_token_ids": list(written), "multi_modal_data": {"image": [Image.new("RGB", size)]}}
    (found,) = of.render_cmpl([parse_model_prompt(of.model_config, prompt)], skip_mm_cache=True)
    return sum(place.length for place in found["mm_placeholders"]["image"])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "kimi_vl", "llava"])
def test_tokens_are_those_that_the_processor_makes(family: str):
    for size in [(1, 1), (3, 3), (64, 64), (1, 200), (150, 1), (300, 224)]:
        assert limits(family).check(*size, "image") == processed_tokens(family, size)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_aspect_ratio_that_the_processor_refuses_is_told_by_number(family: str):
    with pytest.raises(
        InvalidRequest, match=r"^part: .* 1x20000 pixels: absolute aspect ratio must be smaller than 200"
    ):
        limits(family).check(1, 20_000, "part")
    with pytest.raises(ValueError, match="Failed to apply"):
        processed_tokens(family, (1, 300))


def test_a_thin_image_that_is_padded_takes_more_tokens_than_a_prompt_has():
    with pytest.raises(
        InvalidRequest, match=r"1x33000000 pixels takes 1178572 tokens; the longest prompt has at most 2048"
    ):
        limits("kimi_vl").check(1, 33_000_000, "part")


def test_a_thin_image_that_is_resized_by_its_shorter_side_is_bounded_by_what_it_becomes():
    assert limits("llava").check(1, 4000, "part")
    with pytest.raises(TooLarge, match=r"an image of 1x20000 pixels one of 141120000; at most 33000000 are allowed"):
        limits("llava").check(1, 20_000, "part")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_vl"])
def test_what_patches_make_of_an_image_is_bounded(family: str):
    assert limits(family).check(280, 280, "part") == 100
    with pytest.raises(TooLarge, match=r"280x280 pixels one of 78400; at most 50000 are allowed"):
        limits(family, 50_000).check(280, 280, "part")


def test_a_model_without_images_has_no_limits():
    assert ImageLimits.of(renderer("qwen2"), PIXELS) is None


def test_a_family_that_tells_tokens_in_another_way_is_left_to_its_processor(caplog: pytest.LogCaptureFixture):
    def get_num_image_tokens(*, picture: str) -> int:
        raise AssertionError(picture)

    processor = SimpleNamespace(image_processor=SimpleNamespace(size={"height": 8, "width": 8}))
    info = SimpleNamespace(
        get_supported_mm_limits=lambda: {"image": None},
        get_hf_processor=lambda: processor,
        get_num_image_tokens=get_num_image_tokens,
    )
    model: Any = SimpleNamespace(mm_processor=SimpleNamespace(info=info), model_config=SimpleNamespace(max_model_len=8))
    found = ImageLimits.of(model, PIXELS)
    assert found is not None
    assert found.check(1, 100_000, "part") == 0
    assert "not known before it is processed" in caplog.text


def test_an_image_of_which_nothing_is_left_is_refused():
    with pytest.raises(InvalidRequest, match="leaves nothing of an image of 14x900000 pixels"):
        ImageLimits(lambda width, height: 0, None, 784, 10, PIXELS).check(14, 900_000, "part")
