"""Lazy attention: whose queries and keys a layer has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from prefill_workers.engine.lazy_attention import LazyAttention, blocks_of, leaders_of


class Layer(nn.Module):
    """Attention layer that notes what it is given."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.given = query, key, value
        return value


def walked(lazy: LazyAttention, layers: list[Layer], visual: Tensor) -> list[tuple[Tensor, ...]]:
    """Rows [tokens, features] of each layer, which are its number beforehand."""
    with lazy.sharing(visual):
        for number, layer in enumerate(layers):
            layer(*(torch.full((len(visual), width), float(number)) for width in (6, 4, 4)))
    return [layer.given for layer in layers]


VISUAL = torch.tensor([False, True, True, False])


def test_visual_rows_are_the_leaders_and_text_rows_and_values_a_layers_own():
    layers = [Layer() for _ in range(5)]
    lazy = LazyAttention(layers)
    lazy.leaders = leaders_of([(1, 2, 3)])
    for number, (query, key, value) in enumerate(walked(lazy, layers, VISUAL)):
        leader = 1 if number in (2, 3) else number
        for rows in (query, key):
            assert rows[:, 0].tolist() == [number, leader, leader, number]
        assert value[:, 0].tolist() == [number] * 4


def test_all_rows_are_the_leaders_where_all_are_shared():
    layers = [Layer(), Layer()]
    lazy = LazyAttention(layers)
    lazy.leaders, lazy.shares_all = {1: 0}, True
    (_, (query, key, value)) = walked(lazy, layers, torch.zeros(3, dtype=torch.bool))
    assert query.unique().tolist() == key.unique().tolist() == [0.0]
    assert value.unique().tolist() == [1.0]


def test_nothing_is_touched_without_lazy_layers_or_visual_tokens_and_afterwards():
    layers = [Layer(), Layer()]
    lazy = LazyAttention(layers)
    for leaders, visual in (({}, VISUAL), ({1: 0}, torch.zeros(4, dtype=torch.bool))):
        lazy.leaders = leaders
        assert walked(lazy, layers, visual)[1][0].unique().tolist() == [1.0]
    walked(lazy, layers, VISUAL)
    assert not any(layer._forward_pre_hooks for layer in layers)


@pytest.mark.parametrize(
    ("lazy", "blocks"), [([], ()), ([1], ((0, 1),)), ([3, 2, 7], ((1, 2, 3), (6, 7))), ([2, 4], ((1, 2), (3, 4)))]
)
def test_lazy_layers_follow_the_nearest_one_that_is_not(lazy: list[int], blocks: tuple[tuple[int, ...], ...]):
    assert blocks_of(lazy) == blocks
    assert sorted(leaders_of(blocks)) == sorted(lazy)
