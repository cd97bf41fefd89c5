"""BM25 over rows that come and go: inverted lists, and the latest rows beside them.

score(q, d) = Σ_t idf(t) · tf / (tf + k1 · (1 - b + b · |d| / avg|d|)),  idf(t) = ln(1 + (N - df + ½) / (df + ½))

(Robertson and Zaragoza 2009, with Lucene's idf.) Counts are those of the rows that are there, so that scores do not
tell what was removed: two replicas with the same rows score the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvstore.search.grown import Array, GrownArray

K1, B = 1.5, 0.75  # k1 by Cranfield's queries; usual is 1.2
_TAIL = 1 << 14  # entries that may wait to be sorted into the inverted lists; or an eighth of those, if more


class Postings:
    """Words of rows, which are numbered from 0 in the order they come.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of words
        self._rows: list[tuple[Array, Array] | None] = []  # by row: word numbers and their counts; None: removed
        self._lengths = GrownArray(np.float32)
        self._frequencies = GrownArray(np.int32)  # by word: rows that have it
        self._living, self._total = 0, 0.0  # rows, and their words
        self._starts = np.zeros(1, np.int64)  # by word: its list in the two arrays below
        self._listed: Array = np.zeros(0, np.int32)
        self._counts: Array = np.zeros(0, np.float32)
        self._merged, self._waiting = 0, 0  # rows in the lists; entries of the others
        self._tail: tuple[Array, Array, Array] | None = None  # these others: words, rows, counts; None: to be made

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, words: Sequence[str]) -> None:
        """Add the next row."""
        counted = Counter(words)
        numbers = np.fromiter((self._number(word) for word in counted), np.int32, len(counted))
        self._rows.append((numbers, np.fromiter(counted.values(), np.float32, len(counted))))
        self._lengths.append(len(words))
        self._frequencies.filled[numbers] += 1
        self._living, self._total = self._living + 1, self._total + len(words)
        self._waiting += len(counted)
        self._tail = None

    def remove(self, row: int) -> None:
        """Take a row out; its number is not given again."""
        taken = self._rows[row]
        if taken is None:
            return
        self._rows[row] = None
        self._frequencies.filled[taken[0]] -= 1
        self._living -= 1
        self._total -= float(self._lengths.filled[row])

    def scores(self, words: Sequence[str]) -> Array:
        """BM25 of every row [rows], fp32; 0 for rows without any of the words.

        Removed rows have scores, too: the caller knows them.
        """
        found = np.zeros(len(self._rows), np.float32)
        asked = [number for word in dict.fromkeys(words) if (number := self._numbers.get(word)) is not None]
        if not asked or not self._living:
            return found
        if self._waiting > max(_TAIL, len(self._listed) // 8):
            self._merge()
        lengths = self._lengths.filled
        average = max(self._total / self._living, 1.0)
        tail = self._tail = self._tail or _triples(self._rows, self._merged)
        for number in asked:
            frequency = float(self._frequencies.filled[number])
            weight = np.log1p((self._living - frequency + 0.5) / (frequency + 0.5))
            for rows, counts in (self._inverted(number), _of(tail, number)):
                if len(rows):
                    norm = K1 * (1 - B + B * lengths[rows] / average)
                    found[rows] += np.float32(weight) * counts / (counts + norm)
        return found

    def weight(self, word: str) -> float:
        """Inverse document frequency of a word; 0 if no row has it."""
        number = self._numbers.get(word)
        if number is None or not self._frequencies.filled[number]:
            return 0.0
        frequency = float(self._frequencies.filled[number])
        return float(np.log1p((self._living - frequency + 0.5) / (frequency + 0.5)))

    def _number(self, word: str) -> int:
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self._numbers)
            self._frequencies.append(0)
        return number

    def _inverted(self, number: int) -> tuple[Array, Array]:
        if number + 1 >= len(self._starts):
            return self._listed[:0], self._counts[:0]
        part = slice(int(self._starts[number]), int(self._starts[number + 1]))
        return self._listed[part], self._counts[part]

    def _merge(self) -> None:
        """Sort all rows into inverted lists."""
        numbers, rows, counts = _triples(self._rows, 0)
        order = np.argsort(numbers, kind="stable")
        self._listed, self._counts = rows[order], counts[order]
        self._starts = np.searchsorted(numbers[order], np.arange(len(self._numbers) + 1))
        self._merged, self._waiting, self._tail = len(self._rows), 0, None


def _triples(rows: Sequence[tuple[Array, Array] | None], first: int) -> tuple[Array, Array, Array]:
    """Word numbers, row numbers and counts of the rows from `first` on that are there."""
    there = [(first + i, row) for i, row in enumerate(rows[first:]) if row is not None]
    if not there:
        return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    numbers = np.concatenate([row[0] for _, row in there])
    where = np.repeat(np.array([i for i, _ in there], np.int32), [len(row[0]) for _, row in there])
    return numbers, where, np.concatenate([row[1] for _, row in there])


def _of(triples: tuple[Array, Array, Array], number: int) -> tuple[Array, Array]:
    at = np.flatnonzero(triples[0] == number)
    return triples[1][at], triples[2][at]
