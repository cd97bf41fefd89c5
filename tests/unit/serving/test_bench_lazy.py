"""Calibration of lazy blocks: chosen by what all of them cost together, not by how much alike layers attend."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

from serving.bench.lazy import Case, calibrate, confirmed, divergences, loss_of

LAYERS = 5
QUIET = Console(quiet=True)


class Engine:
    """Gives distributions that are off by the sum of what each lazy layer costs."""

    layout = SimpleNamespace(layers=LAYERS)

    def __init__(self, costs: dict[int, float]) -> None:
        self._costs, self._lazy, self._whole = costs, [], False

    def set_lazy(self, blocks: Any, *, shares_all: bool = False) -> None:
        self._lazy, self._whole = [layer for block in blocks for layer in block[1:]], shares_all

    def logits(self, work: Any) -> Tensor:
        off = sum(self._costs[layer] for layer in self._lazy) * (2 if self._whole else 1)
        return torch.tensor([[off, 0.0, 0.0]])


def case() -> Case:
    row = torch.full((LAYERS, 4), 0.25)
    row[2] = torch.tensor([0.7, 0.1, 0.1, 0.1])
    return Case(None, [], torch.full((1, 3), -math.log(3)), torch.tensor([False, True, True, False]), row)


@pytest.mark.parametrize(("max_kl", "blocks"), [(0.0, ()), (0.005, ((0, 1),)), (0.05, ((0, 1), (3, 4)))])
def test_layers_are_taken_up_from_the_cheapest_while_all_together_keep_the_bound(max_kl: float, blocks: Any):
    reader: Any = SimpleNamespace(engine=Engine({1: 0.1, 2: 3.0, 3: 0.6, 4: 0.2}))
    found = calibrate(reader, [case()], max_kl, Console(quiet=True))
    assert found.blocks == blocks
    assert found.loss.kl <= max_kl
    lazy = sum(len(block) - 1 for block in blocks)
    assert found.figures["bytes_with_vla"] == 1 - 0.5 * lazy / (2 * LAYERS)
    ladder = list(found.tables["the cheapest lazy layers together"].values())
    assert [row["bytes"] for row in ladder] == [1 - 0.5 * count / (2 * LAYERS) for count in (1, 2, 3, 4)]
    assert [row["KL"] for row in ladder] == sorted(row["KL"] for row in ladder)
    single = found.tables["one lazy layer"]
    assert single["2 from 1"]["KL"] > single["1 from 0"]["KL"] > 0
    assert single["1 from 0"]["KL, all tokens"] > single["1 from 0"]["KL"]


def test_the_loss_that_is_told_is_of_prompts_that_had_no_part_in_the_choice():
    chosen = calibrate(cast(Any, SimpleNamespace(engine=Engine({1: 0.1, 2: 3, 3: 3, 4: 3}))), [case()], 0.01, QUIET)
    elsewhere: Any = SimpleNamespace(engine=Engine({1: 1.0}))
    found = confirmed(elsewhere, chosen, [case()])
    assert found.blocks == chosen.blocks == ((0, 1),)
    assert found.loss == loss_of(elsewhere, [case()], chosen.blocks)
    assert found.figures["kl"] == found.loss.kl > chosen.loss.kl


def test_an_answer_counts_as_lost_whichever_of_its_tokens_comes_out_otherwise():
    own = torch.tensor([[5.0, 0, 0], [0.2, 0, 0], [5.0, 0, 0]]).log_softmax(-1)

    class Wrong(Engine):
        def logits(self, work: Any) -> Tensor:
            return own + torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]])

    sure = Case(None, [], own, case().visual, case().row)
    reader: Any = SimpleNamespace(engine=Wrong({}))
    found = loss_of(reader, [sure, sure], [(0, 1)])
    assert found.lost == 1.0
    assert 0 < found.kl < 0.1


def test_divergence_is_nothing_between_equals_and_at_most_ln_2():
    apart = divergences([case()])
    middle = float(apart["all"][1])
    assert apart["all"].tolist() == pytest.approx([0.0, middle, middle, 0.0], abs=1e-6)
    assert 0.05 < middle < math.log(2)
    assert apart["visual"].abs().max() < 1e-6, "the visual tokens of that layer are attended to alike"
    other = Case(None, [], case().own, case().visual, torch.eye(LAYERS)[:, :4])
    assert float(divergences([other])["all"][0]) == pytest.approx(math.log(2), abs=1e-4)
