"""Background work in pieces: where its sequences lie, how much of one a forward computes, and how it goes on.

What computes off the request path is a generator that pauses between its forwards, none of which is longer than a link
that arrives meanwhile should wait, and while a tier of the library is silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from prefill_workers.sequence import Run, split_runs

_PIECE_SECONDS = 0.001  # of waiting for an answer

Result = TypeVar("Result")
Pieces = Generator[None, None, Result]  # pauses between pieces, and returns what came of them


@dataclass(frozen=True)
class Scratch:
    """Blocks of `block_size` tokens for sequences that no request waits for.

    `piece`: of how many tokens are left, those that the next forward over them may compute; it may change.
    """

    blocks: Sequence[int]
    block_size: int
    piece: Callable[[int], int]

    @property
    def tokens(self) -> int:
        """Of the longest sequence that fits."""
        return len(self.blocks) * self.block_size

    def split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """What the next forward over these runs computes, and what is left for later ones."""
        return split_runs(runs, self.piece(sum(map(len, runs))))


class ResumableTask(Generic[Result]):
    """Work under way: `seconds` that it has taken, pauses left out, and its `result` once it is over."""

    result: Result

    def __init__(self, pieces: Pieces[Result]) -> None:
        self._pieces = pieces
        self.seconds = 0.0

    def go_on(self) -> bool:
        """Do the next piece; True when it was the last."""
        began = time.perf_counter()
        try:
            next(self._pieces)
        except StopIteration as end:
            self.result = end.value
            return True
        finally:
            self.seconds += time.perf_counter() - began
        return False


def at_once(pieces: Pieces[Result]) -> Result:
    """Do all pieces, one after the other."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def aside(others: Executor, call: Callable[..., Result], *arguments: object) -> Pieces[Result]:
    """What a call comes to that may wait for a tier: another thread makes it.

    Raises what it does.
    """
    answer = others.submit(call, *arguments)
    while not answer.done():
        wait([answer], _PIECE_SECONDS)
        if not answer.done():
            yield
    return answer.result()
