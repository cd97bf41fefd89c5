"""Resumable background work: its scratch sequences, and how much of it a forward computes.

What computes off the request path is a generator that pauses between its forwards, none of which is longer than a link
that arrives meanwhile should wait, and while a tier of the library is silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.sequence import LinkSequence, Run, complement, split_runs

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
        """Tokens of the longest sequence that fits."""
        return len(self.blocks) * self.block_size

    def split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """Runs of the next forward, and those left for later ones."""
        return split_runs(runs, self.piece(sum(map(len, runs))))

    def compute(self, engine: PrefillEngine, sequence: LinkSequence, start: int = 0) -> Pieces[float]:
        """Compute a sequence's KV from a token on, a forward a piece; returns their seconds."""
        seconds, left = 0.0, complement([], len(sequence), start)
        while left:
            runs, left = self.split(left)
            began = time.perf_counter()
            engine.forward([(sequence, runs)])
            seconds += time.perf_counter() - began
            if left:
                yield
        return seconds


class ResumableTask(Generic[Result]):
    """A resumable task: `seconds` it has run (without pauses), and its `result` at the end."""

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
    """Result of a call that may wait for a tier, made by another thread.

    Raises what it does.
    """
    answer = others.submit(call, *arguments)
    while not answer.done():
        wait([answer], _PIECE_SECONDS)
        if not answer.done():
            yield
    return answer.result()
