"""Index of one vector store in memory: parts of files, found by meaning, by words, or both.

A store has an index of its own, so that neither what is found nor how it is scored tells of another store.

| ranker | order |
|---|---|
| auto | reciprocal rank fusion of both lists (Cormack et al. 2009): Σ weight / (60 + rank), over the highest possible |
| none | cosine similarity; without vectors BM25 over the best one's |

Scores lie between 0 and 1.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvstore.search.bm25 import Postings
from kvstore.search.filters import AttributeColumns, Attributes
from kvstore.search.grown import Array, GrownArray
from kvstore.search.vectors import VectorIndex
from kvstore.search.words import words

_RRF = 60
_DEPTH = 100  # places of each list that are fused; or five times what is wanted, if more
_COMPACTED = 1024  # rows of removed files that may stay; or as many as of files that are there

Line = tuple[int, float, float, float, float]  # characters; x0, y0, x1, y1 in shares of the page, from its upper left


@dataclass(frozen=True)
class Part:
    """A part of a file: a page, a passage of text, or a picture.

    `number`: from 0. `page`: from 1; None: the file has no pages. `lines`: of a page's text in order, which they cover.
    """

    number: int
    content: str
    text: str = ""
    page: int | None = None
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class IndexedFile:
    """A file's parts and their vectors, each [m, dims], m may be 0; None: words alone."""

    file: str
    filename: str
    parts: Sequence[Part]
    vectors: Sequence[Array] | None = None
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Query:
    """A question to an index.

    `vectors` [q, dims]; None: by words alone. `score_threshold`: what scores less is left out.
    """

    text: str
    count: int
    vectors: Array | None = None
    filters: Mapping[str, Any] | None = None
    ranker: Literal["auto", "none"] = "auto"
    embedding_weight: float = 1.0
    text_weight: float = 1.0
    score_threshold: float = 0.0


@dataclass(frozen=True)
class Found:
    """A part that was found; `box`: rectangle of the query's words, in shares of the page."""

    file: str
    filename: str
    attributes: Attributes
    part: Part
    score: float
    box: tuple[float, float, float, float] | None = None


class StoreIndex:
    """Parts of a store's files. Thread-safe: one call at a time.

    Args:
        dims: of vectors; 0: words alone.
    """

    def __init__(self, dims: int) -> None:
        self._dims = dims
        self._files: dict[str, _File] = {}
        self._lock = threading.RLock()
        self._words, self._vectors = Postings(), VectorIndex(self._dims)
        self._rows: list[tuple[_File, bytes] | None] = []
        self._file_of = GrownArray(np.int32)  # by row: the file's place among all; -1: removed
        self._listed: list[_File] = []
        self._columns: AttributeColumns | None = None
        self._removed = 0

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._rows) - self._removed

    def __contains__(self, file: str) -> bool:
        return file in self._files

    @property
    def vector_bytes(self) -> int:
        """Memory of the vectors, those of files that were removed just now included."""
        return self._vectors.nbytes

    @property
    def files(self) -> Sequence[str]:
        """Ids of the files in it."""
        return list(self._files)

    def put(self, indexed: IndexedFile) -> None:
        """Add a file, or replace it."""
        counted = [words(part.text) for part in indexed.parts]
        packed = list(map(_packed, indexed.parts))
        with self._lock:
            self._put(indexed, counted, packed)

    def _put(self, indexed: IndexedFile, counted: Sequence[Sequence[str]], packed: Sequence[bytes]) -> None:
        self.remove(indexed.file)
        file = _File(indexed.file, indexed.filename, indexed.attributes, len(self._listed), [])
        self._files[indexed.file] = file
        self._listed.append(file)
        self._columns = None
        nothing = np.zeros((0, self._dims), np.float32)
        for i, (stems, whole) in enumerate(zip(counted, packed, strict=True)):
            self._append(file, stems, nothing if indexed.vectors is None else indexed.vectors[i], whole)

    def remove(self, file: str) -> bool:
        """Take a file out. True if it was there."""
        with self._lock:
            return self._remove(file)

    def _remove(self, file: str) -> bool:
        gone = self._files.pop(file, None)
        if gone is None:
            return False
        for row in gone.rows:
            self._rows[row] = None
            self._words.remove(row)
            self._file_of.filled[row] = -1
        self._removed += len(gone.rows)
        if self._removed > max(_COMPACTED, len(self)):
            self._compact()
        return True

    def set_attributes(self, file: str, attributes: Attributes) -> None:
        """Replace a file's attributes, if it is there."""
        with self._lock:
            if file in self._files:
                self._files[file].attributes = attributes
                self._columns = None

    def search(self, query: Query) -> list[Found]:
        """The best parts, best first."""
        with self._lock:
            return self._search(query)

    def _search(self, query: Query) -> list[Found]:
        mask = self._file_of.filled >= 0
        if query.filters is not None:
            if self._columns is None:
                self._columns = AttributeColumns([file.attributes for file in self._listed])
            passing = np.append(self._columns.mask(query.filters), False)  # the last: rows of removed files
            mask = mask & passing[self._file_of.filled]
        if not mask.any():
            return []
        asked = words(query.text)
        depth = max(_DEPTH, 5 * query.count)
        by_meaning, similarity = self._by_meaning(query, depth, mask)
        by_words, matching = self._by_words(asked, depth, mask)
        if query.ranker == "none":
            rows, scores = (by_words, matching) if query.vectors is None else (by_meaning, np.clip(similarity, 0, 1))
        else:
            rows, scores = _fused(
                [(by_meaning, query.embedding_weight), (by_words, query.text_weight)],
                has_both=query.vectors is not None,
            )
        best = [
            (int(row), float(score))
            for row, score in zip(rows[: query.count], scores[: query.count], strict=True)
            if score >= query.score_threshold
        ]
        return [self._found(row, score, asked) for row, score in best]

    def _by_meaning(self, query: Query, depth: int, mask: Array) -> tuple[Array, Array]:
        if query.vectors is None or not query.embedding_weight:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        return self._vectors.nearest(query.vectors, depth, mask)

    def _by_words(self, asked: Sequence[str], depth: int, mask: Array) -> tuple[Array, Array]:
        scores = np.where(mask, self._words.scores(asked), 0.0)
        rows = np.argpartition(-scores, depth)[:depth] if depth < len(scores) else np.arange(len(scores))
        rows = rows[scores[rows] > 0]
        rows = rows[np.lexsort((rows, -scores[rows]))]
        best = scores[rows[0]] if len(rows) else 1.0
        return rows, scores[rows] / best

    def _found(self, row: int, score: float, asked: Sequence[str]) -> Found:
        held = self._rows[row]
        assert held is not None  # masked
        file, packed = held
        part = _unpacked(packed)
        box = _box(part, {word: self._words.weight(word) for word in asked}) if part.lines else None
        return Found(file.id, file.filename, file.attributes, part, score, box)

    def _append(self, file: _File, counted: Sequence[str], vectors: Array, packed: bytes) -> None:
        file.rows.append(len(self._rows))
        self._rows.append((file, packed))
        self._words.append(counted)
        self._vectors.append(vectors)
        self._file_of.append(file.place)

    def _compact(self) -> None:
        """Build everything anew from the files that are there; who asks for its size meanwhile sees no half of it."""
        new = StoreIndex(self._dims)
        for file in self._listed:
            if self._files.get(file.id) is not file:
                continue
            rows, file.place, file.rows = file.rows, len(new._listed), []
            new._listed.append(file)
            for row in rows:
                held = self._rows[row]
                assert held is not None
                vectors = self._vectors.vectors(row).astype(np.float32)
                new._append(file, words(_unpacked(held[1]).text), vectors, held[1])
        self._listed, self._columns, self._removed = new._listed, None, 0
        self._words, self._vectors, self._rows, self._file_of = new._words, new._vectors, new._rows, new._file_of


@dataclass(eq=False)
class _File:
    id: str
    filename: str
    attributes: Attributes
    place: int
    rows: list[int]


def _fused(lists: Sequence[tuple[Array, float]], has_both: bool) -> tuple[Array, Array]:
    """Reciprocal rank fusion of ranked rows with their weights; scores over the highest possible."""
    top = sum(weight for i, (_, weight) in enumerate(lists) if i or has_both) / (_RRF + 1)
    everything = np.concatenate([rows for rows, _ in lists])
    if not len(everything) or not top:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    parts = [weight / (_RRF + 1 + np.arange(len(rows))) for rows, weight in lists]
    rows, where = np.unique(everything, return_inverse=True)
    scores = np.bincount(where, np.concatenate(parts)) / top
    order = np.lexsort((rows, -scores))
    return rows[order], scores[order]


def _box(part: Part, weights: Mapping[str, float]) -> tuple[float, float, float, float] | None:
    """Rectangle around the run of lines that have most of the query's words; None: no line has any."""
    start, values = 0, []
    for line in part.lines:
        values.append(sum(weights.get(word, 0.0) for word in set(words(part.text[start : start + line[0]]))))
        start += line[0]
    if max(values) <= 0:
        return None
    first = last = int(np.argmax(values))
    while first > 0 and values[first - 1] > 0:
        first -= 1
    while last + 1 < len(values) and values[last + 1] > 0:
        last += 1
    boxes = np.array([line[1:] for line in part.lines[first : last + 1]])
    (x0, y0), (x1, y1) = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    return float(x0), float(y0), float(x1), float(y1)


def _packed(part: Part) -> bytes:
    return zlib.compress(json.dumps(part_to_json(part)).encode(), 1)


def _unpacked(packed: bytes) -> Part:
    return part_from_json(json.loads(zlib.decompress(packed)))


def part_to_json(part: Part) -> list[Any]:
    """A part as JSON."""
    return [part.number, part.content, part.text, part.page, part.lines]


def part_from_json(value: Sequence[Any]) -> Part:
    """A part from JSON."""
    number, content, text, page, lines = value
    return Part(number, content, text, page, tuple(tuple(line) for line in lines))
