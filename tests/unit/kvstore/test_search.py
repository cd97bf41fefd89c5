"""Search in memory: what is found is what a plain loop over everything finds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvstore.search.bm25 import K1, B, Postings
from kvstore.search.filters import AttributeColumns, InvalidFilter, check_filter
from kvstore.search.index import IndexedFile, Part, Query, StoreIndex
from kvstore.search.record import index_record, read_index_record
from kvstore.search.vectors import VectorIndex
from kvstore.search.words import words


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def plain_bm25(rows: dict[int, list[str]], asked: list[str]) -> dict[int, float]:
    """BM25 by its formula, row by row."""
    average = sum(map(len, rows.values())) / len(rows)
    found = {}
    for number, row in rows.items():
        counts, total = Counter(row), 0.0
        for word in set(asked):
            frequency = sum(word in other for other in rows.values())
            idf = math.log(1 + (len(rows) - frequency + 0.5) / (frequency + 0.5))
            tf = counts[word]
            total += idf * tf / (tf + K1 * (1 - B + B * len(row) / average)) if tf else 0.0
        found[number] = total
    return found


@pytest.mark.parametrize("is_merged", [False, True])
def test_bm25_is_its_formula_over_the_rows_that_are_there(is_merged: bool):
    random = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(40)]
    rows = {i: list(random.choice(vocabulary, random.integers(1, 30))) for i in range(200)}
    postings = Postings()
    for i, row in rows.items():
        postings.append(row)
        if is_merged and i == 150:
            postings._merge()
    for gone in (3, 50, 160):
        postings.remove(gone)
        postings.remove(gone)  # a second time changes nothing
        del rows[gone]
    asked = ["w1", "w7", "w7", "unknown"]
    scores, expected = postings.scores(asked), plain_bm25(rows, asked)
    assert np.allclose([scores[i] for i in rows], [expected[i] for i in rows], atol=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.03])
def test_the_nearest_under_any_filter_are_the_exact_ones(share: float):
    random = np.random.default_rng(1)
    vectors = unit(random.normal(size=(3000, 48)))
    index = VectorIndex(48)
    for vector in vectors:
        index.append(vector[None])
    kept = vectors.astype(np.float16).astype(np.float32)
    for number in range(20):
        mask = random.random(3000) < share
        query = unit(vectors[number] + 0.5 * random.normal(size=48))
        rows, scores = index.nearest(query[None], 10, mask)
        exact = np.where(mask, kept @ query, -np.inf)
        assert list(rows) == list(np.argsort(-exact)[:10])
        assert np.allclose(scores, np.sort(exact)[::-1][:10], atol=1e-5)


def test_rows_of_several_vectors_are_ranked_by_their_best_ones():
    random = np.random.default_rng(2)
    rows = [unit(random.normal(size=(count, 16))) for count in random.integers(0, 6, 300)]
    index = VectorIndex(16)
    for row in rows:
        index.append(row)
    query = unit(random.normal(size=(4, 16)))
    found, scores = index.nearest(query, 5, np.ones(300, bool))
    kept = [row.astype(np.float16).astype(np.float32) for row in rows]
    exact = np.array([(query @ row.T).max(axis=1).mean() if len(row) else -np.inf for row in kept])
    assert list(found) == list(np.argsort(-exact)[:5])
    assert np.allclose(scores, exact[found], atol=1e-5)


def test_vectors_that_are_none_are_refused():
    index = VectorIndex(4)
    with pytest.raises(ValueError, match="4 dimensions"):
        index.append(np.ones((1, 3)))
    with pytest.raises(ValueError, match="finite"):
        index.append(np.array([[1, np.nan, 0, 0]]))


FILES: list[dict[str, Any]] = [
    {"year": 1999, "team": "a"},
    {"year": 2010.5, "team": "b"},
    {"team": "b", "good": True},
    {},
]


@pytest.mark.parametrize(
    ("condition", "passing"),
    [
        ({"type": "eq", "key": "team", "value": "b"}, [1, 2]),
        ({"type": "ne", "key": "team", "value": "b"}, [0, 3]),
        ({"type": "gte", "key": "year", "value": 1999}, [0, 1]),
        ({"type": "lt", "key": "year", "value": 2000}, [0]),
        ({"type": "eq", "key": "good", "value": True}, [2]),
        ({"type": "eq", "key": "good", "value": 1}, []),
        ({"type": "in", "key": "year", "value": [1999, 7]}, [0]),
        ({"type": "nin", "key": "team", "value": ["a"]}, [1, 2, 3]),
        (
            {
                "type": "and",
                "filters": [
                    {"type": "eq", "key": "team", "value": "b"},
                    {"type": "or", "filters": [{"type": "gt", "key": "year", "value": 0}]},
                ],
            },
            [1],
        ),
    ],
)
def test_filters_pass_files_as_openai_describes_them(condition: dict[str, Any], passing: list[int]):
    check_filter(condition)
    assert list(np.flatnonzero(AttributeColumns(FILES).mask(condition))) == passing


@pytest.mark.parametrize(
    ("condition", "where"),
    [
        ({"type": "like", "key": "a", "value": "b"}, "filters.type"),
        ({"type": "gt", "key": "a", "value": "b"}, "filters.value"),
        ({"type": "and", "filters": [{"type": "eq", "key": 3, "value": "b"}]}, r"filters.filters\[0\].key"),
        ({"type": "or", "filters": []}, "filters.filters"),
        (7, "filters: not an object"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_by_place(condition: Any, where: str):
    with pytest.raises(InvalidFilter, match=where):
        check_filter(condition)


def file_of(number: int, vector: np.ndarray | None = None) -> IndexedFile:
    part = Part(0, f"content{number}", f"text number{number} about {'bees' if number % 2 else 'boats'}")
    return IndexedFile(f"file{number}", f"{number}.txt", [part], None if vector is None else [vector[None]])


def test_an_index_that_lost_most_of_its_files_finds_as_one_that_never_had_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.search.index._COMPACTED", 20)
    random = np.random.default_rng(3)
    vectors = unit(random.normal(size=(100, 8)))
    lost, never = StoreIndex(8), StoreIndex(8)
    for i, vector in enumerate(vectors):
        lost.put(file_of(i, vector))
    for i in range(100):
        if i % 5:
            assert lost.remove(f"file{i}")
            assert not lost.remove(f"file{i}")
        else:
            never.put(file_of(i, vectors[i]))
    assert len(lost._rows) < 60  # compacted
    query = Query("bees number35", 8, vectors[35][None])
    found, expected = lost.search(query), never.search(query)
    assert [(one.file, round(one.score, 6)) for one in found] == [(one.file, round(one.score, 6)) for one in expected]
    assert found[0].file == "file35"


def test_while_an_index_is_built_anew_it_has_its_size(monkeypatch: pytest.MonkeyPatch):
    index, sizes = StoreIndex(0), list[int]()
    for i in range(30):
        index.put(file_of(i))
    monkeypatch.setattr("kvstore.search.index._COMPACTED", 20)
    monkeypatch.setattr("kvstore.search.index.words", lambda text: sizes.append(len(index)) or words(text))
    for i in range(21):
        index.remove(f"file{i}")
    assert (sizes, len(index)) == ([9] * 9, 9)


def test_a_file_put_twice_is_there_once():
    index = StoreIndex(0)
    index.put(file_of(1))
    index.put(file_of(1))
    assert len(index.search(Query("bees", 10))) == len(index) == 1


def test_without_vectors_words_alone_score_up_to_one():
    index = StoreIndex(0)
    for i in range(5):
        index.put(file_of(i))
    found = index.search(Query("bees number3", 10))
    assert [one.file for one in found] == ["file3", "file1"]
    assert found[0].score == pytest.approx(1.0)
    assert index.search(Query("zebra", 10)) == []


@pytest.mark.parametrize("has_vectors", [True, False])
def test_a_record_gives_back_parts_and_vectors(has_vectors: bool):
    parts = [Part(0, "a", "one\ntwo\n", 1, ((4, 0.1, 0.1, 0.5, 0.2), (4, 0.1, 0.2, 0.5, 0.3))), Part(1, "b", "", 2)]
    vectors = [np.eye(3, dtype=np.float16)[:2], np.zeros((0, 3), np.float16)] if has_vectors else None
    record = index_record(parts, vectors, content="c", owner="t", embedder="e", form="pages-96-1", seconds=1.0)
    back, found = read_index_record(record)
    assert back == parts
    if vectors is None:
        assert found is None
    else:
        assert found is not None
        assert [one.tolist() for one in found] == [one.tolist() for one in vectors]


def test_words_are_stems_and_pairs_of_letters_without_spaces():
    assert words("The Engines' running: ENGINE no. 7!") == ["engin", "run", "engin", "7"]
    assert words("蜜蜂采蜜 honey") == ["蜜蜂", "蜂采", "采蜜", "honey"]


def test_an_index_record_is_counted_with_its_texts():
    part = Part(0, "a", "word " * 10_000)
    record = index_record([part], None, content="c", owner="t", embedder="e", form="f", seconds=1.0)
    assert record.nbytes > 50_000


def test_filters_keep_few_columns_and_refuse_numbers_that_no_float_holds():
    columns = AttributeColumns([{"year": 1.0}])
    for i in range(1000):
        columns.mask({"type": "eq", "key": f"k{i}", "value": 1})
    assert len(columns._columns) <= 64
    assert columns.mask({"type": "eq", "key": "year", "value": 1}).tolist() == [True]
    for wanted in (10**400, [1, 10**400]):
        kind = "in" if isinstance(wanted, list) else "gt"
        with pytest.raises(InvalidFilter, match="too large"):
            check_filter({"type": kind, "key": "year", "value": wanted})
