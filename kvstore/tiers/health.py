"""Circuit breakers of a tier: pauses after failures, and bounds on questions in flight."""

from __future__ import annotations

import threading
import time


class Breaker:
    """Circuit breaker: open for a while after several failures in a row.

    After that pause every further failure opens it again, until the tier succeeds.
    """

    def __init__(self, failures: int, cooldown_s: float) -> None:
        self._allowed = failures
        self._cooldown = cooldown_s
        self._failures = 0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """True while the tier must not be asked."""
        return time.monotonic() < self._until

    def succeeded(self) -> None:
        """Count a success: the failures in a row end."""
        self._failures = 0

    def failed(self) -> None:
        """Count a failure, or an answer that came too late."""
        self._failures += 1
        if self._failures >= self._allowed:
            self._until = time.monotonic() + self._cooldown


class Questions:
    """Unanswered look-ups of a tier, `most` at once: no more threads wait for a silent one.

    One that has no answer after `patience_s` is late, even if a caller still waits. Thread-safe.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience = patience_s
        self._changed = threading.Condition()
        self._asked: dict[object, float] = {}  # since when
        self._late: set[object] = set()

    def begin(self) -> object | None:
        """Take a place, waiting for one until it would be late; None if there is none.

        Returns None at once if all questions are late.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._most or len(self._late) == self._most, self._patience)
            if self._taken >= self._most:
                return None
            question = object()
            self._asked[question] = time.monotonic()
            return question

    def late(self) -> int:
        """Number of questions that became late since the last call."""
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
        """Free a question's place. True if it was answered, or failed, before it counted as late."""
        with self._changed:
            self._late.discard(question)
            in_time = self._asked.pop(question, None) is not None
            self._changed.notify()
            return in_time

    @property
    def _taken(self) -> int:
        return len(self._asked) + len(self._late)


class Health:
    """Availability of one tier for reads, look-ups and writes. Thread-safe.

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
        self._hung = 0  # reads that were late for a caller and go on

    @property
    def is_suspended(self) -> bool:
        """True after too many failures, or while all read threads hang in the tier."""
        return self._hung >= self._most_reads or self.reads.is_open or self.look_ups.is_open

    @property
    def accepts_writes(self) -> bool:
        """True if the tier may be written to."""
        return not (self.is_suspended or self.writes.is_open)

    def read_hangs(self) -> None:
        """Note that a read is late for a caller, and goes on."""
        with self._lock:
            self._hung += 1

    def hung_read_ended(self) -> None:
        """Note that such a read has ended."""
        with self._lock:
            self._hung -= 1
