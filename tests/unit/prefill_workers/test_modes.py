"""Modes and selection: what a request may write, and which tokens are chosen by it."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.operator.apply import relocate
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from prefill_workers.link.token_selection import deviations, runs_of, selected_by_deviation, selected_by_place
from prefill_workers.modes import Mode, ModeKind, OperatingPoint, Text, composed_antecedents, operating_point
from prefill_workers.sequence import Run, complement
from serving.frontend.errors import InvalidRequest
from serving.frontend.report import parse_options

WRITTEN = {
    "auto": Mode.AUTO,
    "exact": Mode.EXACT,
    "full-reuse": Mode.FULL_REUSE,
    "off": Mode.OFF,
    "mpic-0": Mode(ModeKind.MPIC, 0),
    "mpic-32": Mode(ModeKind.MPIC, 32),
    "mpic-4096": Mode(ModeKind.MPIC, 4096),
    "cacheblend-0": Mode(ModeKind.CACHEBLEND, 0),
    "cacheblend-15": Mode(ModeKind.CACHEBLEND, 15),
    "cacheblend-100": Mode(ModeKind.CACHEBLEND, 100),
}
NOT_MODES = ["", "fast", "AUTO", "mpic", "mpic-", "mpic--1", "mpic-4097", "mpic-1.5", "mpic-99999999999", "cacheblend"]
NOT_MODES += ["cacheblend-101", "cacheblend--1", "cacheblend-15%", "auto-1", "mpic-32 ", "mpic-٣"]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_mode_is_read_written_and_sent_between_processes(text: str):
    mode = Mode.parse(text)
    assert mode == WRITTEN[text]
    assert str(mode) == parse_options({"mode": text}).mode == text
    sent = pickle.loads(pickle.dumps(mode))
    assert (sent, sent.kind is mode.kind) == (mode, True)


def test_an_amount_may_be_written_with_zeros_before_it():
    assert parse_options({"mode": "mpic-0032"}).mode == "mpic-32"


@pytest.mark.parametrize("text", NOT_MODES)
def test_what_is_no_mode_is_told_what_is(text: str):
    with pytest.raises(ValueError, match=r"unknown mode .* use auto, exact, .*K from 0 to 4096.*R from 0 to 100"):
        Mode.parse(text)
    with pytest.raises(InvalidRequest, match="K from 0 to 4096") as refused:
        parse_options({"mode": text})
    assert refused.value.parameter == "orbit.mode"


@pytest.mark.parametrize(("kind", "amount"), [("auto", 1), ("mpic", 4097), ("mpic", -1), ("cacheblend", 101)])
def test_a_mode_cannot_be_made_with_an_amount_that_it_cannot_have(kind: str, amount: int):
    with pytest.raises(ValueError, match="out of range"):
        Mode(ModeKind(kind), amount)


@pytest.mark.parametrize(
    ("mode", "tokens", "count"),
    [
        ("mpic-0", 9, 0),
        ("mpic-4", 9, 4),
        ("mpic-9", 9, 9),
        ("mpic-32", 9, 9),
        ("cacheblend-0", 9, 0),
        ("cacheblend-1", 9, 1),
        ("cacheblend-50", 9, 5),
        ("cacheblend-50", 10, 5),
        ("cacheblend-100", 9, 9),
    ],
)
def test_how_many_tokens_a_mode_selects(mode: str, tokens: int, count: int):
    assert Mode.parse(mode).selected(tokens) == count


@pytest.mark.parametrize(
    ("mode", "selective", "recompute", "partial"),
    [
        ("full-reuse", False, False, False),
        ("mpic-0", True, False, False),
        ("mpic-5", True, True, False),
        ("cacheblend-0", True, False, False),
        ("cacheblend-5", True, True, True),
        ("cacheblend-100", True, True, False),
    ],
)
def test_what_a_mode_needs(mode: str, selective: bool, recompute: bool, partial: bool):
    parsed = Mode.parse(mode)
    found = parsed.is_selective, parsed.needs_recompute, parsed.needs_partial_forward
    assert found == (selective, recompute, partial)


def test_the_first_tokens_are_selected_by_place():
    assert selected_by_place(Mode.parse("mpic-3"), 10, 20) == (Run(10, 13),)
    assert selected_by_place(Mode.parse("mpic-30"), 10, 20) == (Run(10, 20),)
    assert selected_by_place(Mode.parse("cacheblend-100"), 10, 20) == (Run(10, 20),)
    assert selected_by_place(Mode.parse("mpic-0"), 10, 20) == ()


def test_the_tokens_that_deviate_most_are_selected_and_neighbours_make_one_run():
    deviation = torch.tensor([0.0, 5.0, 4.0, 0.1, 9.0, 0.2, 0.0, 0.0, 0.0, 3.0])
    assert selected_by_deviation(Mode.parse("cacheblend-35"), deviation, 100) == (
        Run(101, 103),
        Run(104, 105),
        Run(109, 110),
    )
    same = torch.ones(10)
    assert selected_by_deviation(Mode.parse("cacheblend-25"), same, 0) == (Run(0, 3),), "of equal ones the first"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 1000))
def test_runs_hold_what_a_mask_marks(marks: list[bool], start: int):
    runs = runs_of(torch.tensor(marks), start)
    assert [token for run in runs for token in range(run.start, run.stop)] == [
        start + i for i, mark in enumerate(marks) if mark
    ]
    assert all(left.stop < right.start for left, right in pairwise(runs))
    left = complement(runs, start + len(marks), start)
    assert sum(map(len, left)) + sum(map(len, runs)) == len(marks)


def test_deviation_is_the_distance_in_the_canonical_frame():
    layout = Layout.gqa(4, 2, 8, RotaryScheme((1.0, 0.5, 0.1, 0.01), "neox"))
    stored = torch.randn(1, 6, layout.features, generator=torch.Generator().manual_seed(0))
    added = torch.zeros_like(stored)
    added[0, 2, 3], added[0, 4, -2:] = 2.0, torch.tensor([3.0, 4.0])
    in_context = relocate(stored + added, 77, layout.of_one_layer)
    assert torch.allclose(deviations(in_context, stored, 77, layout), torch.tensor([0, 0, 2.0, 0, 5.0, 0]), atol=1e-4)


def test_what_text_keys_is_asked_for_by_name():
    assert parse_options(None).text is Text.AUTO
    assert parse_options({"text": "strict"}).text is Text.STRICT
    with pytest.raises(InvalidRequest, match=r"orbit\.text: .*'auto', 'strict' or 'free'"):
        parse_options({"text": "loose"})


@pytest.mark.parametrize(
    ("mode", "stored", "expected"),
    [
        (Mode.AUTO, {"canonical", "patch", "embeddings"}, OperatingPoint.PATCHED),
        (Mode.AUTO, {"canonical", "patch", "embeddings", "parts"}, OperatingPoint.COMPOSED),
        (Mode.AUTO, {"canonical", "embeddings"}, OperatingPoint.RECOMPUTED),
        (Mode.AUTO, {"patch", "embeddings"}, OperatingPoint.RECOMPUTED),
        (Mode.AUTO, set(), OperatingPoint.ENCODED),
        (Mode.EXACT, {"canonical", "patch", "embeddings"}, OperatingPoint.RECOMPUTED),
        (Mode.FULL_REUSE, {"canonical", "patch"}, OperatingPoint.RELOCATED),
        (Mode.FULL_REUSE, {"embeddings"}, OperatingPoint.RECOMPUTED),
        (Mode.OFF, set(), OperatingPoint.ENCODED),
        (Mode.parse("mpic-8"), {"canonical", "patch", "embeddings"}, OperatingPoint.SELECTED),
        (Mode.parse("mpic-8"), {"embeddings"}, OperatingPoint.RECOMPUTED),
        (Mode.parse("mpic-8"), {"canonical", "patch"}, OperatingPoint.ENCODED),
        (Mode.parse("mpic-0"), {"canonical"}, OperatingPoint.SELECTED),
        (Mode.parse("cacheblend-8"), {"canonical", "embeddings"}, OperatingPoint.SELECTED),
        (Mode.parse("cacheblend-8"), {"patch"}, OperatingPoint.ENCODED),
    ],
)
def test_a_chunk_is_linked_at_the_cheapest_point_that_its_mode_allows(mode, stored, expected):
    point = operating_point(
        mode,
        canonical="canonical" in stored,
        patch="patch" in stored,
        computable="embeddings" in stored,
        parts="parts" in stored,
    )
    assert point is expected


@pytest.mark.parametrize(("compose_up_to", "summed"), [(0, []), (1, []), (2, [2]), (4, [2, 3, 4])])
def test_pair_patches_are_summed_behind_two_antecedents_up_to_the_limit(compose_up_to: int, summed: list[int]):
    assert [count for count in range(8) if count in composed_antecedents(compose_up_to)] == summed
