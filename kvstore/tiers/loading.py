"""A load on its way from a tier: who waits for the same record shares it, and may use its layers as they come in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from kvstore.records.format import Record


class Arrival(NamedTuple):
    """How far a load has come: the first `layers` of all `of` layers are there, after so many seconds."""

    record: Record
    layers: int
    of: int
    seconds: float


class Loading(Future["Record | None"]):
    """A load under way; its result is None on a miss. One is shared by all who wait for the same record.

    Where a tier can tell, layers may be used as they come in, before the record as a whole is known to be sound. They
    were, if in the end the result is the very record that they belong to.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.tier: int | None = None  # whose turn it is, by its place among the tiers; None: it has not begun
        self.passed = False  # its tier was left alone since: nobody joins it any more
        self.dropped = False  # deleted or put anew meanwhile: what is found is for those who wait, and not to be kept
        self._reading = False
        self._late = False  # somebody gave up waiting while that tier read
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._arrival: Arrival | None = None
        self.add_done_callback(self._notify)

    @property
    def arrival(self) -> Arrival | None:
        """How far the load came so far; None before its first layer, and where the tier cannot tell."""
        return self._arrival

    @property
    def record(self) -> Record | None:
        """The record whose layers are there, or come in; None before the first one."""
        if self.done():
            return self.result()
        return self._arrival.record if self._arrival else None

    @property
    def seconds_left(self) -> float:
        """When the last layer will be there if the others come in as fast as those before."""
        arrival = self._arrival
        if self.done() or arrival is None:
            return 0.0
        return arrival.seconds * (arrival.of - arrival.layers) / arrival.layers

    def wait_for_layer(self, record: Record, layer: int, deadline: float) -> bool:
        """Whether this layer of `record` is there; waits for it until `deadline` (monotonic seconds)."""
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
        """The load waits for its turn with a tier."""
        self.tier = tier

    def begin(self) -> int:
        """The read begins. Returns the tier that it is of."""
        assert self.tier is not None, "a load is queued first"
        with self._changed:
            self._began, self._reading, self._late = time.monotonic(), True, False
        return self.tier

    def give_up(self, patience_s: float = 0.0) -> tuple[int, bool] | None:
        """Somebody waits no longer: the tier that reads, and whether nobody gave up on that before; None while the load
        waits for its turn, and when it has read for less than `patience_s`."""
        with self._changed:
            if self.tier is None or not self._reading or time.monotonic() - self._began < patience_s:
                return None
            first, self._late = not self._late, True
            return self.tier, first

    @property
    def late(self) -> bool:
        """Whether somebody gave up on the read that goes on."""
        return self._late

    def end(self) -> bool:
        """The read has ended. Returns whether somebody had given up on it."""
        with self._changed:
            self._reading = False
            return self._late

    def arrived(self, record: Record, layers: int, of: int) -> None:
        """The record's first layers are there."""
        with self._changed:
            self._arrival = Arrival(record, layers, of, time.monotonic() - self._began)
            self._changed.notify_all()

    def _notify(self, _: Future[Record | None]) -> None:
        with self._changed:
            self._changed.notify_all()
