"""What text has to do with the keys of patches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_workers.link.keys import cacheable, contexts
from prefill_workers.modes import FreeText, Text
from prefill_workers.protocol import ChunkSpan, LinkRequest

PREFIX = (7, 8)
FREE = FreeText(between=2, before=3)
PAGE = [99] * 3


def request(texts: list[list[int]], text: Text = Text.AUTO, head: int = 0) -> LinkRequest:
    """A request with a page behind each of `texts`, of which the first holds the fixed prefix."""
    tokens: list[int] = []
    spans = []
    for words in texts:
        tokens += words
        spans.append(ChunkSpan("page", "image", len(tokens), len(tokens) + len(PAGE), len(tokens), len(PAGE)))
        tokens += PAGE
    return LinkRequest("request", [*tokens, 1], tuple(spans), prefix=PREFIX, text=text, head=head)


def test_a_few_words_key_nothing_and_more_key_all_text_between_the_chunks():
    found = contexts(request([[7, 8, 1, 2, 3], [4], [5, 6, 5], [4], []]), FREE)
    assert found[:2] == [PREFIX, PREFIX]
    assert len({*found}) == 4, "each of the others has its own"
    assert {context[:3] for context in found[2:]} == {(*PREFIX, -1)}
    alike = contexts(request([[1, 1], [4], [5, 6, 5], [4], [1]]), FREE)
    assert alike[:4] == found[:4], "whatever stands before the first chunk, or behind one"
    assert not {*alike[4:]} & {*found}
    other = contexts(request([[7, 8, 1, 2, 3], [3], [5, 6, 5], [4], []]), FREE)
    assert not {*other[2:]} & {*found}, "short text counts where other text is long"


def test_more_than_a_little_text_before_the_first_chunk_keys_the_patches_of_all():
    little, much = (
        contexts(request([[7, 8, 1, 2, 3], [], [4]]), FREE),
        contexts(request([[7, 8, 1, 2, 3, 4], [], [4]]), FREE),
    )
    assert little == [PREFIX] * 3
    assert PREFIX not in much
    assert much == contexts(request([[7, 8, 1, 2, 3, 4], [], [4]]), FREE)
    other = contexts(request([[7, 8, 1, 2, 3, 5], [], [4]]), FREE)
    assert not {*much} & {*other}, "of another user's words nothing is known"


def test_what_the_template_writes_before_a_conversation_is_no_text_of_it():
    template = [50, 51, 7, 8, 52, 53]
    texts = [[*template, 1, 2, 3], [], [4]]
    assert contexts(request(texts, head=6), FREE) == [PREFIX] * 3
    assert PREFIX not in contexts(request(texts), FREE), "all of it counts where its head is not known"
    long = [[*template, 1, 2, 3, 4]], [[60, *template, 1, 2, 3, 4]]
    one, other = (contexts(request(texts, head=head), FREE) for texts, head in zip(long, (6, 7), strict=True))
    assert one == other, "a template that writes the date keys nothing by it"


def test_a_head_that_reaches_into_a_chunk_makes_no_request():
    with pytest.raises(ValueError, match="a head of 4 tokens overlaps chunk 1, which begins at 3"):
        request([[7, 8, 1]], head=4)


@pytest.mark.parametrize("text", Text)
def test_a_request_may_say_that_all_text_keys_or_none(text: Text):
    found = contexts(request([[7, 8, 1], [4], []], text), FreeText(8, 8))
    if text is Text.STRICT:
        assert len({*found, PREFIX}) == 4
        assert not {*contexts(request([[7, 8, 2], [4], []], text), FreeText(8, 8))} & {*found}
    else:
        assert found == [PREFIX] * 3


@given(*[st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4)] * 2)
def test_different_text_never_has_the_same_context(one: list[list[int]], other: list[list[int]]):
    """Not where only its cuts differ, either."""
    ours, theirs = (contexts(request(texts, Text.STRICT), FREE) for texts in (one, other))
    assert (ours == theirs) == (one == other)


def test_without_chunks_there_is_nothing_to_key():
    assert contexts(LinkRequest("request", [1, 2, 3], prefix=PREFIX), FREE) == []


@pytest.mark.parametrize("text", Text)
def test_what_stands_behind_text_that_its_key_leaves_out_teaches_nothing(text: Text):
    found = cacheable(request([[7, 8, 1, 1, 1], [4], [5, 6, 5], [4]], text), FREE)
    assert found == ([True, True, False, False] if text is Text.FREE else [True] * 4)


@pytest.mark.parametrize("spans", [[(2, 6), (5, 6)], [(2, 4), (1, 2)], [(3, 2)]], ids=str)
def test_chunks_that_overlap_or_are_out_of_order_make_no_request(spans: list[tuple[int, int]]):
    chunks = tuple(ChunkSpan("page", "image", start, stop, start, stop - start) for start, stop in spans)
    with pytest.raises(ValueError, match="overlaps"):
        LinkRequest("request", [0] * 8, chunks)
