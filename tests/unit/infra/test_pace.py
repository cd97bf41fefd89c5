"""Pace of work: forecasts from earlier work of the same kind."""

from __future__ import annotations

import pytest

from infra import pace
from infra.pace import Pace


def test_work_takes_what_earlier_work_of_its_kind_took_the_latest_before_all():
    found = Pace(least=10)
    assert found.seconds("a", 100) is None
    found.learn("a", 100, 1.0)
    found.learn("b", 100, 5.0)
    assert found.seconds("a", 200) == pytest.approx(2.0)
    assert found.seconds("b", 200) == pytest.approx(10.0)
    for _ in range(30):
        found.learn("a", 100, 3.0)
    assert found.seconds("a", 100) == pytest.approx(3.0, rel=0.01)


def test_little_work_tells_nothing():
    found = Pace(least=10)
    found.learn("a", 9, 60.0)
    assert found.seconds("a", 9) is None


def test_kinds_that_have_not_worked_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace, "_MOST_KINDS", 2)
    found = Pace(least=1)
    for kind in ("a", "b", "a", "c"):
        found.learn(kind, 1, 1.0)
    assert [found.seconds(kind, 1) for kind in "abc"] == [1.0, None, 1.0]
