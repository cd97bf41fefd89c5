"""Queue of images that a prefill worker encodes itself, where no vision encoder does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.image_batches import Pixels


@dataclass(eq=False)
class _Call:
    """Images of one call.

    `left`: those still to be encoded, in handfuls; None: it has not begun.
    """

    items: Sequence[Pixels]
    done: Future[list[Tensor]]
    left: deque[list[Pixels]] | None = None
    found: list[Tensor] = field(default_factory=list)

    def end(self, outcome: list[Tensor] | Exception) -> None:
        """Answer the caller, unless the call was cancelled."""
        with suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.done.set_exception(outcome)
            else:
                self.done.set_result(outcome)


class EncodeQueue:
    """FIFO queue of calls whose images are encoded a handful at a time.

    The loop's own thread takes from it; others `add` under its lock.

    Attributes:
        failing: handfuls in a row for which the device was lost.
    """

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine
        self._calls: deque[_Call] = deque()
        self.failing = 0

    def __len__(self) -> int:
        """Number of calls that wait or are under way."""
        return len(self._calls)

    def add(self, items: Sequence[Pixels]) -> Future[list[Tensor]]:
        """Queue images; the future gives their embeddings, [tokens, hidden] each."""
        done: Future[list[Tensor]] = Future()
        self._calls.append(_Call(items, done))
        return done

    def turn(self) -> bool:
        """Encode a handful of the call that waits longest. True if that went well.

        Whatever is wrong with images concerns their call alone.
        """
        call = self._calls[0]
        try:
            if call.left is None:
                call.left = deque(self._engine.handfuls(call.items))
            if call.left:
                call.found += self._engine.encode(call.left.popleft())
                self.failing = 0
            if not call.left:
                self._calls.popleft().end(call.found)
        except Exception as error:
            self.failing += isinstance(error, torch.AcceleratorError)  # what else fails is those images' own
            self._calls.popleft().end(error)
            return False
        return True

    def drop_cancelled(self) -> None:
        """Drop cancelled calls; under the loop's lock."""
        for call in [call for call in self._calls if call.done.cancelled()]:
            self._calls.remove(call)

    def refuse(self, error: Exception) -> None:
        """Raise an error to all callers."""
        while self._calls:
            self._calls.popleft().end(error)
