"""Operating points that are switched off outlive the process: an operator has to allow them."""

from __future__ import annotations

import logging
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvstore.tiers.disk import DiskTier
from prefill_workers.fidelity.disabled_points import DisabledPoints
from prefill_workers.fidelity.monitor import Comparison, Fidelity
from prefill_workers.modes import OperatingPoint
from prefill_workers.settings import FidelitySettings

PATCHED, COMPOSED, SELECTED = OperatingPoint.PATCHED, OperatingPoint.COMPOSED, OperatingPoint.SELECTED
OFF = '{"reason": "why", "since": 1.0}'
SETTINGS = FidelitySettings(share=1.0, window=2, minimum=1, bounds={PATCHED: 0.05})


_KEPT: list[DisabledPoints] = []


def started(folder: Path | None, fingerprint: str = "model") -> Fidelity:
    """What a worker that starts knows, once those before it have written."""
    written()
    _KEPT.append(DisabledPoints(folder, fingerprint))
    return Fidelity(SETTINGS, kept=_KEPT[-1])


def written() -> None:
    for kept in _KEPT:
        kept.flush()


def test_a_worker_that_starts_finds_what_is_switched_off_until_it_is_allowed(tmp_path: Path, caplog):
    first, beside = started(tmp_path), started(tmp_path)
    first.record([PATCHED], Comparison(1.0, False))
    beside.switch_off(PATCHED, "another replica said so")
    beside.switch_off(COMPOSED, "an operator said so")
    with caplog.at_level(logging.WARNING, logger="prefill_workers.fidelity.monitor"):
        next_one = started(tmp_path)
    assert [next_one.allows(point) for point in (PATCHED, COMPOSED, SELECTED)] == [False, False, True]
    assert "its rolling KL is 1 nats over the last 1 checks, its bound is 0.05" in caplog.text, "the first reason"
    assert next_one.allow(PATCHED)
    assert [started(tmp_path).allows(point) for point in (PATCHED, COMPOSED)] == [True, False]


def test_it_is_of_one_model_and_of_one_directory(tmp_path: Path):
    started(tmp_path / "a").switch_off(PATCHED, "test")
    assert started(tmp_path / "a", "another model").allows(PATCHED)
    assert started(tmp_path / "b").allows(PATCHED)
    alone = started(None)
    alone.switch_off(PATCHED, "test")
    assert alone.allow(PATCHED)
    assert started(None).allows(PATCHED)


def test_the_library_in_the_same_directory_does_not_see_it(tmp_path: Path):
    tier = DiskTier(tmp_path)
    started(tmp_path).switch_off(PATCHED, "test")
    written()
    assert list(tier.entries()) == []


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"patched": 1}', f'{{"encoded": {OFF}}}', f'{{"unheard-of": {OFF}}}', "\x00"]
)
def test_a_file_that_makes_no_sense_costs_a_warning_and_is_written_anew(tmp_path: Path, caplog, text: str):
    started(tmp_path).switch_off(PATCHED, "test")
    written()
    (file,) = (tmp_path / ".operating-points").iterdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        found = started(tmp_path)
    assert found.allows(PATCHED)
    assert f"{file}: which operating points are switched off cannot be read" in caplog.text
    found.switch_off(PATCHED, "again")
    assert not started(tmp_path).allows(PATCHED)


def test_what_cannot_be_kept_is_switched_off_all_the_same(tmp_path: Path, caplog):
    (tmp_path / ".operating-points").write_text("in the way")
    found = started(tmp_path)
    with caplog.at_level(logging.WARNING):
        found.switch_off(PATCHED, "test")
        written()
    assert not found.allows(PATCHED)
    assert "cannot be kept" in caplog.text


def _switch_off(folder: Path, point: OperatingPoint) -> None:
    kept = DisabledPoints(folder, "model")
    for _ in range(50):
        kept.add(point, str(point), 1.0)
        kept.remove(point)
    kept.add(point, str(point), 2.0)
    kept.flush()


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path):
    points = (PATCHED, COMPOSED, SELECTED)
    writing = [get_context("fork").Process(target=_switch_off, args=(tmp_path, point)) for point in points]
    for process in writing:
        process.start()
    for process in writing:
        process.join(60)
        assert process.exitcode == 0
    assert DisabledPoints(tmp_path, "model").read() == {point: (str(point), 2.0) for point in points}
