"""Calls on all tensor-parallel ranks of an engine: answers, errors, time-outs, times."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import count
from typing import Any

from infra.pace import Pace
from prefill_workers.engine.device_timer import DeviceSpan
from prefill_workers.engine.rank_errors import Failure

_ANSWER_SECONDS = 600.0  # longer than any call takes: a rank that is silent so long waits for one that failed
_FORWARD_SECONDS = 60.0  # for a forward at the least, once forwards' pace is known: a new shape may compile kernels
_FORWARD_MARGIN = 10.0  # times what a forward is expected to take
_TELLING_TOKENS = 512.0  # shorter forwards take mostly their fixed part
_FORWARD = "forward"


class RankCalls:
    """The worker extension of every rank, called by vLLM's executor.

    Args:
        llm: vLLM's engine.
        ranks: how many there are.

    Attributes:
        silent: a rank does not answer, and never will.
        times_on_device: whether `timed` calls have a span; the engine's owner finds out.
    """

    def __init__(self, llm: Any, ranks: int) -> None:
        self._llm = llm
        # vLLM's executor of several ranks matches answers to calls by their order; requests are planned on many threads
        self._lock = threading.Lock() if ranks > 1 else nullcontext()
        self._pace = Pace(_TELLING_TOKENS)
        self._numbers = count()
        self._spans: dict[int, DeviceSpan] = {}
        self.silent = self.times_on_device = False

    def all(self, method: str, *arguments: Any, tokens: int = 0) -> list[Any]:
        """Results of all ranks.

        Args:
            tokens: of a forward through all layers, whose time-out follows from the pace of earlier ones.

        Raises what the first of those that failed raised, once all have answered.

        TimeoutError: one does not answer, and never will; what it said later would be taken for another call's answer.
        """
        with self._lock:
            if self.silent:
                raise TimeoutError("a rank of the engine does not answer any more")
            began = time.monotonic()
            try:
                answers = self._llm.collective_rpc("answer", timeout=self._patience(tokens), args=(method, *arguments))
            except TimeoutError:
                self.silent = True
                raise
            if tokens:
                self._pace.learn(_FORWARD, tokens, time.monotonic() - began)
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error
        return list(answers)

    def one(self, method: str, *arguments: Any, tokens: int = 0) -> Any:
        """Result of the first rank."""
        return self.all(method, *arguments, tokens=tokens)[0]

    def timed(self, method: str, *arguments: Any, tokens: int = 0) -> tuple[Any, DeviceSpan | None]:
        """Result of the first rank, and the call's time on the device.

        `note_times` will fill it in. None on a CPU, where calls end when they have been computed.
        """
        if not self.times_on_device:
            return self.one(method, *arguments, tokens=tokens), None
        number, span = next(self._numbers), DeviceSpan()
        result = self.one("timed", number, method, *arguments, tokens=tokens)
        self._spans[number] = span
        return result, span

    def note_times(self) -> None:
        """Fill in the spans of calls that the device has finished; after one that has waited for it."""
        if self._spans:
            for number, seconds in self.one("take_times").items():
                if (span := self._spans.pop(number, None)) is not None:  # else another rank failed in that call
                    span.seconds = seconds

    def _patience(self, tokens: int) -> float:
        expected = self._pace.seconds(_FORWARD, tokens) if tokens else None
        if expected is None:
            return _ANSWER_SECONDS
        return max(_FORWARD_SECONDS, _FORWARD_MARGIN * expected)
