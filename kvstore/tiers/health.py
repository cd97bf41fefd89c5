"""When a tier is left alone: after failures in a row, and while questions that it does not answer take all places."""

from __future__ import annotations

import threading
import time


class Breaker:
    """Leaves a tier alone for a while after several failures in a row; after that, until it succeeds, after each."""

    def __init__(self, failures: int, cooldown_s: float) -> None:
        self._allowed = failures
        self._cooldown = cooldown_s
        self._failures = 0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether the tier is left alone."""
        return time.monotonic() < self._until

    def succeeded(self) -> None:
        """The tier did what it was asked for."""
        self._failures = 0

    def failed(self) -> None:
        """The tier did not, or not in time."""
        self._failures += 1
        if self._failures >= self._allowed:
            self._until = time.monotonic() + self._cooldown


class Questions:
    """What a tier was asked and has not answered yet, `most` at once: no more threads wait for a silent one.

    One that has no answer after `patience_s` is late, whoever waits for it still. Thread-safe.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience = patience_s
        self._changed = threading.Condition()
        self._asked: dict[object, float] = {}  # since when
        self._late: set[object] = set()

    def begin(self) -> object | None:
        """A question's place, waited for until it would be late; None: there is none, at once where all are late."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._most or len(self._late) == self._most, self._patience)
            if self._taken >= self._most:
                return None
            question = object()
            self._asked[question] = time.monotonic()
            return question

    def late(self) -> int:
        """How many are late that were not when this was last called."""
        with self._changed:
            before = time.monotonic() - self._patience
            late = [question for question, since in self._asked.items() if since < before]
            for question in late:
                del self._asked[question]
            self._late.update(late)
            if late:
                self._changed.notify_all()
            return len(late)

    def end(self, question: object) -> bool:
        """The question was answered, or failed. Returns whether that was before it counted as late."""
        with self._changed:
            self._late.discard(question)
            in_time = self._asked.pop(question, None) is not None
            self._changed.notify()
            return in_time

    @property
    def _taken(self) -> int:
        return len(self._asked) + len(self._late)


class Health:
    """Whether one tier is to be asked at all, and whether it takes writes. Thread-safe.

    Look-ups are counted by themselves: a tier that says what it holds may still not give it. So are writes: one that is
    full or read-only gives what it holds all the same.

    Args:
        failures, cooldown_s: see `Breaker`. reads: how many can go on at once. questions, patience_s: see `Questions`.
    """

    def __init__(self, failures: int, cooldown_s: float, reads: int, questions: int, patience_s: float) -> None:
        self.reads, self.look_ups, self.writes = (Breaker(failures, cooldown_s) for _ in range(3))
        self.questions = Questions(questions, patience_s)
        self._most_reads = reads
        self._lock = threading.Lock()
        self._hung = 0  # reads that came too late for somebody and go on

    @property
    def left_alone(self) -> bool:
        """Whether the tier failed too often just now, or all threads that could read from it hang in it."""
        return self._hung >= self._most_reads or self.reads.open or self.look_ups.open

    @property
    def takes_writes(self) -> bool:
        """Whether the tier is to be given anything."""
        return not (self.left_alone or self.writes.open)

    def read_hangs(self) -> None:
        """A read came too late for somebody, and goes on."""
        with self._lock:
            self._hung += 1

    def hung_read_ended(self) -> None:
        """Such a read has ended."""
        with self._lock:
            self._hung -= 1
