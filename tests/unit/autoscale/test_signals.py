"""Demand from signals: missing is never zero, counters of replicas that come and go, bursts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autoscale.signals import Demand, Role, Window, known

PREFILL = {
    "clock": 0.0,
    "age_s": 10.0,
    "ready_s": 30.0,
    "links": 0.0,
    "compute_s": 0.0,
    "compute_s2": 0.0,
    "load_s": 0.0,
    "queued_s": 0.0,
    "waiting": 0.0,
}
DECODE = {
    "clock": 1.0,
    "age_s": 1.0,
    "ready_s": 1.0,
    "blocks": 50,
    "blocks_total": 100,
    "sequences": 4,
    "max_sequences": 16,
}


def prefill(now: float, rate: float = 2.0, work: float = 0.5, **other: float) -> dict[str, float]:
    """Signals of a replica that has done `rate` links a second of `work` seconds each since time 0."""
    links = rate * now
    done = {"links": links, "compute_s": links * work, "compute_s2": links * work**2}
    return {**PREFILL, "clock": now + 1, **done, **other}


def observed(window: Window, seconds: int, **replicas: float) -> Demand | None:
    for now in range(0, seconds, 2):
        window.observe(now, {name: prefill(now, rate) for name, rate in replicas.items()})
    return window.demand


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, None, "7"])
def test_a_needed_signal_that_is_no_measure_is_unknown(wrong: Any):
    assert known(Role.PREFILL, {**PREFILL, "queued_s": wrong}) is None
    assert known(Role.PREFILL, PREFILL) == PREFILL
    left = known(Role.PREFILL, {**PREFILL, "extra": wrong})
    assert left is not None
    assert "extra" not in left


def test_work_that_came_is_what_was_done_and_what_waits():
    demand = observed(Window(Role.PREFILL), 60, a=2.0, b=1.0)
    assert demand is not None
    assert demand.load == pytest.approx(1.5)
    assert demand.rate == pytest.approx(3.0)
    assert demand.mean_s == pytest.approx(0.5)
    window = Window(Role.PREFILL)
    for now in range(0, 60, 2):
        window.observe(now, {"a": prefill(now, 2.0, queued_s=1.0 * now, waiting=2.0 * now)})
    assert window.demand is not None
    assert window.demand.load == pytest.approx(2.0), "half of it waits"
    assert window.demand.mean_s == pytest.approx(0.5)


def test_nothing_known_is_no_demand_and_measured_zero_is():
    window = Window(Role.PREFILL)
    assert window.demand is None
    window.observe(0, {"a": {}})
    window.observe(2, {"a": {}})
    assert window.demand is None
    idle = observed(Window(Role.PREFILL), 20, a=0.0)
    assert idle is not None
    assert (idle.load, idle.is_partial) == (0.0, False)


def test_stale_signals_are_unknown():
    window = Window(Role.PREFILL, stale_s=6)
    for now in range(0, 20, 2):
        window.observe(now, {"a": prefill(now)})
    for now in range(20, 28, 2):
        window.observe(now, {"a": prefill(18)})  # the same again: its clock stands
    assert window.demand is None


def test_a_replica_that_does_not_tell_is_taken_for_the_mean_of_the_others():
    window = Window(Role.PREFILL)
    for now in range(0, 60, 2):
        window.observe(now, {"a": prefill(now), "b": {}})
    assert window.demand is not None
    assert window.demand.is_partial
    assert window.demand.load == pytest.approx(2.0)


def test_a_replica_that_comes_or_goes_does_not_move_the_load_of_the_others():
    window = Window(Role.PREFILL)
    for now in range(0, 60, 2):
        there = {"a": prefill(now)} | ({"b": prefill(now - 40, 0.0)} if now >= 40 else {})
        window.observe(now, there)
    assert window.demand is not None
    assert window.demand.load == pytest.approx(1.0)
    window.observe(60, {"a": prefill(60)})
    assert window.demand.load == pytest.approx(1.0)


def test_a_burst_shows_in_the_last_seconds_and_chance_does_not():
    window = Window(Role.PREFILL)
    links = 0.0
    for now in range(0, 60, 2):
        links += 2.0 if now < 50 else 20.0
        done = {"links": links, "compute_s": links / 2, "compute_s2": links / 4}
        window.observe(now, {"a": {**PREFILL, "clock": now + 1, **done}})
        if window.demand is not None:
            assert window.demand.has_jumped == (now >= 52)


def test_a_window_begins_anew_where_the_load_falls_by_more_than_chance():
    window = Window(Role.PREFILL)
    links = 0.0
    for now in range(0, 90, 2):
        links += 2 * (8.0 if now <= 60 else 1.0)
        done = {"links": links, "compute_s": links / 2, "compute_s2": links / 4}
        window.observe(now, {"a": {**PREFILL, "clock": now + 1, **done}})
        if now == 60:
            assert window.demand is not None
            assert (window.demand.load, window.demand.window_s) == (pytest.approx(4.0), 60)
            assert not window.demand.has_fallen
    assert window.demand is not None
    assert window.demand.load == pytest.approx(0.5), "and nothing of what came before"
    assert window.demand.window_s == 28
    assert window.demand.has_fallen


def test_a_load_that_varies_by_chance_keeps_its_window():
    rng = np.random.default_rng(3)
    window, links, work, squares = Window(Role.PREFILL), 0.0, 0.0, 0.0
    for now in range(0, 3600, 2):
        sizes = rng.exponential(1.0, rng.poisson(4.0))
        links, work, squares = links + len(sizes), work + sizes.sum(), squares + (sizes**2).sum()
        done = {"links": links, "compute_s": work, "compute_s2": squares}
        window.observe(now, {"a": {**PREFILL, "clock": now + 1, **done}})
        if now >= 120:
            assert window.demand is not None
            assert window.demand.window_s == 120


def test_decode_counts_blocks_or_sequences_whichever_is_more():
    window = Window(Role.DECODE)
    window.observe(0, {"a": DECODE, "b": {**DECODE, "blocks": 0, "sequences": 32}})
    assert window.demand is not None
    assert window.demand.load == pytest.approx(0.5 + 2.0)
    window.observe(2, {"a": {**DECODE, "clock": 2.0, "blocks_total": 0}})
    assert window.demand is None, "a pool of nothing is no measure"


def test_a_crowded_moment_is_no_load_of_decode_and_a_jump_is():
    def loads(sequences: list[float]) -> float:
        window = Window(Role.DECODE)
        for second, count in enumerate(sequences):
            window.observe(second, {"a": {**DECODE, "clock": second + 1.0, "blocks": 0, "sequences": count}})
        assert window.demand is not None
        return window.demand.load * DECODE["max_sequences"]

    restless = [4.0, 12.0] * 5 + [8.0, 16.0] * 5
    assert loads(restless * 3) == pytest.approx(10.0, abs=0.6)
    assert loads([8.0] * 50 + [30.0] * 10) == pytest.approx(30.0, abs=2.5)
