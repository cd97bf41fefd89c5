"""Latest requests of a prefill worker, which background work gives way to, and forwards."""

from __future__ import annotations

import time


class Activity:
    """Times of a prefill loop's latest requests and forwards. From any thread.

    Args:
        patience: seconds for which background work gives way to a request.

    Attributes:
        last_expected, last_finished: times at which a request was said to be on its way, and at which a link had
            finished, last (`time.perf_counter`).
        progressed: time at which the engine last computed something (`time.monotonic`).
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.last_expected = self.last_finished = -patience
        self.progressed = time.monotonic()

    def expect(self) -> None:
        """Note a request that is on its way."""
        self.last_expected = time.perf_counter()

    def note_finished(self) -> None:
        """Note a link that has finished."""
        self.last_finished = time.perf_counter()

    def note_computed(self) -> None:
        """Note that the engine has computed something."""
        self.progressed = time.monotonic()

    @property
    def last_request(self) -> float:
        """Time at which a request last came or was answered (`time.perf_counter`)."""
        return max(self.last_expected, self.last_finished)
