"""Client text in prompts: where it spells a control token, it is taken at its letters.

A chat template joins its own control tokens ("<|im_start|>", an image's placeholder) and what clients wrote into one
text, and the tokenizer cannot tell which is whose. So before the template is applied, a mark is put behind the first
character of everything in a message that spells a control token, and the tokenizer sees the text without the marks,
but with the tokens that the template wrote under other names. A mark is letters and digits with a number drawn at
start-up: templates trim, split, quote and search text around it, and nobody can write one into a message.

| added token of the tokenizer                           | in turns' text | in tool calls, tool results, tools |
|--------------------------------------------------------|----------------|------------------------------------|
| special; named by the model's configuration; `<|...|>` | letters        | letters                            |
| other ones that the chat template names: `</think>`    | a token        | letters                            |
| further ones: runs of white space, HTML tags           | a token        | a token                            |

The second row is text to its tokenizer: answers show it, clients send it back, and templates look for it in turns. In
data that a template puts between such tokens it would end them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import resolve_chat_template
from vllm.utils.async_utils import make_async

from serving.frontend.errors import InvalidRequest

_DATA_ROLES = ("tool", "function")  # whose messages are data
_DATA_FIELDS = ("tool_calls", "function_call", "tools", "documents")  # of messages, and of a template's variables
_PIPED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # the second bar is a wide one
_NAMES_TOKENS = re.compile(r"_token_(?:id|index)s?$")  # fields of configurations


class ClientText:
    """Tokeniser of prompts in which client text holds no control tokens. Thread-safe.

    Args:
        named: token ids that the model's configuration names.
        templates: chat templates, as text.
    """

    def __init__(self, tokenizer: Any, named: Collection[int] = (), templates: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._mark = f"Z{secrets.token_hex(8)}Z"
        added = _added(tokenizer)
        template = "\n".join(templates)
        control = {
            text: number
            for number, text, special in added
            if text.strip() and (special or number in named or _PIPED.fullmatch(text))
        }
        data = control | {text: number for number, text, _ in added if text.strip() and text in template}
        self._control = frozenset(data.values())
        self._turns, self._data = _Spellings(control, self._mark), _Spellings(data, self._mark)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._renamed = _Renamed(backend, added, data, self._mark) if isinstance(backend, Tokenizer) else None

    @classmethod
    def of(cls, renderer: BaseRenderer, chat_template: str | None = None) -> ClientText:
        """Of a model's prompts, under its own chat template or another one: Jinja, or a file of it."""
        tokenizer, config = renderer.get_tokenizer(), renderer.model_config
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return cls(tokenizer)
        given = load_chat_template(chat_template)
        kinds: tuple[list[dict[str, Any]] | None, ...] = (None, [])  # of chats: without tools, and with some
        found = [resolve_chat_template(tokenizer, given, tools, model_config=config) for tools in kinds]
        return cls(tokenizer, frozenset(_named(config.hf_config.to_dict())), filter(None, found))

    def escape(self, value: Any, is_data: bool = False) -> Any:
        """Messages or a template's variables, with marks in what spells control tokens.

        What spells none is returned itself, not a copy.
        """
        if isinstance(value, str):
            return (self._data if is_data else self._turns).broken(value)
        if isinstance(value, dict):
            is_data = is_data or value.get("role") in _DATA_ROLES
            items = [
                (self.escape(name, is_data), self._field(name, one, is_data or name in _DATA_FIELDS))
                for name, one in value.items()
            ]
            same = all(new[0] is old[0] and new[1] is old[1] for new, old in zip(items, value.items(), strict=True))
            return value if same else dict(items)
        if isinstance(value, list | tuple):
            found = [self.escape(one, is_data) for one in value]
            return value if all(new is old for new, old in zip(found, value, strict=True)) else found
        return value

    def _field(self, name: Any, value: Any, is_data: bool) -> Any:
        if name == "arguments" and isinstance(value, str):  # JSON can write any letter as \u and its number
            try:
                parsed = json.loads(value)
            except ValueError:
                return self.escape(value, is_data)
            escaped = self.escape(parsed, is_data)
            return value if escaped is parsed else escaped
        return self.escape(value, is_data)

    def plain(self, text: str) -> str:
        """A rendered prompt without marks."""
        return text.replace(self._mark, "")

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokens of a rendered prompt: control tokens are those without a mark.

        `options` are the tokenizer's.
        """
        if self._mark not in text:
            return list(self._tokenizer.encode(text, **options))
        if self._renamed is not None and (found := self._renamed.prompt(text)) is not None:
            before, behind = self._around() if options.get("add_special_tokens", True) else ([], [])
            return [*before, *found, *behind]
        first, *others = text.split(self._mark)
        ids = list(self._tokenizer.encode(first, **options))
        for piece in others:
            ids += self._tokenizer.encode(piece, **{**options, "add_special_tokens": False})
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer adds before and behind every text."""
        plain, whole = (list(self._tokenizer.encode("a", add_special_tokens=added)) for added in (False, True))
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def literal(self, text: str) -> list[int]:
        """Tokens of data by itself: it holds no control tokens, whatever it spells."""
        found = self._renamed.data(text) if self._renamed is not None else None
        return self.encode(self._data.broken(text), add_special_tokens=False) if found is None else found

    def install(self, renderer: BaseRenderer) -> None:
        """Make a renderer take requests at their letters: messages, and its templates' variables."""
        if not self._control:
            return
        tokenise, render, render_soon = (
            renderer._tokenize_prompt,
            renderer.render_messages,
            renderer.render_messages_async,
        )

        def tokenised(prompt: Any, params: Any) -> Any:
            text = prompt["prompt"]
            if self._mark not in text:
                return tokenise(prompt, params)
            ids = self.encode(text, add_special_tokens=params.add_special_tokens)
            return renderer._build_tokens_prompt(ids, {**prompt, "prompt": self.plain(text)})

        def escaped(params: Any) -> Any:  # no request may have tokens made elsewhere, of text with marks
            variables = {**self.escape(params.chat_template_kwargs), "tokenize": False}
            return replace(params, chat_template_kwargs=variables)

        if (processor := renderer.mm_processor) is not None:
            processor._apply_prompt_updates_via_text = self._checked(processor._apply_prompt_updates_via_text)

        renderer._tokenize_prompt = tokenised
        renderer._tokenize_prompt_async = make_async(tokenised, executor=renderer._executor)
        renderer.render_messages = lambda messages, params: render(self.escape(messages), escaped(params))
        renderer.render_messages_async = lambda messages, params: render_soon(self.escape(messages), escaped(params))

    def _checked(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap vLLM's search for an image's place in a prompt's words, so that client text is none.

        It comes to that for an image that the template gave no place; vLLM then tokenises the words again.
        """

        def checked(token_ids: list[int], *arguments: Any, **options: Any) -> Any:
            text = self._tokenizer.decode(token_ids)
            again = self._tokenizer.encode(text, add_special_tokens=False)
            control, in_words = ([number for number in ids if number in self._control] for ids in (token_ids, again))
            if control != in_words:
                raise InvalidRequest("an image or video has no place in the prompt that the chat template writes")
            return update(token_ids, *arguments, **options)

        return checked


class _Spellings:
    """Control tokens' texts: found in client text, and broken by a mark behind their first character."""

    def __init__(self, tokens: Collection[str], mark: str) -> None:
        rests: dict[str, list[str]] = defaultdict(list)
        for token in tokens:
            rests[token[0]].append(token[1:])
        self._mark = mark
        self._firsts = frozenset(rests)
        joined = [token for token in tokens if not token[0].isalnum()]  # words may end as a word begins
        self._beginnings = frozenset(token[:size] for token in joined for size in range(1, len(token)))
        self._longest = max(map(len, self._beginnings), default=0)
        first = "|".join(f"{re.escape(letter)}(?={_any_of(rest)})" for letter, rest in rests.items())
        self._spelled = re.compile(first) if rests else None

    def broken(self, text: str) -> str:
        """Text with marks; itself if it needs none."""
        if self._spelled is None:
            return text
        if self._spelled.search(text):
            text = self._spelled.sub(rf"\g<0>{self._mark}", text)
        # Templates may put another text right behind this one, of which the two make a token: "<|im_" and "end|>".
        end = len(text.rstrip())
        for at in range(end - 1, max(-1, end - 1 - self._longest), -1):
            if text[at] in self._firsts and text[at:end] in self._beginnings:
                text = text[: at + 1] + self._mark + text[at + 1 :]
                end += len(self._mark)
        return text


class _Renamed:
    """A copy of a fast tokenizer in which control tokens have names that nobody can write.

    Args:
        added: id, text and kind of all added tokens.
        control: text and id of those to rename.
    """

    def __init__(
        self, backend: Tokenizer, added: Iterable[tuple[int, str, bool]], control: Mapping[str, int], mark: str
    ) -> None:
        nonce = secrets.token_hex(8)
        names = {text: f"Y{nonce}x{number}Y" for text, number in control.items()}
        document = json.loads(backend.to_str())
        document.update(truncation=None, padding=None, post_processor=None)
        for token in document["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        self._backend, self._names, self._mark = Tokenizer.from_str(json.dumps(document)), names, mark
        # A tokenizer that is read numbers added tokens anew.
        self._ids = {self._backend.token_to_id(names.get(text, text)): number for number, text, _ in added}
        self._written = re.compile(f"(?:{_any_of(names)})(?!{mark})") if names else None
        known = map(self._backend.token_to_id, names)
        self._in_model = frozenset(number for number in known if number is not None)

    def prompt(self, text: str) -> list[int] | None:
        """Tokens of text with marks; None where the tokenizer's model makes control tokens of letters."""
        if self._written is not None:
            text = self._written.sub(lambda token: self._names[token[0]], text)
        return self.data(text.replace(self._mark, ""))

    def data(self, text: str) -> list[int] | None:
        """Tokens of text without control tokens; None as `prompt`."""
        found = self._backend.encode(text, add_special_tokens=False).ids
        return [self._ids.get(number, number) for number in found] if self._in_model.isdisjoint(found) else None


def _any_of(words: Iterable[str]) -> str:
    """Regular expression of the longest of these words; it shares their beginnings, for there may be thousands."""
    rests: dict[str, list[str]] = defaultdict(list)
    for word in words:
        rests[word[:1]].append(word[1:])
    is_optional = rests.pop("", None) is not None
    found = "|".join(re.escape(letter) + _any_of(rest) for letter, rest in rests.items())
    return f"(?:{found})?" if found and is_optional else f"(?:{found})" if found else ""


def _added(tokenizer: Any) -> list[tuple[int, str, bool]]:
    """Id and text of a tokenizer's added tokens, and True for special ones.

    None of a tokenizer of vLLM's own: those find none in text.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return []
    return [(number, token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()]


def _named(configuration: Mapping[Any, Any]) -> Iterable[int]:
    """Token ids in a model's configuration and its parts."""
    for name, value in configuration.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif isinstance(name, str) and _NAMES_TOKENS.search(name):
            yield from value if isinstance(value, list) else [value]
