"""The reference models: rebuilt only when their recipe changes, readable answers, Qwen's chat and tool format."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast

from infra import checkpoints
from infra.checkpoints import RECIPES, Qwen25VL, checkpoint_path
from infra.checkpoints.qwen_vl import MERGE
from infra.checkpoints.tokens import chat_template, printable_tokens, tokenizer
from infra.checkpoints.weights import DEFAULT_ANSWER_TOKENS

TINY = "qwen2_5_vl-tiny"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_path(TINY, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def tokens(tiny: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny)


def chat(tokens: PreTrainedTokenizerFast, messages: list[dict], **options: object) -> str:
    return tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_a_current_checkpoint_is_not_written_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen25VL, "write", lambda *_: pytest.fail("written again"))
    assert checkpoint_path(TINY, tiny.parent) == tiny


def test_of_builders_at_the_same_time_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = list[int]()

    def slow(_: object, folder: Path) -> None:
        writers.append(1)
        time.sleep(0.2)
        assert folder.is_dir()

    monkeypatch.setattr(Qwen25VL, "write", slow)
    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(lambda _: checkpoint_path(TINY, tmp_path), range(3))) == {tmp_path / TINY}
    assert len(writers) == 1


def test_a_checkpoint_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    stale = tmp_path / TINY
    stale.mkdir()
    (stale / checkpoints.STAMP).write_text("of an earlier recipe")
    (stale / "left-over").write_text("")
    checkpoint_path(TINY, tmp_path)
    assert (stale / "model.safetensors").is_file()
    assert not (stale / "left-over").exists()


def test_a_checkpoint_without_weights_says_all_else(tiny: Path, tmp_path: Path) -> None:
    replace(RECIPES[TINY], drawn=False).write(tmp_path)
    names = {path.name for path in tiny.iterdir()} - {checkpoints.STAMP}
    assert {path.name for path in tmp_path.iterdir()} == names - {"model.safetensors"}
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((tiny / "config.json").read_text())


def test_an_interrupted_build_does_not_pass_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Qwen25VL, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_path(TINY, tmp_path)
    assert not (tmp_path / TINY).exists()


def test_the_same_recipe_gives_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    again = checkpoint_path(TINY, tmp_path)
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError):
        checkpoint_path("no-such-model")


def test_any_text_survives_the_tokenizer(tokens: PreTrainedTokenizerFast) -> None:
    text = "Grüße, 世界 🌍!\n\t<tool_call>{}</tool_call>"
    assert tokens.decode(tokens.encode(text)) == text


@pytest.mark.parametrize("name", RECIPES)
def test_every_id_of_the_vocabulary_decodes(name: str) -> None:
    tokens = tokenizer(RECIPES[name].vocabulary)
    assert len(tokens) == RECIPES[name].vocabulary
    assert None not in tokens.convert_ids_to_tokens(range(len(tokens)))


def test_only_printable_tokens_can_be_answered(tiny: Path, tokens: PreTrainedTokenizerFast) -> None:
    from safetensors.torch import load_file

    head = load_file(tiny / "model.safetensors")["lm_head.weight"]
    audible = head.abs().sum(-1).nonzero().flatten().tolist()
    assert audible == printable_tokens(tokens)
    assert tokens.eos_token_id not in audible


def test_an_answer_without_a_limit_still_ends(tiny: Path) -> None:
    limit = json.loads((tiny / "generation_config.json").read_text())["max_new_tokens"]
    assert limit == DEFAULT_ANSWER_TOKENS


@pytest.mark.parametrize(("height", "width", "image_tokens"), [(28, 28, 4), (224, 168, 48), (896, 1792, 2048)])
def test_an_image_takes_one_token_per_28_by_28_pixels(tiny: Path, height: int, width: int, image_tokens: int) -> None:
    import numpy as np

    processor = AutoImageProcessor.from_pretrained(tiny)
    grid = processor(images=[np.zeros((height, width, 3), np.uint8)], return_tensors="pt")["image_grid_thw"]
    assert int(grid.prod()) // MERGE**2 == image_tokens


def test_string_and_list_content_render_alike(tokens: PreTrainedTokenizerFast) -> None:
    as_text = chat(tokens, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    as_parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert as_text == chat(tokens, as_parts)
    assert as_text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_images_keep_their_place_between_texts(tokens: PreTrainedTokenizerFast) -> None:
    content = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b "}, {"type": "image"}]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\na {image} b {image}<|im_end|>" in chat(tokens, [{"role": "user", "content": content}])


def test_tools_and_their_answers_render_in_hermes_format(tokens: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    text = chat(
        tokens,
        [
            {"role": "user", "content": "Weather in Ulm and Bonn?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "sun"},
        ],
        tools=[WEATHER],
    )
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>' in text
    responses = "\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n" in text


def test_vllm_sees_that_the_template_takes_content_parts() -> None:
    """Else it would move every image of a message to its front."""
    from vllm.renderers.hf import _detect_content_format

    assert _detect_content_format(chat_template(), default="string") == "openai"
