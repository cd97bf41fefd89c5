"""Runs and sequences: the pure parts of linking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.block_table import get_block_table_width

from prefill_workers.engine.batch import assemble
from prefill_workers.sequence import Embedded, LinkSequence, Run, complement, forwards, merge_runs, split_runs


def test_runs_are_what_reuse_leaves():
    assert complement([Run(2, 5), Run(7, 9)], 12) == [Run(0, 2), Run(5, 7), Run(9, 12)]
    assert complement([], 4) == [Run(0, 4)]
    assert complement([Run(0, 4)], 4) == []
    assert complement([Run(0, 2), Run(2, 4)], 6) == [Run(4, 6)]
    assert complement([Run(5, 7), Run(8, 9)], 12, 4) == [Run(4, 5), Run(7, 8), Run(9, 12)]


def test_overlapping_runs_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        merge_runs([Run(0, 3), Run(2, 4)])


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True), st.integers(1, 50))
def test_splitting_by_budget_computes_every_token_once_and_in_order(edges, budget):
    edges = sorted(edges)
    runs = [Run(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    seen: list[int] = []
    rest = runs
    while rest:
        now, rest = split_runs(rest, budget)
        count = sum(len(run) for run in now)
        assert 0 < count <= budget
        seen += [t for run in now for t in range(run.start, run.stop)]
    assert seen == [t for run in runs for t in range(run.start, run.stop)]


def test_forwards_take_several_sequences_runs_up_to_the_budget():
    first, second, third = (LinkSequence(torch.zeros(20).int(), torch.arange(20), ()) for _ in range(3))
    cut = list(forwards([(first, [Run(0, 3), Run(5, 8)]), (second, []), (third, [Run(0, 5)])], 4))
    assert [[(place[0] is first, place[1]) for place in work] for work in cut] == [
        [(True, [Run(0, 3), Run(5, 6)])],
        [(True, [Run(6, 8)]), (False, [Run(0, 2)])],
        [(False, [Run(2, 5)])],
    ]


def test_embedding_rows_follow_the_mask_of_placeholders_that_carry_one():
    rows = torch.arange(3.0)[:, None]
    mask = torch.tensor([True, False, True, True])
    sequence = LinkSequence(torch.zeros(10).int(), torch.arange(10), (), (Embedded(4, rows, mask),))
    found, carries = sequence.embedding_rows(torch.tensor([3, 5, 6, 7]))
    assert carries.tolist() == [False, False, True, True]
    assert found is not None
    assert found.flatten().tolist() == [1.0, 2.0]
    none, carries = sequence.embedding_rows(torch.tensor([0, 1]))
    assert none is None
    assert not carries.any()


@pytest.mark.parametrize(
    ("block_size", "tokens", "width"),
    [(16, 1, 8), (16, 129, 16), (32, 159, 8), (64, 129, 4), (128, 300, 3), (48, 1, 8)],
)
def test_block_tables_are_as_wide_as_vllms(block_size: int, tokens: int, width: int):
    blocks = list(range(1, 1 + -(-tokens // block_size)))
    sequence = LinkSequence(torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens), blocks)
    tables = assemble([(sequence, [Run(0, 1), Run(tokens - 1, tokens)])], block_size).rows.block_tables
    assert tables.tolist() == [[*blocks, *[0] * (width - len(blocks))]] * 2
    assert get_block_table_width(len(blocks), block_size) == width
