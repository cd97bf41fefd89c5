"""Forecasts: gaps, trends, days, and upper quantiles that hold."""

from __future__ import annotations

import math

import numpy as np

from autoscale.forecast import DAY_S, Forecast


def test_nothing_is_forecast_before_a_step_and_a_gap_changes_nothing():
    forecast = Forecast()
    assert forecast.upper() is None
    for now in range(0, 600, 30):
        forecast.observe(now, 4.0)
    before = forecast.upper()
    for now in range(600, 900, 30):
        forecast.observe(now, None)
    assert forecast.upper() == before == 4.0


def test_a_ramp_is_followed_ahead():
    forecast = Forecast(horizon_s=120)
    for now in range(0, 7200, 30):
        forecast.observe(now, now / 600)
    assert abs((forecast.upper() or 0.0) - (7170 + 120) / 600) < 0.5


def test_the_upper_quantile_covers_about_what_it_says():
    rng = np.random.default_rng(0)
    forecast, said, covered = Forecast(horizon_s=60, quantile=0.9), list[tuple[float, float]](), list[bool]()
    for now in range(0, 6 * 3600, 30):
        value = float(rng.gamma(20, 0.1))
        covered += [value <= upper for at, upper in said if at == now]
        forecast.observe(now, value)
        if now > 3600:
            said.append((now + 60, forecast.upper() or 0.0))
    assert 0.8 < np.mean(covered) < 0.97


def test_a_day_that_repeats_is_forecast_from_yesterday():
    forecast = Forecast(step_s=120.0, horizon_s=600)

    def load(now: float) -> float:
        return 8.0 if now % DAY_S > 12 * 3600 else 2.0  # a step at noon, which no trend shows

    for now in np.arange(0, 2 * DAY_S + 12 * 3600 - 120, 120):
        forecast.observe(float(now), load(float(now)))
    assert forecast.best() == "day"
    assert math.isclose(forecast.upper() or 0.0, 8.0, rel_tol=0.2), "the step is seen ten minutes ahead"
