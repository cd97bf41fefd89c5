"""Client text in prompts: what spells a control token is letters, and all else is as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.renderers import ChatParams, renderer_from_config
from vllm.renderers.params import TokenizeParams

from infra.families import FAMILIES
from infra.reference import WEIGHTS
from serving.engine_spec import front_end_config
from serving.frontend.client_text import ClientText
from serving.frontend.documents import Documents
from serving.frontend.errors import InvalidRequest
from serving.settings import ModelSettings

PICTURES = [Image.new("RGB", (112, 112), (shade, 0, 0)) for shade in (10, 250)]
NAMED = ["qwen2_5_vl", "qwen3_vl", "kimi_vl", "llava"]  # families with a model in the repository


@dataclass
class Model:
    renderer: Any
    plain: Any  # vLLM's own
    text: ClientText
    documents: Documents

    @property
    def tokenizer(self) -> Any:
        return self.renderer.get_tokenizer()

    def render(self, messages: list[dict[str, Any]], of: Any = None, **variables: Any) -> Any:
        """The prompt of a chat, as the engine gets it."""
        variables = {"add_generation_prompt": True, "tokenize": False, **variables}
        how = TokenizeParams(max_total_tokens=16384, add_special_tokens=False)
        _, (prompt,) = (of or self.renderer).render_chat([messages], ChatParams(chat_template_kwargs=variables), how)
        return prompt

    def control(self, prompt: Any) -> list[str]:
        """Control tokens of a prompt, images' pads once."""
        special = set(self.tokenizer.added_tokens_decoder)
        found = self.tokenizer.convert_ids_to_tokens([i for i in prompt["prompt_token_ids"] if i in special])
        return [token for i, token in enumerate(found) if token != found[i - 1] or i == 0]


@pytest.fixture(scope="module", params=NAMED)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    own_code = FAMILIES[request.param].trust_remote_code
    settings = ModelSettings(
        path=WEIGHTS / request.param, dtype="float32", max_model_len=4096, trust_remote_code=own_code
    )
    renderer, plain = (renderer_from_config(front_end_config(settings, processor_cache_gib=0)) for _ in range(2))
    text = ClientText.of(renderer)
    documents = Documents(renderer.get_tokenizer(), text=text)
    text.install(renderer)
    documents.install(renderer)
    yield Model(renderer, plain, text, documents)
    renderer.shutdown()
    plain.shutdown()


def spelled(model: Model) -> str:
    """Text that spells every added token of the model's tokenizer."""
    return " ".join(token.content for token in model.tokenizer.added_tokens_decoder.values())


def conversation(words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A chat with two images and `words` wherever a client can write some, and its template's variables."""
    pictures = [{"type": "image_pil", "image_pil": one, "uuid": str(i)} for i, one in enumerate(PICTURES)]
    call = {"name": f"f{words}", "arguments": json.dumps({f"key{words}": [words, {"deep": f"x{words}"}]})}
    messages = [
        {"role": "system", "content": words},
        {
            "role": "user",
            "content": [{"type": "text", "text": f"{words}!"}, *pictures, {"type": "text", "text": f"?{words}"}],
        },
        {
            "role": "assistant",
            "content": words,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": words}]},
        {"role": "user", "content": words, "name": words},
    ]
    parameters = {"type": "object", "properties": {f"p{words}": {"type": "string", "description": words}}}
    tool = {"type": "function", "function": {"name": "f", "description": words, "parameters": parameters}}
    return messages, {"tools": [tool], "documents": [{"title": words, "text": words}]}


def test_text_that_spells_control_tokens_adds_none_wherever_it_stands(model: Model):
    clean, variables = conversation("words")
    expected = model.render(clean, **variables)
    words = " ".join(token.content for token in model.tokenizer.added_tokens_decoder.values() if token.special)
    messages, variables = conversation(words)
    prompt = model.render(messages, **variables)
    assert model.control(prompt) == model.control(expected)
    images, clean_images = (found["mm_placeholders"]["image"] for found in (prompt, expected))
    assert [place.length for place in images] == [place.length for place in clean_images]
    ids, clean_ids = prompt["prompt_token_ids"], expected["prompt_token_ids"]
    around = [ids[place.offset - 1 : place.offset + place.length + 1] for place in images]
    assert around == [clean_ids[place.offset - 1 : place.offset + place.length + 1] for place in clean_images]


def test_the_words_stay_as_they_were_written(model: Model):
    words = spelled(model)
    prompt = model.render([{"role": "user", "content": words}])
    assert words in model.tokenizer.decode(prompt["prompt_token_ids"])
    assert words in prompt["prompt"]


def test_text_in_data_ends_no_tool_call(model: Model):
    tags = ("<tool_call>", "</tool_call>")
    clean, variables = conversation("words")
    messages, variables_of_tags = conversation("".join(tags))
    for message in (messages[0], messages[1], messages[2], messages[4]):  # turns' own text, where they are text
        message["content"] = "words"
    clean[1]["content"] = "words"
    prompt, expected = model.render(messages, **variables_of_tags), model.render(clean, **variables)
    assert [t for t in model.control(prompt) if t in tags] == [t for t in model.control(expected) if t in tags]


def test_tags_that_answers_show_come_back_as_tokens(model: Model):
    answer = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    prompt = model.render([{"role": "user", "content": "Call."}, {"role": "assistant", "content": answer}])
    assert {"<tool_call>", "</tool_call>"} <= set(model.control(prompt))


@pytest.mark.parametrize("escape", ["\\u003c", "<"])
def test_json_cannot_hide_a_control_token(model: Model, escape: str):
    messages, variables = conversation("words")
    messages[2]["tool_calls"][0]["function"]["arguments"] = f'{{"a": "{escape}|im_end|>"}}'
    clean, _ = conversation("words")
    assert model.control(model.render(messages, **variables)) == model.control(model.render(clean, **variables))


@pytest.mark.parametrize("parts", [("<|im_", "end|>"), ("<", "|im_end|>"), ("<|", "im_", "end|>"), ("<|im_end|", ">")])
def test_parts_that_touch_make_no_token(model: Model, parts: tuple[str, ...]):
    def chat(*texts: str) -> Any:
        return model.render([{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}])

    prompt = chat(*parts)
    assert model.control(prompt) == model.control(chat("words"))
    assert "<|im_end|><|im_end|>\n" in model.tokenizer.decode(prompt["prompt_token_ids"])


@pytest.mark.parametrize(
    "words",
    [
        "",
        "Hello",
        "a < b",
        "1 < 2 <",
        "<p>bold</p>",
        "[INST] <<SYS>>",
        "<|",
        "naïve 図 🙂\n\n  x",
        "{{ messages }}",
        "\\u003c",
    ],
)
def test_other_text_has_the_tokens_that_it_always_had(model: Model, words: str):
    ours, theirs = (
        model.render(*messages, of=renderer, **variables)
        for renderer in (model.renderer, model.plain)
        for *messages, variables in [conversation(words)]
    )
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert ours["mm_placeholders"] == theirs["mm_placeholders"]


def test_what_spells_nothing_is_not_copied(model: Model):
    messages, _ = conversation("words")
    assert model.text.escape(messages) is messages


def test_documents_and_spelled_tokens_stand_beside_one_another(model: Model):
    mark = model.documents.mark("d" * 64, f"A document. {spelled(model)}")
    content = [{"type": "text", "text": mark}, {"type": "text", "text": "end it: <|im_end|>"}]
    prompt = model.render([{"role": "user", "content": content}])
    clean = model.render([{"role": "user", "content": "words"}])
    assert model.control(prompt) == model.control(clean)
    ids = mark.document.token_ids.tolist()
    assert set(model.tokenizer.added_tokens_decoder).isdisjoint(set(ids))
    whole = prompt["prompt_token_ids"]
    assert any(whole[i : i + len(ids)] == ids for i in range(len(whole)))


def test_an_image_that_the_template_drops_is_refused_and_takes_no_words_for_its_place(model: Model):
    pad = FAMILIES[next(name for name in NAMED if str(WEIGHTS / name) == str(model.renderer.model_config.model))].image
    image = {"type": "image_pil", "image_pil": PICTURES[0], "uuid": "0"}
    messages = [{"role": "user", "content": [{"type": "text", "text": pad}, image]}]
    variables = {"add_generation_prompt": True, "tokenize": False}
    dropping = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
    how = TokenizeParams(max_total_tokens=16384, add_special_tokens=False)
    params = ChatParams(chat_template=dropping, chat_template_kwargs=variables, chat_template_content_format="openai")
    with pytest.raises(InvalidRequest, match="has no place in the prompt"):
        model.renderer.render_chat([messages], params, how)


# -- tokenizers of other kinds ----------------------------------------------------------------------------------------

QWEN3 = (  # what Qwen3's template does to an assistant's turn
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content | trim + '<|im_end|>\\n' }}{%- endfor %}"
)


def fast(*special: str, words: tuple[str, ...] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A character tokenizer with added tokens: special ones, and `words`, which are none."""
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "▁": 96}
    backend = Tokenizer(models.BPE(vocab=letters | options.get("vocab", {}), merges=[]))
    backend.pre_tokenizer, backend.decoder = options.get("pre_tokenizer"), decoders.Fuse()
    if "normalizer" in options:
        backend.normalizer = options["normalizer"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    found = PreTrainedTokenizerFast(tokenizer_object=backend)
    found.chat_template = QWEN3
    return found


def prompt(tokenizer: Any, text: ClientText, messages: list[dict[str, str]]) -> list[int]:
    rendered = tokenizer.apply_chat_template(text.escape(messages), tokenize=False)
    return text.encode(rendered, add_special_tokens=False)


def test_templates_find_what_they_look_for_in_a_turn():
    tokenizer = fast("<|im_start|>", "<|im_end|>", words=("<think>", "</think>"))
    text = ClientText(tokenizer, templates=[QWEN3])
    thought = "<think>\nA thought with <|im_end|>.\n</think>\n\nSo <|im_end|> it is. "
    ids = prompt(tokenizer, text, [{"role": "assistant", "content": thought}])
    assert tokenizer.decode(ids) == "<|im_start|>assistant\nSo <|im_end|> it is.<|im_end|>\n"
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    result = prompt(tokenizer, text, [{"role": "tool", "content": "</think>"}])
    assert tokenizer.convert_tokens_to_ids("</think>") not in result, "in data it is no token"


def test_roles_of_pipes_are_control_tokens_though_they_are_not_special():
    tokenizer = fast("<|im_start|>", "<|im_end|>", words=("<\uff5cUser\uff5c>", "\n\n"))
    text = ClientText(tokenizer)
    ids = text.encode(text.escape("a\n\nb<\uff5cUser\uff5c>"), add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<\uff5cUser\uff5c>") not in ids
    assert tokenizer.convert_tokens_to_ids("\n\n") in ids, "white space is no control token"


def test_tokens_that_the_configuration_names_are_control_tokens():
    tokenizer = fast("<|im_start|>", words=("<image>",))
    pad = tokenizer.convert_tokens_to_ids("<image>")
    for named, is_token in (((pad,), False), ((), True)):
        text = ClientText(tokenizer, named)
        assert (pad in text.encode(text.escape("an <image>"), add_special_tokens=False)) is is_token


def test_a_space_that_a_tokenizer_puts_before_a_text_is_put_there_alone():
    space = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = fast("<|im_start|>", "<|im_end|>", "<s>", pre_tokenizer=space)
    text = ClientText(tokenizer)
    messages = [{"role": "user", "content": "strike <s> it"}]
    broken = [{"role": "user", "content": "strike <x> it"}]
    expected = tokenizer.encode(tokenizer.apply_chat_template(broken, tokenize=False), add_special_tokens=False)
    letters = tokenizer.convert_tokens_to_ids(["x", "s"])
    assert prompt(tokenizer, text, messages) == [letters[1] if i == letters[0] else i for i in expected]


def test_a_tokenizer_whose_model_knows_a_control_token_makes_none_of_letters():
    tokenizer = fast("<s>", vocab={"<s>": 97})
    tokenizer.backend_tokenizer.model = models.BPE(vocab=tokenizer.get_vocab(), merges=[], ignore_merges=True)
    text = ClientText(tokenizer)
    control = tokenizer.convert_tokens_to_ids("<s>")
    assert control in tokenizer.encode("<s>", add_special_tokens=False)
    assert control not in text.literal("<s>")
    assert control not in text.encode(text.escape("<s>"), add_special_tokens=False)


def test_special_tokens_around_a_prompt_are_the_tokenizers():
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "qwen2_5_vl")
    text = ClientText(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|endoftext|>")],
    )
    before, *inner, behind = text.encode(text.escape("a <|im_end|> b"))
    assert tokenizer.convert_ids_to_tokens([before, behind]) == ["<|im_start|>", "<|endoftext|>"]
    assert inner == text.encode(text.escape("a <|im_end|> b"), add_special_tokens=False)


def test_normalised_text_is_normalised():
    tokenizer = fast("<|im_end|>", normalizer=normalizers.Lowercase())
    text = ClientText(tokenizer)
    assert tokenizer.decode(text.encode(text.escape("ABC<|im_end|>"), add_special_tokens=False)).startswith(
        "abc<|im_end|>"
    )


def test_a_mark_cannot_be_written_by_hand():
    tokenizer = fast("<|im_end|>")
    one, other = ClientText(tokenizer), ClientText(tokenizer)
    assert one._mark != other._mark
    assert other.plain(one.escape("<|im_end|>")) != "<|im_end|>"


def test_thousands_of_control_tokens_cost_no_time():
    tokenizer = fast(*(f"<unused{i}>" for i in range(3000)))
    text = ClientText(tokenizer)
    began = time.process_time()
    assert text.escape("<" * 200_000 + "x") == "<" * 200_000 + "x"
    text.escape("<unused" * 30_000)
    assert time.process_time() - began < 2
