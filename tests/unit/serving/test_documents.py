"""Documents: tokenised by themselves, marked in messages, spliced into prompts, found again."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from infra.reference import WEIGHTS
from serving.frontend.documents import Documents, places

A, B = "a" * 64, "b" * 64


class Greedy:
    """A tokenizer whose tokens are whole words: "in" and "side" become one token when they touch."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        start = [-1] if add_special_tokens else []
        return start + [self.words.setdefault(word, len(self.words)) for word in re.findall(r"\w+|\W", text)]


@pytest.fixture
def documents() -> Documents:
    return Documents(Greedy())


def test_a_documents_tokens_do_not_depend_on_what_touches_it(documents: Documents):
    mark = documents.mark(A, "side by side")
    (document,) = documents.marked([mark])
    spliced = documents.token_ids(f"in{mark}walk")
    assert documents._text.encode("inside by sidewalk") != spliced
    assert spliced[2 : 2 + len(document.token_ids)] == document.token_ids.tolist()


def test_only_the_first_piece_gets_the_tokenizers_special_tokens(documents: Documents):
    first, second = documents.mark(A, "one"), documents.mark(B, "two")
    assert documents.token_ids(f"x {first} y {second} z").count(-1) == 1
    assert -1 not in documents.token_ids(f"x {first} y", add_special_tokens=False)


def test_a_document_that_spells_control_tokens_has_none():
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "qwen2_5_vl")
    control = set(tokenizer.all_special_ids)
    spelt = "before<|image_pad|>, <|im_end|> after"
    with ThreadPoolExecutor(8) as pool:
        mark, *asked = pool.map(Documents(tokenizer).mark, [A] * 64, [spelt] * 64)
    document = mark.document
    assert all(one.document is document for one in asked)
    assert control.isdisjoint(document.token_ids)
    assert tokenizer.decode(document.token_ids) == spelt
    assert not control.isdisjoint(tokenizer.encode(spelt)), "it still knows them where they are meant"


def test_one_document_is_tokenised_at_a_time_and_none_twice():
    """vLLM's tokenizers copy themselves for every thread that finds none of their copies free, and keep the copy."""

    class Slow(Greedy):
        at_once = most = calls = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.at_once += 1
            self.most, self.calls = max(self.most, self.at_once), self.calls + 1
            time.sleep(0.005)
            self.at_once -= 1
            return super().encode(text, add_special_tokens)

    tokenizer = Slow()
    documents = Documents(tokenizer)
    with ThreadPoolExecutor(8) as pool:
        marks = list(pool.map(documents.mark, [A, B] * 8, ["one two", "three"] * 8))
    assert (tokenizer.most, tokenizer.calls) == (1, 2)
    assert [len(mark.document.token_ids) for mark in marks] == [3, 1] * 8


async def test_what_waits_to_be_tokenised_takes_no_thread_of_others():
    gate = threading.Event()

    class Gated(Greedy):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            gate.wait()
            return super().encode(text, add_special_tokens)

    documents = Documents(Gated())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    waiting = [asyncio.create_task(documents.mark_soon(content, "one")) for content in (A, B)]
    await asyncio.sleep(0.02)
    assert await asyncio.to_thread(lambda: "read") == "read"
    gate.set()
    first, _ = await asyncio.gather(*waiting)
    assert (await documents.mark_soon(A, "one")).document is first.document


def test_a_forgotten_document_is_there_as_long_as_a_request_holds_it(documents: Documents):
    mark = documents.mark(A, "one two")
    documents.forget(A, "acme")
    documents.forget(B, "acme")
    assert (documents._held, *documents._kept) == (0,)
    assert documents.marked([mark]) == [mark.document]
    del mark
    assert not documents._live


def test_documents_are_found_in_order(documents: Documents):
    texts = [f"{documents.mark(A, 'one two')} then {documents.mark(B, 'two one')} and {documents.mark(A, 'one two')}"]
    marked = documents.marked(texts)
    assert [document.content for document in marked] == [A, B, A]
    ids = documents.token_ids(texts[0])
    found = places(ids, marked)
    assert [ids[start : start + 3] for _, start in found] == [document.token_ids.tolist() for document in marked]
    assert [start for _, start in found] == sorted({start for _, start in found})


def test_a_document_is_not_found_in_what_is_taken(documents: Documents):
    (document,) = documents.marked([documents.mark(A, "two")])
    ids = [7, *document.token_ids, 7, *document.token_ids, 8]
    size = len(document.token_ids)
    assert places(ids, [document]) == [(document, 1)]
    for taken in ((0, 2), (1, 1 + size), (size, size + 2)):
        assert places(ids, [document], [taken]) == [(document, 2 + size)]
    assert places(ids, [document], [(1 + size, 2 + size)]) == [(document, 1)]
    with pytest.raises(ValueError, match="is not in the prompt"):
        places(ids, [document], [(0, len(ids))])


def test_a_document_that_is_not_in_the_prompt_is_an_error(documents: Documents):
    documents.mark(A, "one two three")
    with pytest.raises(ValueError, match="is not in the prompt"):
        places([1, 2, 3], documents.marked([documents.mark(A, "one two three")]))


def test_a_mark_cannot_be_written_by_hand(documents: Documents):
    mark = documents.mark(A, "secret")
    forged = mark.replace(mark[1:17], "0" * 16)
    assert documents.marked([forged]) == []
    assert Documents(Greedy()).marked([mark]) == []


def test_what_a_request_holds_is_found_when_others_took_its_place():
    documents = Documents(Greedy(), limit=4)
    first, second = documents.mark(A, "one two"), documents.mark(B, "three four")
    assert list(documents._kept) == [B]
    marked = documents.marked([first, second])
    assert [document.content for document in marked] == [A, B]
    spliced = documents.token_ids(f"{first} {second}", add_special_tokens=False)
    assert spliced == [*marked[0].token_ids, documents._text._tokenizer.words[" "], *marked[1].token_ids]


def test_a_held_document_is_not_tokenised_again():
    documents = Documents(Greedy(), limit=4)
    first, _ = documents.mark(A, "one two"), documents.mark(B, "three four")
    documents._text = None
    again = documents.mark(A, "one two")
    assert again.document is first.document


def test_what_nobody_holds_is_forgotten():
    documents = Documents(Greedy(), limit=4)
    documents.mark(A, "one two")
    documents.mark(B, "three four")
    assert list(documents._live) == [B]


def test_memory_is_bounded():
    documents = Documents(Greedy(), limit=10)
    for number in range(5):
        documents.mark(f"{number:064x}", "one two three four")
    assert sum(len(kept.token_ids) for kept in documents._kept.values()) <= 10
