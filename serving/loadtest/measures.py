"""Measures of a run: percentiles, goodput, throughput, hit rates, generator lag.

Percentiles are of answers that came whole, counted from when they were due; failures are not among them, so read them
beside `failed`. Rates are over the time that requests were due in or, if that is longer, that whole answers came in: a
server that falls behind stretches it, and completed requests a second then is what it can do. How long a single answer
takes, or a request that fails, does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from serving.loadtest.client import REJECTED, TIMEOUT, UNFINISHED, Sample

PERCENTILES = (50, 90, 99)
LAG_MS, LAG_SHARE = 10.0, 0.05  # a generator is late if its p99 lag passes both: ms, and this share of median TTFT
SATURATED = 0.8  # a server is saturated that completes less than this share of the requests offered a second


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p99 (linearly interpolated) and the mean; None of nothing."""
    known = np.fromiter(values, float)
    if not known.size:
        return None
    marks = np.percentile(known, PERCENTILES).tolist()
    return {**{f"p{p}": round(v, 3) for p, v in zip(PERCENTILES, marks, strict=True)}, "mean": round(known.mean(), 3)}


def window_s(samples: Sequence[Sample]) -> float:
    """Seconds that so many requests take: of what lies between the first and the last, one more.

    That is the longest of the times in which they were due, had their first tokens and were done: a server that takes
    all prompts before it goes on with any answer is done with all at once. Where all were due at once, it is the time
    until the last whole answer.
    """
    due = _span([sample.due for sample in samples])
    good = [sample for sample in samples if sample.is_ok]
    if len(samples) == 1 or not due:
        return max(sample.done for sample in good or samples) - min(sample.due for sample in samples)
    first = _span([sample.first for sample in good if sample.first is not None])
    return max(due, first, _span([sample.done for sample in good])) * len(samples) / (len(samples) - 1)


def _span(times: Sequence[float]) -> float:
    return max(times) - min(times) if times else 0.0


def offered_rps(samples: Sequence[Sample]) -> float:
    """Requests due a second, between the first and the last.

    For a single request, what completed.
    """
    span = _span([sample.due for sample in samples])
    return (len(samples) - 1) / span if span else completed_rps(samples)


def completed_rps(samples: Sequence[Sample]) -> float:
    """Whole answers a second."""
    return sum(sample.is_ok for sample in samples) / window_s(samples)


def goodput(samples: Sequence[Sample], ttft_limit_ms: float) -> int:
    """Whole answers whose first token came within the limit."""
    return sum(s.is_ok and s.ttft_ms is not None and s.ttft_ms <= ttft_limit_ms for s in samples)


def median_ttft_ms(samples: Iterable[Sample]) -> float:
    """Median time to first token of the whole answers; infinite if there are none."""
    found = percentiles(s.ttft_ms for s in samples if s.is_ok and s.ttft_ms is not None)
    return float("inf") if found is None else found["p50"]


def is_saturated(samples: Sequence[Sample]) -> bool:
    """True if the server completed less than `SATURATED` of what was offered."""
    return completed_rps(samples) < SATURATED * offered_rps(samples)


def hit_rate(samples: Iterable[Sample]) -> float | None:
    """Share of prompt tokens that the server reports as cached; None if it reports none.

    Servers leave the number out of answers that had no hit.
    """
    good = [sample for sample in samples if sample.is_ok and sample.prompt_tokens]
    if all(sample.cached_tokens is None for sample in good):
        return None
    return sum(sample.cached_tokens or 0 for sample in good) / sum(sample.prompt_tokens for sample in good)


def stages_ms(samples: Iterable[Sample]) -> dict[str, float]:
    """Median milliseconds of every stage that the server reports of whole answers that had it.

    Stages overlap and wait for each other, so they need not add up to the time to first token.
    """
    taken: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, ms in sample.stages_ms.items() if sample.is_ok else ():
            taken[name].append(ms)
    return {name: round(float(np.median(found)), 3) for name, found in taken.items()}


def summary(samples: Sequence[Sample], ttft_limit_ms: float | None) -> dict[str, Any]:
    """Everything that is reported of one rate."""
    good = [sample for sample in samples if sample.is_ok]
    window = window_s(samples)
    failed = Counter(sample.status for sample in samples if not sample.is_ok)
    reasons = {sample.status: sample.message for sample in reversed(samples) if not sample.is_ok}
    hits = hit_rate(samples)
    points: Counter[str] = sum((Counter(sample.points) for sample in good), Counter())
    result: dict[str, Any] = {
        "requests": len(samples),
        "ok": len(good),
        "without_content": sum(sample.first is None for sample in good),
        "rejected_429": failed.pop(REJECTED, 0),
        "timeouts": failed.pop(TIMEOUT, 0),
        "unfinished": failed.pop(UNFINISHED, 0),
        "errors": dict(failed),
        "first_messages": reasons,
        "offered_rps": round(offered_rps(samples), 4),
        "completed_rps": round(completed_rps(samples), 4),
        "saturated": is_saturated(samples),
        "output_tokens_per_s": round(sum(s.output_tokens for s in good) / window, 3),
        "ttft_ms": percentiles(s.ttft_ms for s in good if s.ttft_ms is not None),
        "tpot_ms": percentiles(s.tpot_ms for s in good if s.tpot_ms is not None),
        "e2e_ms": percentiles(s.e2e_ms for s in good),
        "cached_tokens_share": None if hits is None else round(hits, 4),
        "operating_points": dict(points),
        "stages_ms": stages_ms(samples),
        "generator": generator(samples),
    }
    if ttft_limit_ms is not None:
        within = goodput(samples, ttft_limit_ms)
        result["goodput"] = {
            "ttft_limit_ms": ttft_limit_ms,
            "share": round(within / len(samples), 4),
            "rps": round(within / window, 4),
        }
    return result


def generator(samples: Sequence[Sample]) -> dict[str, Any]:
    """Lag of the sent requests, and whether it is a good part of the measured times."""
    lag = percentiles(max(0.0, sample.lag_ms) for sample in samples)
    assert lag is not None  # there are samples
    late = lag["p99"] > LAG_MS and lag["p99"] > LAG_SHARE * median_ttft_ms(samples)
    return {"lag_ms": lag, "late": late}
