"""The fidelity benchmark's figures, targets and records, and how far sums hold by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from infra.reference import DEFAULT_MODEL, digest, weights
from prefill_workers.model_card import measured
from serving.bench.fidelity.bench import (
    BENCHMARK,
    COMPOSE_UP_TO,
    KINDS,
    MARGIN,
    MULTI_HOP,
    SUMMED,
    TARGETS,
    figures_of,
    run,
    to_be_kept,
)
from serving.bench.fidelity.composition import BEHIND, holds_up_to
from serving.bench.fidelity.tables import BUDGETS, BY_LAYERS
from tests.benchmarks.documents.records import fidelity as recorded


def test_figures_are_named_by_family_split_arm_and_kind():
    names = ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction", "computed")
    tables = {f"gqa: {name}": {"patch_16": {"multi": 0.5, "multi ±": 0.1, "single": float("nan")}} for name in names}
    assert figures_of("gqa", tables) == {f"gqa.multi.patch_16.{name}": 0.5 for name in names}


def test_figures_of_windows_are_named_as_the_others():
    tables = {f"real: {name} of windows": {"kept_after_4": {"prose": 0.7, "prose ±": 0.1}} for name in ("eta", "kl")}
    assert figures_of("real", tables) == {"real.prose.kept_after_4.eta": 0.7, "real.prose.kept_after_4.kl": 0.7}


def test_a_text_model_is_asked_for_windows_alone():
    with pytest.raises(ValueError, match="smollm2 reads no pictures"):
        run(True, Console(), model=Path("models/smollm2"), only=["splits"])
    assert "smollm2" in BENCHMARK.folders


def measured_tables(blind: float) -> dict[str, dict[str, dict[str, float]]]:
    accuracy = {"exact": {"single": 1.0, "multi": 1.0}, "blind": {"single": 1.0, "multi": blind}}
    etas = {"patch_16": {"multi": 0.99}, "orbit": {"multi": 0.97}, "patch_64": {"multi": 1.0}}
    return {
        "mla: accuracy": accuracy,
        "mla: eta": etas,
        "mla: eta at equal bytes": {"patch_within_6": {"multi": 0.9}},
        "mla: flip_recover": {"patch_64": {"multi": 1.0}},
        f"mla: {BY_LAYERS}": {"multi reprefill": {"40%": 0.3}},
        f"mla: {MARGIN}": {f"{percent}%": {"multi": percent / 100, "single": float("nan")} for percent in BUDGETS},
    }


def test_a_run_over_one_family_is_held_to_that_familys_targets():
    figures = figures_of("mla", measured_tables(blind=0.4))
    assert figures["mla.multi.patch_within_6.eta"] == 0.9
    assert figures["mla.multi.reprefill_40.eta"] == 0.3
    assert figures["mla.multi.blind.lost"] == pytest.approx(0.6)
    assert figures["mla.multi.orbit.below_own"] == pytest.approx(0.02)
    assert figures["mla.multi.patch_within_6.margin"] == 0.06
    assert "mla.single.patch_within_6.margin" not in figures
    of_measured = [name for name in TARGETS if name.split(".")[0] in ("single", "multi")]
    assert BENCHMARK.targets_of(figures).keys() == {f"mla.{name}" for name in of_measured}
    assert BENCHMARK.targets_of(figures).keys() <= figures.keys()


def test_where_blind_reuse_loses_little_only_the_model_is_held_to_targets():
    figures = figures_of("mla", measured_tables(blind=0.95))
    left = {"single.exact.accuracy", "single.blind.lost", "multi.exact.accuracy"}
    assert set(BENCHMARK.targets_of(figures)) == {f"mla.{name}" for name in left}


def test_all_that_needs_several_pages_is_held_to_the_same_targets():
    names = [{name.partition(".")[2] for name in TARGETS if name.startswith(f"{split}.")} for split in MULTI_HOP]
    assert names[0] == names[1] == names[2]
    assert "orbit.below_own" in names[0]


def test_every_family_has_targets():
    assert BENCHMARK.targets.keys() == {f"{kind}.{name}" for kind in KINDS for name in TARGETS}


@pytest.mark.parametrize(("kind", "family"), KINDS.items())
def test_what_lies_beside_the_models_weights_is_what_the_recorded_table_says(kind: str, family: str):
    shipped, document = measured(weights(family)), recorded(kind)
    assert (shipped is None) == (document is None)
    if shipped is not None and document is not None:
        found = figures_of(kind, document.document["tables"])
        assert to_be_kept(kind, found).model_dump(include=SUMMED) == shipped.model_dump(include=SUMMED)
        told = {name: value for name, value in document.figures.items() if f".{COMPOSE_UP_TO}" in name}
        assert told
        assert told.items() <= found.items(), "by an older rule"


@pytest.mark.parametrize(("kind", "family"), KINDS.items())
def test_a_recorded_table_is_of_the_weights_that_are_shipped(kind: str, family: str):
    document = recorded(kind)
    assert document is not None
    for of in document.workload["weights"]:
        assert of == {kind: digest(weights(family))}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_that_ships_answers_its_questions_by_full_prefill(kind: str):
    document = recorded(kind)
    assert document is not None
    exact = document.table(f"{kind}: accuracy")["exact"]
    assert exact["single"] >= 0.95
    assert exact["multi"] >= 0.90
    assert sum(exact[split] for split in MULTI_HOP) / len(MULTI_HOP) >= 0.90


def test_the_bundled_model_ships_what_was_measured_of_it():
    assert measured(weights(DEFAULT_MODEL)) is not None


def accuracies(
    exact: float | Sequence[float] = 0.9, **by_split: dict[int, float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Tables in which exact and own patches answer so many of the questions, and sums as given, by antecedents."""

    def rows(sums: dict[int, float]) -> dict[str, dict[str, float]]:
        answered = [exact] * len(sums) if isinstance(exact, float) else exact
        return {
            f"{BEHIND}{size}": {"exact": of, "own": of, "measured": right}
            for (size, right), of in zip(sums.items(), answered, strict=True)
        }

    return {split: rows(sums) for split, sums in by_split.items()}


@pytest.mark.parametrize(
    ("by_split", "expected"),
    [
        ({"multi": {2: 0.9, 3: 0.88, 4: 0.89}, "control": {3: 0.9, 6: 0.9}}, 4),
        ({"multi": {2: 0.9, 3: 0.87, 4: 0.9}}, 2),  # what holds beyond a loss is chance
        ({"multi": {2: 0.9, 3: 0.9}, "control": {3: 0.8}}, 0),  # nobody knows of 2
        ({"multi": {2: 0.9, 3: 0.9}, "chain": {2: 0.1}}, 0),
        ({"multi": {2: 0.8}}, 0),
        ({"multi": {2: math.nan}}, 0),
        ({}, 0),
    ],
)
def test_sums_hold_as_far_as_every_split_was_measured_to(by_split: dict, expected: int):
    assert holds_up_to(accuracies(**by_split)) == expected


def test_what_a_model_cannot_answer_tells_nothing_of_sums():
    answered, unanswered = accuracies(multi={2: 0.9, 3: 0.9}), accuracies(0.45, chain={2: 0.3, 3: 0.45})
    assert holds_up_to(answered | unanswered) == 3
    assert holds_up_to(unanswered) == 0


@pytest.mark.parametrize(
    ("exact", "sums", "expected"),
    [
        ([0.83, 0.99], {2: 0.83, 3: 0.96}, 2),  # answered behind three only, where sums lose
        ([0.83, 0.99], {2: 0.83, 3: 0.98}, 3),
        ([0.83, 0.99], {2: 0.7, 3: 0.99}, 0),
        ([0.95, 0.8, 0.6], {2: 0.95, 3: 0.8, 4: 0.5}, 3),
    ],
)
def test_a_split_that_is_answered_behind_some_number_is_judged_behind_all(
    exact: list[float], sums: dict, expected: int
):
    others = accuracies(multi={2: 0.9, 3: 0.9, 4: 0.9})
    assert holds_up_to(others | accuracies(exact, tally=sums)) == expected


def test_sums_are_weighed_by_what_needs_no_forward_where_that_holds_as_far():
    def kept(kind: str, by_kv: int, by_attention: int) -> dict[str, object]:
        figures = {f"{kind}.compose_up_to": by_kv, f"{kind}.compose_up_to_by_attention": by_attention}
        return to_be_kept(kind, figures).model_dump(include=SUMMED)

    assert kept("gqa", 3, 4) == {"compose_up_to": 4, "weigh_by": "attention"}
    assert kept("gqa", 3, 3) == {"compose_up_to": 3, "weigh_by": "attention"}
    assert kept("gqa", 3, 2) == {"compose_up_to": 3, "weigh_by": "kv"}
    assert kept("gqa", 0, 0) == {"compose_up_to": 0, "weigh_by": "kv"}
    assert kept("mla", 3, 3) == {"compose_up_to": 3, "weigh_by": "kv"}, "the engine does not tell its attention"
