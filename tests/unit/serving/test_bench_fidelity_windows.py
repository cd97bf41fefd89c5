"""Histories of prose that windows slide over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from serving.bench.fidelity.reader import Page, Prompt
from serving.bench.fidelity.window_cases import ACTION, ASKED, BEHIND, PAGE, Prose


class Reader:
    """Counts tokens: each is its place in all that was read, so that a document's follow one another."""

    read = 0

    def ids(self, text: str) -> list[int]:
        count = len(text) // 4
        self.read += count + 1
        return list(range(self.read - count, self.read))

    def lay_out(
        self, head: Sequence[int], pages: Sequence[Page], question: Sequence[int], answer: Sequence[int]
    ) -> Any:
        return [*(token for page in pages for token in page.token_ids), *question, *answer]


def test_pages_and_words_take_turns_and_the_document_goes_on_behind_them():
    cases = list(Prose(Reader()).draw("prose", 4, 3, 5))
    assert len(cases) == 5
    for case in cases:
        sizes = [len(segment.token_ids) for segment in case.segments]
        assert sizes[::2] == [PAGE] * 4
        assert all(ACTION[0] <= size < ACTION[1] for size in sizes[1::2])
        whole: Prompt | Any = case.ask(case.segments)
        assert whole == list(range(whole[0], whole[0] + sum(sizes) + BEHIND + ASKED))
    first = [case.ask(case.segments) for case in cases]
    assert all(before[-1] < after[0] for before, after in pairwise(first)), "none overlaps another"


def test_long_histories_are_as_many_as_the_documents_hold():
    held = len(list(Prose(Reader()).draw("prose", 60, 3, 100)))
    assert 0 < held < 32
    assert len(list(Prose(Reader()).draw("prose", 4, 3, 100))) == 32, "a table's most"
