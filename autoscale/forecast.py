"""Forecasts of one number, by the one of several simple models that lately erred least.

| model | forecast for `now + horizon`                                                                        |
|-------|-----------------------------------------------------------------------------------------------------|
| last  | the last value                                                                                      |
| trend | level and slope, by a Kalman filter of a local linear trend in its steady state (Holt's equations)   |
| day   | the value of the same time yesterday, times how the last hour compares with yesterday's              |
| week  | the same with last week                                                                             |

An upper quantile is the forecast with the quantile of the same model's errors at the same horizon, as differences or
as ratios, whichever gives less: ratios overstate after a small forecast, differences before a small load. Models are
judged by the pinball loss at that quantile over the last day.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
_LEVEL, _SLOPE = 0.3, 0.02  # gains per step of half a minute
_FEW = 16  # judged forecasts from which a quantile is taken from them
_EVERY = 20  # judged forecasts after which quantile and loss are computed anew
_SMALL = 0.02  # of a replica's worth: ratios of less say nothing


def pinball(came: np.ndarray, said: np.ndarray, quantile: float) -> float:
    """Mean pinball loss: what a forecast lacks counts `quantile`, what it has too much the rest."""
    short = came - said
    return float(np.mean(np.where(short >= 0, short * quantile, -short * (1 - quantile))))


@dataclass
class _Judged:
    """A model's record: forecasts that wait for their time, and what came after those that do not any more."""

    pending: deque[tuple[float, float]] = field(default_factory=deque)  # (time, said)
    past: deque[tuple[float, float]] = field(default_factory=deque)  # (said, came)
    new: int = 0  # of `past`, since the two below were computed
    ratio: float = 1.0  # quantile of came over said
    more: float = 0.0  # quantile of came less said
    loss: float = math.inf

    def judge(self, at: float, value: float, quantile: float, most: float) -> None:
        """Compare with a value what was said for its time."""
        while self.pending and self.pending[0][0] <= at:
            self.past.append((self.pending.popleft()[1], value))
            self.new += 1
        while len(self.past) > most:
            self.past.popleft()
        if len(self.past) >= _FEW and (self.new >= _EVERY or math.isinf(self.loss)):
            said, came = np.asarray(self.past).T
            self.ratio = float(np.quantile(np.maximum(came, _SMALL) / np.maximum(said, _SMALL), quantile))
            self.more = float(np.quantile(came - said, quantile))
            self.loss, self.new = pinball(came, np.minimum(said * self.ratio, said + self.more), quantile), 0

    def upper(self, said: float) -> float:
        """The quantile of what comes, after a forecast."""
        return max(0.0, min(said * self.ratio, said + self.more))


class Forecast:
    """Forecasts of a number that is given every `step_s` seconds.

    Args:
        horizon_s: how far ahead. May be changed; what was said before is judged all the same.
        quantile: of what may come, that `upper` gives.
    """

    def __init__(self, step_s: float = 30.0, horizon_s: float = 60.0, quantile: float = 0.9) -> None:
        self._step_s, self.horizon_s, self._quantile = step_s, horizon_s, quantile
        self._values: deque[tuple[int, float]] = deque(maxlen=int(WEEK_S / step_s) + int(3600 / step_s) + 2)
        self._level = self._slope = 0.0
        self._sum, self._count, self._slot = 0.0, 0, -1
        self._models: dict[str, tuple[Callable[[], float | None], _Judged]] = {
            "last": (self._last, _Judged()),
            "trend": (self._trend, _Judged()),
            "day": (lambda: self._season(DAY_S), _Judged()),
            "week": (lambda: self._season(WEEK_S), _Judged()),
        }

    def observe(self, now: float, value: float | None) -> None:
        """Take up the value of the moment; None, which is not known, leaves everything as it is."""
        if value is None:
            return
        slot = int(now / self._step_s)
        if self._slot < 0:
            self._slot = slot
        if slot != self._slot:
            self._step(self._sum / self._count)
            self._sum, self._count, self._slot = 0.0, 0, slot
        self._sum, self._count = self._sum + value, self._count + 1

    def upper(self) -> float | None:
        """The quantile of what comes in `horizon_s`; None before the first step."""
        name = self.best()
        if name is None:
            return None
        model, judged = self._models[name]
        said = model()
        return None if said is None else judged.upper(said)

    def best(self) -> str | None:
        """The model that is believed; None before the first step."""
        if not self._values:
            return None
        able = {name: judged.loss for name, (model, judged) in self._models.items() if model() is not None}
        return min(able, key=lambda name: (able[name], list(able).index(name)))

    def _step(self, value: float) -> None:
        at = self._slot * self._step_s
        for _, judged in self._models.values():
            judged.judge(at, value, self._quantile, DAY_S / self._step_s)
        if not self._values:
            self._level = value
        else:
            steps = max(1, self._slot - self._values[-1][0])
            said = self._level + steps * self._slope
            self._level = said + _LEVEL * (value - said)
            self._slope += _SLOPE * (value - said) / steps
        self._values.append((self._slot, value))
        for model, judged in self._models.values():
            if (said_now := model()) is not None:
                judged.pending.append((at + self.horizon_s, said_now))

    def _last(self) -> float | None:
        return self._values[-1][1] if self._values else None

    def _trend(self) -> float | None:
        return max(0.0, self._level + self._slope * self.horizon_s / self._step_s) if self._values else None

    def _season(self, ago_s: float) -> float | None:
        """The same time one season ago, times this hour over that one's; None without those values."""
        if not self._values:
            return None
        last = self._values[-1][0]
        then, ahead = last - round(ago_s / self._step_s), max(1, round(self.horizon_s / self._step_s))
        hour = round(3600 / self._step_s)
        if then - hour < self._values[0][0]:
            return None
        came = self._between(then + ahead - 1, then + ahead + 2)
        before, now = self._between(then - hour, then + 1), self._between(last - hour, last + 1)
        if not came or not before or not now:
            return None
        scale = (sum(now) / len(now) + _SMALL) / (sum(before) / len(before) + _SMALL)
        return sum(came) / len(came) * scale

    def _between(self, start: int, stop: int) -> Sequence[float]:
        """Values of the slots from `start` up to `stop`; those that were given without gaps are found at once."""
        first = self._values[0][0]
        guess = start - first
        if 0 <= guess < len(self._values) and self._values[guess][0] == start:
            found = []
            for i in range(guess, min(guess + stop - start, len(self._values))):
                slot, value = self._values[i]
                if slot >= stop:
                    break
                found.append(value)
            return found
        return [value for slot, value in self._values if start <= slot < stop]
