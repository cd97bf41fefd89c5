"""Pace of work by its amount, learnt from earlier work of its kind."""

from __future__ import annotations

from collections import OrderedDict

_KEPT = 0.8  # of what earlier work taught, beside the latest
_MOST_KINDS = 1024  # replicas come and go; the one that worked longest ago is forgotten


class Pace:
    """Amount a second, by kind of work.

    Args:
        least: amount from which work tells its pace; less takes its fixed part mostly.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()  # amount and seconds, decayed

    def learn(self, kind: str, amount: float, seconds: float) -> None:
        """Take up work of an amount that took so long."""
        if amount < self._least:
            return
        known, taken = self._sums.pop(kind, (0.0, 0.0))
        self._sums[kind] = (_KEPT * known + amount, _KEPT * taken + seconds)
        if len(self._sums) > _MOST_KINDS:
            self._sums.popitem(last=False)

    def seconds(self, kind: str, amount: float) -> float | None:
        """Seconds that work is expected to take; None: none of its kind has told yet."""
        if kind not in self._sums:
            return None
        known, taken = self._sums[kind]
        return amount * taken / known
