"""Loads from a tier in flight: shared by their callers, layers usable as they arrive."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from kvstore.records.record import Record


class Arrival(NamedTuple):
    """Progress of a load: the first `layers` of all `of` layers, after so many seconds."""

    record: Record
    layers: int
    of: int
    seconds: float


class Loading(Future["Record | None"]):
    """A load in flight; its result is None on a miss.

    One is shared by all callers that wait for the same record. Where a tier can tell, layers may be used as they come
    in, before the record as a whole is known to be sound. They were sound if in the end the result is the very record
    that they belong to.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.tier: int | None = None  # whose turn it is, by its place among the tiers; None: it has not begun
        self.passed = False  # its tier was suspended since: no load joins it any more
        self.dropped = False  # deleted or put anew meanwhile: the result goes to its waiters and is not kept
        self._reading = False
        self._late = False  # a caller gave up waiting while that tier read
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._arrival: Arrival | None = None
        self.add_done_callback(self._notify)

    @property
    def arrival(self) -> Arrival | None:
        """Progress so far; None before the first layer, and where the tier cannot tell."""
        return self._arrival

    @property
    def record(self) -> Record | None:
        """The record whose layers have arrived or are arriving; None before the first one."""
        if self.done():
            return self.result()
        return self._arrival.record if self._arrival else None

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the last layer, at the rate of the layers so far."""
        arrival = self._arrival
        if self.done() or arrival is None:
            return 0.0
        return arrival.seconds * (arrival.of - arrival.layers) / arrival.layers

    def wait_for_layer(self, record: Record, layer: int, deadline: float) -> bool:
        """Wait for a layer of `record` until `deadline` (monotonic seconds). True if it is there."""
        with self._changed:
            while self.record is record:
                if self.done() or (self._arrival is not None and self._arrival.layers > layer):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return False

    def queue(self, tier: int) -> None:
        """Queue the load with a tier."""
        self.tier = tier

    def begin(self) -> int:
        """Note that the read begins. Returns the index of its tier."""
        assert self.tier is not None, "a load is queued first"
        with self._changed:
            self._began, self._reading, self._late = time.monotonic(), True, False
        return self.tier

    def give_up(self, patience_s: float = 0.0) -> tuple[int, bool] | None:
        """A caller waits no longer: the tier that reads, and whether this is the first to give up.

        None while the load waits for its turn, and when it has read for less than `patience_s`.
        """
        with self._changed:
            if self.tier is None or not self._reading or time.monotonic() - self._began < patience_s:
                return None
            first, self._late = not self._late, True
            return self.tier, first

    @property
    def is_late(self) -> bool:
        """True if a caller gave up on the read in progress."""
        return self._late

    def end(self) -> bool:
        """Note that the read has ended. True if a caller had given up on it."""
        with self._changed:
            self._reading = False
            return self._late

    def arrived(self, record: Record, layers: int, of: int) -> None:
        """Note that the record's first layers are there."""
        with self._changed:
            self._arrival = Arrival(record, layers, of, time.monotonic() - self._began)
            self._changed.notify_all()

    def _notify(self, _: Future[Record | None]) -> None:
        with self._changed:
            self._changed.notify_all()
