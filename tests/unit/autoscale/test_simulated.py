"""Simulated library: what a replica alone holds, what its end costs, and what a hand-over moves in its time."""

from __future__ import annotations

import pytest

from autoscale.curves import ForwardCost
from autoscale.simulated import Library, Machine
from autoscale.traces import Chunk

# 1,000 tokens of a chunk: 1 s to move, 2 s to compute
MACHINE = Machine(forward=ForwardCost(0.0, 2e-3), encode_s_per_token=0.0, bytes_per_token=1000, bytes_per_second=1e6)
A, B, C = (Chunk(name, 1000) for name in "abc")


def library(machine: Machine = MACHINE, shared: bool = False) -> Library:
    made = Library(machine, shared)
    made.keep("one", [A, B])
    made.keep("two", [C])
    return made


def test_what_a_replica_alone_holds_is_counted_as_copies_come_and_go():
    made = library()
    assert (made.tokens_only_at("one"), made.tokens_only_at("two")) == (2000, 1000)
    made.keep("two", [A])
    assert (made.tokens_only_at("one"), made.tokens_only_at("two")) == (1000, 1000)
    made.lose("two")
    assert (made.tokens_only_at("one"), made.tokens_only_at("two")) == (2000, 0)
    assert made.lacks(C, [])
    assert not made.lacks(A, [])


def test_a_full_disk_gives_up_what_was_used_least_lately():
    made = library(Machine(bytes_per_token=1000, disk_bytes=2e6))
    made.keep("one", [C])
    assert (made.tokens_only_at("one"), made.tokens_only_at("two")) == (1000, 0)
    assert made.lacks(A, [])


@pytest.mark.parametrize(("per_token", "seconds"), [(2e-3, 2.0), (1e-4, 0.2)])
def test_an_end_costs_the_hand_over_or_the_work_again_whichever_is_less(per_token: float, seconds: float):
    machine = Machine(
        forward=ForwardCost(0.0, per_token), encode_s_per_token=0.0, bytes_per_token=1000, bytes_per_second=1e6
    )
    assert library(machine).end_costs_s("one") == pytest.approx(seconds)
    assert library(machine, shared=True).end_costs_s("one") == 0.0, "a tier that outlives it has all"


def test_a_hand_over_moves_the_last_used_first_and_stops_in_time():
    made = library()
    assert made.hand_over("one", ["two"], 1.5) == pytest.approx(1.0)
    made.lose("one")
    assert not made.lacks(B, [])
    assert made.lacks(A, [])
    assert library().hand_over("one", ["two", "three"], 30.0) == pytest.approx(2.0)
    assert library().hand_over("one", [], 30.0) == 0.0
