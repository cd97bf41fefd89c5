"""Segments of a prompt: its chunks, and the text between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from prefill_workers.protocol import LinkRequest
from prefill_workers.sequence import Run

SHORTEST_CUT = 8  # tokens: shorter texts recur by chance, and are no reason to cut another
_CONTEXT = "orbitserve 2026 session segment v1"
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment: tokens `start` up to `stop` of a prompt.

    `id` is equal where tenant, content and tokens are; `chunk` the index of its chunk, None: text.
    """

    id: str
    start: int
    stop: int
    chunk: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def run(self) -> Run:
        """The segment's tokens as a run."""
        return Run(self.start, self.stop)


def segments(request: LinkRequest, known: Iterable[Sequence[int]] = ()) -> list[Segment]:
    """Cut a prompt into segments.

    `known` are texts (token ids) that were segments of the session before: a longer text is cut around them. So the
    last words of one turn, behind which the next turn's prompt goes on, are a segment of both.
    """
    tokens = np.asarray(request.token_ids, _TOKEN)
    pieces = sorted({_packed(text) for text in known if len(text) >= SHORTEST_CUT}, key=len, reverse=True)
    found: list[Segment] = []
    stop = 0

    def text(until: int) -> Iterator[Segment]:
        for start, end in _cut(tokens[stop:until].tobytes(), pieces):
            yield _segment(request.tenant, "", tokens, stop + start, stop + end)

    for i, span in enumerate(request.chunks):
        found += text(span.start)
        found.append(_segment(request.tenant, span.content, tokens, span.start, span.stop, i))
        stop = span.stop
    return [*found, *text(len(tokens))]


def _segment(tenant: str, content: str, tokens: np.ndarray, start: int, stop: int, chunk: int | None = None) -> Segment:
    hasher = blake3(f"{tenant}\0{content}\0".encode(), derive_key_context=_CONTEXT)
    hasher.update(tokens[start:stop].tobytes())
    return Segment(hasher.hexdigest(16), start, stop, chunk)


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, _TOKEN).tobytes()


def _cut(text: bytes, pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """Cut packed tokens around the pieces that they hold, the longest first; (start, stop) in tokens."""
    whole = [(0, len(text))] if text else []
    cuts: list[tuple[int, int]] = []
    for piece in pieces:
        left: list[tuple[int, int]] = []
        for start, stop in whole:
            while (at := _find(text, piece, start, stop)) is not None:
                left.append((start, at))
                start = at + len(piece)
                cuts.append((at, start))
            left.append((start, stop))
        whole = [(start, stop) for start, stop in left if start < stop]
    width = _TOKEN.itemsize
    return [(start // width, stop // width) for start, stop in sorted([*whole, *cuts])]


def _find(text: bytes, piece: bytes, start: int, stop: int) -> int | None:
    """First place of a piece in text[start:stop] that begins with a token."""
    at = text.find(piece, start, stop)
    while at >= 0 and at % _TOKEN.itemsize:
        at = text.find(piece, at + 1, stop)
    return at if at >= 0 else None
