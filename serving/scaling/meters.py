"""Signals of the service's replicas for the planner (see `autoscale.signals`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from autoscale.curves import ForwardCost

if TYPE_CHECKING:
    from kvstore.library import LibraryStats
    from prefill_workers.protocol import LinkResult
    from prefill_workers.scheduler.loop_stats import LoopStats

Flat = dict[str, float]
_FADES = 0.9  # of an average's weight, by every answer


class Meter:
    """Clock of a replica. Made as its start begins; `ready` ends that."""

    def __init__(self) -> None:
        self._began = self._ready = time.monotonic()

    def ready(self) -> None:
        """The replica serves from now on."""
        self._ready = time.monotonic()

    def common(self) -> Flat:
        """Signals of all roles."""
        now = time.monotonic()
        return {"clock": now, "age_s": now - self._ready, "ready_s": self._ready - self._began}


class WorkMeter(Meter):
    """Work that a replica has done, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces = self._seconds = self._squares = self._encode_s = 0.0

    def done(self, seconds: float, pieces: int = 1, encode_s: float = 0.0) -> None:
        """Count pieces of work that took so long together."""
        self._pieces += pieces
        self._seconds += seconds
        self._squares += (seconds + encode_s) ** 2 / pieces
        self._encode_s += encode_s

    def counted(self) -> Flat:
        """Counters since the start."""
        return {
            **self.common(),
            "links": self._pieces,
            "compute_s": self._seconds,
            "compute_s2": self._squares,
            "encode_s": self._encode_s,
        }


class PrefillMeter(WorkMeter):
    """Signals of a prefill replica.

    Args:
        loaders: loads that go on at once.
    """

    def __init__(self, loaders: int) -> None:
        super().__init__()
        self._loaders = loaders

    def linked(self, result: LinkResult) -> None:
        """Count a link: its part of forwards, and what its images took to encode here."""
        self.done(result.compute_ms / 1e3, encode_s=result.stages_ms.get("vision", 0.0) / 1e3)

    def signals(self, loop: LoopStats, library: LibraryStats, only_here_s: float) -> Flat:
        """See `autoscale.signals`; `only_here_s`: see `kvstore.hand_over.at_stake`."""
        waiting, cost = loop.waiting + loop.running, ForwardCost(loop.fixed_tokens, loop.seconds_per_token)
        return {
            **self.counted(),
            "load_s": library.load_ms / 1e3 / self._loaders,
            "queued_s": cost.added_seconds(cost.queued_tokens(waiting, loop.tokens_queued)),
            "waiting": waiting,
            "forwards": loop.forwards,
            "hot_bytes": library.bytes,
            "only_here_s": only_here_s,
        }


class DecodeMeter(Meter):
    """Signals of a decode replica."""

    def __init__(self) -> None:
        super().__init__()
        self._itl_s = 0.0

    def answered(self, tokens: int, first: float, sequences: int = 1) -> None:
        """Count an answer that ends now.

        `tokens`: in all its sequences; `first`: monotonic time of the first one.
        """
        steps = tokens / sequences - 1
        if steps > 0:
            itl = (time.monotonic() - first) / steps
            self._itl_s = _FADES * self._itl_s + (1 - _FADES) * itl if self._itl_s else itl

    @property
    def itl_s(self) -> float:
        """Time between two tokens; 0 before the first answer."""
        return self._itl_s
