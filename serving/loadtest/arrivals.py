"""Due times of requests in seconds from the start: a Poisson process or a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

_KEYS = {"at", "body", "images", "max_tokens"}


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line."""


@dataclass(frozen=True)
class Arrival:
    """One request's due time, and what a trace says about it.

    `body` is sent as it is (model and streaming are filled in). Without it the workload asks; `images` and
    `max_tokens`, where given, replace how many images the workload would take and how long its answer may be.
    """

    at: float
    body: dict[str, Any] | None = field(default=None, hash=False)
    images: int | None = None
    max_tokens: int | None = None


def poisson(rate: float, count: int, seed: int) -> list[Arrival]:
    """`count` Poisson arrivals at `rate` a second, determined by `seed`."""
    gaps = np.random.default_rng([seed, 0xA221]).exponential(1 / rate, count)
    return [Arrival(at) for at in np.cumsum(gaps).tolist()]


def count_for(rate: float, duration_s: float) -> int:
    """Number of requests at a rate in a duration; one at least."""
    return max(1, round(rate * duration_s))


def read_trace(path: Path) -> list[Arrival]:
    """Read a JSONL trace: one `{"at": seconds, ...}` a line (see `Arrival`), in any order.

    The first arrival is taken as the start.

    Raises:
        TraceError: the file cannot be read or is empty, or a line is wrong; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON's strings hold what `splitlines` splits at
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    arrivals = [_arrival(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise TraceError(f"{path}: no arrivals")
    arrivals.sort(key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


def rescaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """A trace run faster or slower, to a mean rate of `rate`; bursts keep their shape."""
    factor = mean_rate(arrivals) / rate
    return [replace(arrival, at=arrival.at * factor) for arrival in arrivals]


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests a second between the first and the last arrival.

    If they come all at once, as many as there are.
    """
    span = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / span if span else float(len(arrivals))


def _arrival(line: str, where: str) -> Arrival:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: an object was expected, found {type(entry).__name__}")
    if unknown := entry.keys() - _KEYS:
        raise TraceError(f"{where}: unknown {sorted(unknown)}; there are {sorted(_KEYS)}")
    at, body = entry.get("at"), entry.get("body")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise TraceError(f"{where}: `at` must be seconds from 0 on, found {at!r}")
    if body is not None and not (isinstance(body, dict) and isinstance(body.get("messages"), list)):
        raise TraceError(f"{where}: `body` must be a chat request with `messages`")
    return Arrival(float(at), body, *(_positive(entry, name, where) for name in ("images", "max_tokens")))


def _positive(entry: dict[str, Any], name: str, where: str) -> int | None:
    value = entry.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise TraceError(f"{where}: `{name}` must be a whole number from 1 on, found {value!r}")
    return value
