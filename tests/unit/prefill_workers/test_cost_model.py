"""What forwards take, and what is decided by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from prefill_workers.scheduler import cost_model as cost_model
from prefill_workers.scheduler.cost_model import ForwardCostModel, measure_forward_cost


def test_a_pace_is_learnt_from_forwards_and_follows_them():
    known = ForwardCostModel(fixed=20.0)
    assert known.cost.seconds_per_token is None
    assert known.seconds(1000) == 0.0
    known.learn(100, 1.2)
    assert known.seconds(100) == pytest.approx(1.2)
    known.learn(100, 2.4)
    assert known.seconds(100) == pytest.approx(1.8)


def test_background_pieces_take_a_tenth_of_a_second_unless_that_is_mostly_the_fixed_part():
    many = 1_000_000
    assert ForwardCostModel(fixed=20.0).piece(many) == 80
    assert ForwardCostModel(fixed=20.0, seconds_per_token=1.5e-3).piece(many) == 80
    assert ForwardCostModel(fixed=20.0, seconds_per_token=1e-3).piece(many) == 100
    assert ForwardCostModel(fixed=300.0, seconds_per_token=2e-5).piece(many) == 5000


@pytest.mark.parametrize(
    ("left", "pieces"), [(1, [1]), (120, [120]), (121, [61, 60]), (300, [100] * 3), (330, [83, 83, 82, 82])]
)
def test_pieces_are_of_one_length_and_none_is_for_less_than_the_fixed_part(left: int, pieces: list[int]):
    cost_model, done = ForwardCostModel(fixed=20.0, seconds_per_token=1e-3), []
    while left:
        done.append(cost_model.piece(left))
        left -= done[-1]
    assert done == pieces


@pytest.mark.parametrize(("rested", "tokens"), [(4.9, 100), (10.0, 200), (20.0, 400), (1000.0, 500)])
def test_who_comes_after_a_rest_waits_for_a_fiftieth_of_it_at_most(rested: float, tokens: int):
    assert ForwardCostModel(fixed=20.0, seconds_per_token=1e-3).piece(1_000_000, rested) == tokens


class Engine:
    """Forwards that take `fixed` seconds and `per_token` more."""

    uses_mrope, block_size, num_blocks, max_model_len = False, 16, 1000, 8192
    spec = SimpleNamespace(max_batch_tokens=2048)

    def __init__(self, fixed: float, per_token: float) -> None:
        self.fixed, self.per_token = fixed, per_token
        self.now = 0.0
        self.lengths: list[int] = []

    def forward(self, work: Sequence[tuple[object, Sequence[Sequence[int]]]]) -> None:
        ((_, (run,)),) = work
        self.lengths.append(len(run))
        self.now += self.fixed + self.per_token * len(run)


@pytest.mark.parametrize(
    ("fixed", "per_token", "longest"), [(0.030, 1.5e-3, 64), (0.015, 2e-5, 2048), (0.015, 1e-9, 2048)]
)
def test_the_pace_of_an_engine_is_measured(
    fixed: float, per_token: float, longest: int, monkeypatch: pytest.MonkeyPatch
):
    engine = Engine(fixed, per_token)
    monkeypatch.setattr(cost_model, "time", SimpleNamespace(perf_counter=lambda: engine.now, monotonic=time.monotonic))
    found = measure_forward_cost(engine)
    assert max(engine.lengths) == longest
    per_token = max(per_token, (fixed + per_token) / 2048)
    assert found.cost.seconds_per_token == pytest.approx(per_token, rel=1e-3)
    assert found.seconds(1) == pytest.approx(fixed + per_token, rel=1e-3)
