"""The load benchmarks' figures, from samples whose answers are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from serving.loadtest.client import Endpoint, Sample
from serving.loadtest.session import Subject
from serving.loadtest.workloads import workload
from tests.benchmarks import load_arms, rates, sustained
from tests.benchmarks.load_arms import Runs
from tests.benchmarks.servers import Server

COUNT = 20


def served(rate: float, service_s: float, status: str = "ok") -> list[Sample]:
    """One turn of a server that takes `service_s` for each request and one at a time; the first token is the last."""
    samples, free = [], 0.0
    for number in range(COUNT):
        due = number / rate
        free = max(free, due) + service_s
        samples.append(Sample(due, due, free, free, free, status, 100, 2, 50, {}))
    return samples


def at_rates(service_s: float, *offered: float) -> dict[str, Runs]:
    return {f"{rate:g}": [served(rate, service_s)] * 2 for rate in offered}


def test_throughput_is_over_all_turns_and_a_queue_that_grows_is_saturation():
    slow = [served(0.5, 1.0), served(0.5, 4.0)]  # the second turn falls behind
    assert load_arms.completed_rps(slow) == pytest.approx(2 * COUNT / (40 + 80))
    assert load_arms.is_saturated(slow)
    assert not load_arms.is_saturated([served(0.5, 1.0)])


def test_figures_compare_at_the_rate_where_prefix_caching_saturates_and_over_the_best_throughputs():
    runs = {
        "prefix": at_rates(1.0, 0.5, 2.0),  # one a second: saturated at 2
        "cacheblend-15": at_rates(0.5, 0.5, 2.0, 4.0),
        "auto-placed": at_rates(0.125, 0.5, 2.0, 4.0, 16.0),
    }
    assert rates.saturation_rate(runs["prefix"]) == "2"
    found = rates.figures(runs)
    vllm = [number / 2 + 1 for number in range(COUNT)]  # ends at 1, 2, ... s; due at 0, 0.5, ...
    assert found["ttft_over_prefix"] == pytest.approx(0.125 / ((vllm[9] + vllm[10]) / 2))
    assert found["throughput_over_prefix"] == pytest.approx(8, rel=0.01)
    assert found["throughput_over_cacheblend15"] == pytest.approx(4, rel=0.01)


def test_where_prefix_caching_never_saturates_there_is_nothing_to_compare_it_with():
    runs = {name: at_rates(0.125, 0.5, 2.0) for name in ("prefix", "cacheblend-15", "auto-placed")}
    assert rates.saturation_rate(runs["prefix"]) is None
    assert rates.figures(runs) == {"throughput_over_cacheblend15": pytest.approx(1)}


def test_arms_are_asked_until_they_and_prefix_caching_have_saturated():
    runs = {"prefix": at_rates(1.0, 0.5), "auto": at_rates(4.0, 0.5)}
    assert not rates._is_done(runs, "auto")  # it has, but vLLM has not: the figures need it there
    runs["prefix"] |= at_rates(1.0, 2.0)
    assert rates._is_done(runs, "auto")
    assert rates._is_done(runs, "prefix")
    assert not rates._is_done(runs | {"fast": at_rates(0.1, 0.5, 2.0)}, "fast")


def test_an_arm_saturates_at_the_first_rate_that_it_does_not_serve_or_never():
    assert rates.saturation_rate(at_rates(0.5, 0.5, 2.0, 4.0, 8.0)) == "4"  # two a second
    assert rates.saturation_rate(at_rates(0.05, 0.5, 2.0, 4.0)) is None
    assert rates.saturation_rate({}) is None


def test_tables_and_arms_hold_what_was_measured_and_leave_out_what_was_not():
    subject = Subject(Endpoint("http://127.0.0.1:9"), workload("mrag"))
    arm = load_arms.LoadArm("auto", "ours", subject, lambda: None)
    runs = {"auto": {"0.5": [served(0.5, 1.0)], "9": [served(9, 1.0, status="429")]}}
    shown = load_arms.harness_arm(arm, runs["auto"])
    assert {rate: len(times) for rate, times in shown.samples_ms.items()} == {"0.5": COUNT}
    assert shown.median_ms("0.5") == pytest.approx(1000)
    tables = load_arms.tables(runs)
    assert tables["failed"]["auto"] == {"0.5": 0, "9": COUNT}
    assert tables["completed a second"]["auto"]["9"] == 0
    assert tables["prompt tokens cached"]["auto"] == {"0.5": 0.5}
    assert tables["output tokens a second"]["auto"]["0.5"] == pytest.approx(2 * COUNT / 40)


def test_the_last_window_is_compared_with_the_best_one_before_it():
    assert sustained.last_over_best([5, 5, 1, 1, 9, 2, 2], window=2) == 2.0
    assert sustained.last_over_best([9, 9, 9, 1, 1], window=2) == pytest.approx(1 / 9)  # no window overlaps the last
    with pytest.raises(ValueError, match="no two windows"):
        sustained.last_over_best([1, 2, 3], window=2)


def test_bytes_of_a_directory_are_those_of_all_files_in_it(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "one").write_bytes(b"123")
    (tmp_path / "deep" / "two").write_bytes(b"4567")
    assert sustained.bytes_below(tmp_path) == 7
    assert sustained.bytes_below(tmp_path / "missing") == 0


def test_memory_is_told_by_parts_of_the_run_and_only_what_is_not_shared():
    assert sustained.by_part([number << 20 for number in range(12)]) == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]
    assert sustained.by_part([1, 2, 3]) == []
    this = psutil.Process()
    server = Server("", "", lambda: None, processes=lambda: [this])
    with sustained.memory_watched(server) as seen:
        pass
    assert 0 < seen[0] <= this.memory_info().rss


def test_rates_that_were_measured_are_kept_when_a_later_one_fails(monkeypatch: pytest.MonkeyPatch):
    def in_load_turns(arms: Any, rate: float, requests: int, turns: int, console: Console) -> Any:
        if rate > 1:
            raise RuntimeError("no answer")
        return {arm.name: [served(rate, 0.1)] * turns for arm in arms}

    monkeypatch.setattr(load_arms, "in_load_turns", in_load_turns)
    arms: Any = [SimpleNamespace(name=name) for name in ("prefix", "auto")]
    runs, stopped = rates.measure(arms, {0.5: COUNT, 2.0: COUNT}, 2, Console(quiet=True))
    assert {name: list(found) for name, found in runs.items()} == {"prefix": ["0.5"], "auto": ["0.5"]}
    assert stopped == "at 2 requests a second: no answer"
    with pytest.raises(RuntimeError, match="no answer"):
        rates.measure(arms, {2.0: COUNT}, 2, Console(quiet=True))
