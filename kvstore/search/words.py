"""Words of a text as BM25 counts them: lower case, stemmed, without common ones.

Runs of Chinese, Japanese or Korean letters, which have no spaces, become their pairs of letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from threading import local

import Stemmer

_WORD = re.compile(r"[^\W_]+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+")
_LONGEST = 64  # characters: what is longer is no word
_STOP = frozenset(  # the commonest English words
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these
    they this to was will with what which how when where who why do does did can has have had been from its i
    you we
    """.split()  # noqa: SIM905
)
_own = local()  # a stemmer keeps a cache, and is for one thread


def words(text: str) -> list[str]:
    """Stems of a text's words, in order, with repetitions."""
    stemmer = getattr(_own, "stemmer", None)
    if stemmer is None:
        stemmer = _own.stemmer = Stemmer.Stemmer("english", 1 << 16)
    plain = unicodedata.normalize("NFKC", text).lower()
    return list(stemmer.stemWords([word for word in _split(plain) if word not in _STOP]))


def _split(text: str) -> Iterator[str]:
    for match in _WORD.finditer(text):
        word = match[0]
        if word.isascii():
            yield word[:_LONGEST]
            continue
        done = 0
        for run in _CJK.finditer(word):
            if run.start() > done:
                yield word[done : run.start()][:_LONGEST]
            letters, done = run[0], run.end()
            yield from (letters[i : i + 2] for i in range(max(1, len(letters) - 1)))
        if done < len(word):
            yield word[done:][:_LONGEST]
