"""When load tests' requests are due: statistics of a seed, traces, and clear words about broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from serving.loadtest.arrivals import TraceError, mean_rate, poisson, read_trace, rescaled
from serving.loadtest.session import Plan


def test_gaps_of_poisson_arrivals_are_exponential():
    due = np.array([arrival.at for arrival in poisson(rate=8.0, count=20_000, seed=1)])
    gaps = np.diff(due, prepend=0.0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)  # as long as the mean
    assert (gaps > 1 / 8).mean() == pytest.approx(np.exp(-1), abs=0.01)
    counts = np.histogram(due, np.arange(0, due[-1], 1.0))[0]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)  # of a Poisson process
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_a_seed_gives_one_schedule_and_another_seed_another():
    assert poisson(2.0, 50, seed=3) == poisson(2.0, 50, seed=3)
    assert poisson(2.0, 50, seed=3) != poisson(2.0, 50, seed=4)
    # arms are compared on the same pattern at every rate
    slow, fast = poisson(1.0, 50, seed=3), poisson(4.0, 50, seed=3)
    np.testing.assert_allclose([a.at for a in slow], [4 * a.at for a in fast])


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_line_of_a_trace_ends_where_json_lines_do(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    said = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    body = json.dumps(said, ensure_ascii=False)
    path.write_bytes(f'{{"at": 0, "body": {body}}}\r\n\n{{"at": 1}} \n'.encode())
    first, second = read_trace(path)
    assert (first.body, second.at) == (said, 1.0)


def test_a_trace_is_sorted_shifted_to_its_first_arrival_and_keeps_shapes(tmp_path: Path):
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    path = trace(tmp_path, '{"at": 12, "images": 2, "max_tokens": 7}', "", f'{{"at": 10.5, "body": {body}}}')
    first, second = read_trace(path)
    assert (first.at, first.images) == (0.0, None)
    assert first.body == {"messages": [{"role": "user", "content": "hi"}]}
    assert (second.at, second.body, second.images, second.max_tokens) == (1.5, None, 2, 7)


def test_a_rescaled_trace_has_the_rate_and_keeps_its_bursts(tmp_path: Path):
    arrivals = read_trace(trace(tmp_path, *(f'{{"at": {at}}}' for at in (0, 1, 1, 10))))
    assert mean_rate(arrivals) == pytest.approx(0.3)
    faster = rescaled(arrivals, 3.0)
    assert [arrival.at for arrival in faster] == pytest.approx([0, 0.1, 0.1, 1.0])
    assert mean_rate(faster) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "an object was expected"),
        ('{"at": 1, "picture": 2}', "unknown ['picture']"),
        ('{"images": 2}', "`at` must be seconds"),
        ('{"at": -1}', "`at` must be seconds"),
        ('{"at": NaN}', "`at` must be seconds"),
        ('{"at": true}', "`at` must be seconds"),
        ('{"at": 1, "body": {"prompt": "x"}}', "`body` must be a chat request"),
        ('{"at": 1, "images": 0}', "`images` must be a whole number"),
        ('{"at": 1, "max_tokens": "many"}', "`max_tokens` must be a whole number"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str):
    with pytest.raises(TraceError, match="line 2") as raised:
        read_trace(trace(tmp_path, '{"at": 0}', line))
    assert words in str(raised.value)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path):
    with pytest.raises(TraceError, match="no arrivals"):
        read_trace(trace(tmp_path, ""))
    with pytest.raises(TraceError, match="missing"):
        read_trace(tmp_path / "missing")


def test_a_plan_has_warm_up_and_the_wanted_number_at_every_rate():
    steps = list(Plan(rates=(1.0, 4.0), duration_s=10, warmup=3).steps())
    assert [(rate, len(warmup), len(due)) for rate, warmup, due in steps] == [(1.0, 3, 10), (4.0, 3, 40)]
    assert [len(due) for _, _, due in Plan(rates=(1.0, 4.0), count=7).steps()] == [7, 7]


def test_a_plan_over_a_trace_keeps_its_times_or_takes_the_rate(tmp_path: Path):
    arrivals = read_trace(trace(tmp_path, '{"at": 0}', '{"at": 2}', '{"at": 4}'))
    ((rate, _, due),) = Plan(trace=arrivals).steps()
    assert (rate, [a.at for a in due]) == (0.5, [0, 2, 4])
    ((rate, _, due),) = Plan(rates=(1.0,), trace=arrivals, count=2).steps()
    assert (rate, [a.at for a in due]) == (1.0, [0, 1])
    ((_, warmup, due),) = Plan(trace=arrivals, duration_s=3).steps()
    assert [a.at for a in due] == [0, 2]
    assert len(warmup) == 5


def test_arrivals_all_at_once_have_a_rate_too(tmp_path: Path):
    arrivals = read_trace(trace(tmp_path, '{"at": 3}', '{"at": 3}'))
    assert mean_rate(arrivals) == 2
    assert [arrival.at for arrival in rescaled(arrivals, 5.0)] == [0, 0]
