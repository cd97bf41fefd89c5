"""Cost of forwards, of one and of a queue's."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoscale.curves import ForwardCost

COST = ForwardCost(fixed_tokens=20.0, seconds_per_token=1e-3)


def test_a_forward_takes_its_fixed_part_and_so_much_per_token():
    assert COST.seconds(100) == pytest.approx(0.12)
    assert COST.added_seconds(100) == pytest.approx(0.1)
    assert ForwardCost(fixed_tokens=20.0).seconds(100) == 0.0, "not measured yet"


@pytest.mark.parametrize(
    ("tokens", "others", "behind", "joins"),
    [
        (20, 1, 0, True),  # it delays one link by 20 tokens, and spares itself 20
        (21, 1, 0, False),
        (290, 1, 0, False),  # two prompts of which nothing is known: one after the other
        (290, 1, 14, True),  # unless many wait behind them
        (10, 2, 0, True),
        (11, 2, 0, False),
        (11, 2, 1, True),
    ],
)
def test_a_link_joins_where_that_saves_more_waiting_than_it_causes(tokens: int, others: int, behind: int, joins: bool):
    assert COST.joins(tokens, others, behind) is joins


def test_links_that_compute_little_share_forwards_and_long_ones_have_their_own():
    cost = ForwardCost(fixed_tokens=16.0)
    assert cost.forwards(0, 0) == 0
    assert cost.forwards(1, 5) == 1
    assert cost.forwards(9, 0) == 1
    assert round(cost.forwards(10, 10 * 4)) == 2
    assert cost.forwards(10, 10 * 500) == 10
    assert cost.queued_tokens(10, 10 * 500) == 10 * (500 + 16)


@example(61, 62, 4.4375)
@given(st.integers(1, 200), st.integers(1, 600), st.floats(1, 300))
def test_about_as_many_forwards_are_expected_as_the_scheduler_makes_of_links_that_wait(
    links: int, tokens: int, fixed: float
):
    cost, left, made = ForwardCost(fixed), links, 0
    while left:
        joined = 1
        while joined < left and cost.joins(tokens, joined, left - joined - 1):
            joined += 1
        left, made = left - joined, made + 1
    expected = cost.forwards(links, links * tokens)
    assert 0.6 * expected <= made <= 1.4 * expected


def test_curves_are_read_without_torch_ray_or_vllm():
    look = "import sys, autoscale.curves; print(*({'torch', 'ray', 'vllm'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
