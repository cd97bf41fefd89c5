"""Operating points that are switched off outlive the process: an operator has to allow them."""

from __future__ import annotations

import logging
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvstore.tiers.disk import DiskTier
from prefill_workers.fidelity.disabled_points import DisabledPoints, PointDecision
from prefill_workers.modes import OperatingPoint

PATCHED, COMPOSED, SELECTED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED, OperatingPoint.SELECTED
OFF = '{"reason": "why", "since": 1.0}'


def disabled(point: OperatingPoint, since: float = 1.0, reason: str = "a test") -> PointDecision:
    return PointDecision(point, False, since, reason)


def keep(folder: Path | None, *decisions: PointDecision, fingerprint: str = "model") -> None:
    """Write decisions as a process does that ends afterwards."""
    points = DisabledPoints(folder, fingerprint)
    for decision in decisions:
        points.write(decision)
    points.flush()


def kept(folder: Path | None, fingerprint: str = "model") -> list[PointDecision]:
    """Decisions that a process which starts finds."""
    return DisabledPoints(folder, fingerprint).read()


def test_a_process_that_starts_finds_what_is_disabled_until_it_is_allowed(tmp_path: Path):
    first, composed = disabled(PATCHED, reason="the first reason"), disabled(COMPOSED, 3.0)
    keep(tmp_path, first, disabled(PATCHED, 2.0, "another"), composed)
    assert kept(tmp_path) == [first, composed]
    keep(tmp_path, PointDecision(PATCHED, True, 4.0))
    assert kept(tmp_path) == [composed]


def test_the_file_is_of_one_model_and_of_one_directory(tmp_path: Path):
    keep(tmp_path / "a", disabled(PATCHED))
    assert kept(tmp_path / "a", "another model") == []
    assert kept(tmp_path / "b") == []
    keep(None, disabled(PATCHED))
    assert kept(None) == []


def test_the_library_in_the_same_directory_does_not_see_it(tmp_path: Path):
    tier = DiskTier(tmp_path)
    keep(tmp_path, disabled(PATCHED))
    assert list(tier.entries()) == []


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"patched": 1}', f'{{"encoded": {OFF}}}', f'{{"unheard-of": {OFF}}}', "\x00"]
)
def test_a_file_that_makes_no_sense_costs_a_warning_and_is_written_anew(tmp_path: Path, caplog, text: str):
    keep(tmp_path, disabled(PATCHED))
    (file,) = (tmp_path / ".operating-points").iterdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path) == []
    assert f"{file}: which operating points are switched off cannot be read" in caplog.text
    keep(tmp_path, disabled(PATCHED, 2.0, "again"))
    assert kept(tmp_path) == [disabled(PATCHED, 2.0, "again")]


def test_a_decision_that_cannot_be_kept_costs_a_warning(tmp_path: Path, caplog):
    (tmp_path / ".operating-points").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        keep(tmp_path, disabled(PATCHED))
    assert "cannot be kept" in caplog.text


def _disable(folder: Path, point: OperatingPoint) -> None:
    points = DisabledPoints(folder, "model")
    for _ in range(50):
        points.write(disabled(point))
        points.write(PointDecision(point, True, 1.5))
    points.write(disabled(point, 2.0))
    points.flush()


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path):
    points = (PATCHED, COMPOSED, SELECTED)
    writing = [get_context("fork").Process(target=_disable, args=(tmp_path, point)) for point in points]
    for process in writing:
        process.start()
    for process in writing:
        process.join(60)
        assert process.exitcode == 0
    assert set(kept(tmp_path)) == {disabled(point, 2.0) for point in points}
