"""Text documents as chunks: their tokens must not depend on the text around them.

A tokenizer that sees a whole prompt may merge a document's edges with its neighbours. So a document is tokenised by
itself, once; the chat template renders a mark in its place, and where the prompt is tokenised the mark becomes those
tokens. A mark carries a number drawn at start-up: nobody can write one into a message.

A document is data: where it spells a control token ("<|im_end|>", an image's placeholder), it is taken at its letters.
It can neither end the turn that it is shown in nor stand where an image should.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async

from serving.frontend.client_text import ClientText


@dataclass(frozen=True)
class Document:
    """A tokenised document; `content` is its content id."""

    content: str
    token_ids: array[int]


class Mark(str):
    """Stand-in for a document in a message.

    As long as a request holds one, its document can be found.
    """

    document: Document

    def __new__(cls, text: str, document: Document) -> Mark:
        mark = super().__new__(cls, text)
        mark.document = document
        return mark


class Documents:
    """Marks of documents in messages, and their tokens in prompts. Thread-safe.

    Args:
        text: the prompts' tokeniser, if it is known already.
        limit: token ids that are kept of documents, held by a request or not; the least recently used go first.
    """

    def __init__(self, tokenizer: Any, limit: int = 1 << 22, text: ClientText | None = None) -> None:
        self._text, self._limit = text or ClientText(tokenizer), limit
        self._kept: OrderedDict[str, Document] = OrderedDict()
        self._held = 0  # token ids of all of them
        self._live: WeakValueDictionary[str, Document] = WeakValueDictionary()  # those, and what requests hold
        self._lock, self._tokenising = threading.Lock(), threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="documents")
        nonce = secrets.token_hex(8)
        self._mark = f"\ue000{nonce}:{{}}\ue001"
        self._marks = re.compile(f"\ue000{nonce}:([a-z0-9-]+)\ue001")

    async def mark_soon(self, content: str, text: str) -> Mark:
        """Tokenise a document as `mark` does, in a thread kept for that.

        What waits to be tokenised takes none of the threads that images and files are read by.
        """
        if content in self._live:
            return self.mark(content, text)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.mark, content, text)

    def mark(self, content: str, text: str) -> Mark:
        """Tokenise a document and return its stand-in for messages."""
        document = self._live.get(content) or self._tokenised(content, text)
        with self._lock:
            document = self._live.setdefault(content, document)
            if content not in self._kept:
                self._held += len(document.token_ids)
            self._kept[content] = document
            self._kept.move_to_end(content)
            while self._held > self._limit and len(self._kept) > 1:
                _, forgotten = self._kept.popitem(last=False)
                self._held -= len(forgotten.token_ids)
        return Mark(self._mark.format(content), document)

    def _tokenised(self, content: str, text: str) -> Document:
        with self._tokenising:  # of every thread beyond its first ones a tokenizer of vLLM's keeps a copy of itself
            return self._live.get(content) or Document(content, array("i", self._text.literal(text)))

    def forget(self, content: str, tenant: str) -> None:
        """Keep a deleted document no longer than requests hold it; ids are salted by tenant."""
        with self._lock:
            if (document := self._kept.pop(content, None)) is not None:
                self._held -= len(document.token_ids)

    def marked(self, texts: Iterable[str]) -> list[Document]:
        """Documents that are marked in these texts, in order.

        Their `Mark`s, or they themselves, must be held by the caller.
        """
        return [self._live[content] for text in texts for content in self._marks.findall(text)]

    def token_ids(self, text: str, **options: Any) -> list[int]:
        """Tokens of a prompt with marks.

        `options` are the tokenizer's, for the text around the documents.
        """
        pieces = self._marks.split(text)
        whole: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                whole += self._live[piece].token_ids
            elif piece:
                own = options if not whole else {**options, "add_special_tokens": False}
                whole += self._text.encode(piece, **own)
        return whole

    def install(self, renderer: BaseRenderer) -> None:
        """Make a renderer splice documents in where it tokenises prompts."""
        tokenise = renderer._tokenize_prompt

        def spliced(prompt: Any, params: Any) -> Any:
            if not self._marks.search(prompt["prompt"]):
                return tokenise(prompt, params)
            token_ids = self.token_ids(prompt["prompt"], add_special_tokens=params.add_special_tokens)
            return renderer._build_tokens_prompt(token_ids, {**prompt, "prompt": self._text.plain(prompt["prompt"])})

        renderer._tokenize_prompt = spliced
        renderer._tokenize_prompt_async = make_async(spliced, executor=renderer._executor)


def places(
    token_ids: Sequence[int], documents: Sequence[Document], taken: Sequence[tuple[int, int]] = ()
) -> list[tuple[Document, int]]:
    """First tokens of documents in a prompt that holds them in this order.

    Outside the tokens that are `taken`.

    Of a document whose tokens stand there more than once it is the first place: they are the same.

    Raises:
        ValueError: a document is not there; something changed the prompt's tokens after they were spliced in.
    """
    found, start = [], 0
    data = array("i", token_ids).tobytes()
    for document in documents:
        count, at = len(document.token_ids), _next(data, document, start)
        while at >= 0 and (on := _beyond(at, count, taken)):
            at = _next(data, document, on)
        if at < 0:
            raise ValueError(f"document {document.content[:16]} is not in the prompt")
        found.append((document, at))
        start = at + count
    return found


def _next(data: bytes, document: Document, start: int) -> int:
    """First token from `start` on at which a document begins in a prompt's bytes; -1: none."""
    wanted, size = document.token_ids.tobytes(), document.token_ids.itemsize
    at = data.find(wanted, start * size)
    while at % size and at >= 0:
        at = data.find(wanted, at + 1)
    return at // size


def _beyond(start: int, count: int, taken: Sequence[tuple[int, int]]) -> int:
    """Token from which to look again, if `count` tokens from `start` on overlap `taken`; else 0."""
    for first, stop in taken:
        if start < stop and first < start + count:
            return stop if start >= first else start + 1
    return 0
