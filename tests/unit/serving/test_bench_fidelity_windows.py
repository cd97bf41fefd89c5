"""Windows that slide, measured: histories of prose, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from serving.bench.fidelity import windows
from serving.bench.fidelity.bench import figures_of
from serving.bench.fidelity.reader import Page, Prompt
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.window_cases import ACTION, ASKED, BEHIND, PAGE, Prose
from serving.bench.kept import Kept


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


def test_progress_tells_what_is_left_at_the_pace_so_far():
    now, told = [0.0], Console(record=True, width=120, quiet=False, file=StringIO())
    progress = windows.Progress(told, parts=5, count=40, clock=lambda: now[0])
    progress.begin("kept from a run before")
    progress.begin("survivors")
    now[0] = 24.0
    progress.measured(8)
    assert "8 of 40 cases, 3.0 s each; about 8 minutes left" in told.export_text(clear=False)
    progress.begin("recalled")
    now[0] = 24.0 + 88.0
    progress.measured(8)
    assert "8 of 40 cases, 7.0 s each; about 13 minutes left" in told.export_text()


def test_tables_name_arms_by_slides_and_what_turned_over(monkeypatch: pytest.MonkeyPatch):
    def scored(*arms: str) -> dict[str, Scores]:
        return {
            arm: Scores([True] * 3, [0.01 * i] * 3, [(1, 2), (3, 4), (5, i)], [0.0] * 3, [0.0] * 3)
            for i, arm in enumerate(("exact", *arms))
        }

    monkeypatch.setattr(windows, "survivors", lambda *_: scored("kept", "blind"))
    monkeypatch.setattr(windows, "recalled", lambda *_: scored("stale_20", "fresh", "blind"))
    cases: Any = SimpleNamespace(splits=("prose",), has_answers=False)
    nothing: Any = None
    found = dict(windows.tables(cases, nothing, nothing, 3, Kept(None), Console(quiet=True)))
    assert "accuracy of windows" not in found
    assert "flip_recover of windows" not in found, "of three cases none is told, and an empty table cannot be shown"
    figures = figures_of("real", {f"real: {name}": table for name, table in found.items()})
    assert figures["real.prose.kept_after_8.eta"] == pytest.approx(0.5)
    assert figures["real.prose.blind_recalled.kl"] == pytest.approx(0.03)
    assert figures["real.prose.stale_20.same_tokens"] == pytest.approx(5 / 6)
    assert figures["real.prose.fresh.eta"] == pytest.approx(1 / 3)
    assert {"real.prose.exact_recalled.kl", "real.prose.exact_after_1.kl"} <= figures.keys()
