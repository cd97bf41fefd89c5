"""Lazy attention: layers with their leader's visual queries and keys (q_cache.md eq. 7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class LazyAttention:
    """Lazy blocks of a worker's forwards.

    Visual rows of a lazy layer's queries and keys are its leader's; text rows, and all values, are its own (eq. 7). The
    keys are stored that way: a decode engine that goes on from them by its own queries computes eq. 8.

    Attributes:
        leaders: of each lazy layer.
        shares_all: whether text rows are the leader's as well (GLA, eq. 5); for measurements.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self.leaders: Mapping[int, int] = {}
        self.shares_all = False

    @contextmanager
    def sharing(self, visual: Tensor) -> Iterator[None]:
        """Have a forward share queries and keys of its `visual` tokens, [tokens] bool on the host."""
        if not self.leaders or not (self.shares_all or bool(visual.any())):
            yield
            return
        rows = torch.ones_like(visual) if self.shares_all else visual
        noted: dict[int, tuple[Tensor, Tensor]] = {}
        with ExitStack() as hooks:
            for layer in {*self.leaders, *self.leaders.values()}:
                hook = self._layers[layer].register_forward_pre_hook(partial(self._take, layer, rows, noted))
                hooks.callback(hook.remove)
            yield

    def _take(self, layer: int, rows: Tensor, noted: dict[int, tuple[Tensor, Tensor]], _: Any, given: Any) -> Any:
        """Replace a lazy layer's queries and keys before it attends; note a leader's."""
        query, key, *rest = given
        if layer not in self.leaders:
            noted[layer] = query, key
            return None
        led, rows = noted[self.leaders[layer]], rows.to(query.device, non_blocking=True)
        return *(_replaced(own, other, rows) for own, other in zip((query, key), led, strict=True)), *rest


def _replaced(own: Tensor, other: Tensor, rows: Tensor) -> Tensor:
    """`own` [tokens, ...] with the rows of `other` where `rows` says so."""
    return torch.where(rows.view(-1, *[1] * (own.dim() - 1)), other, own)


def leaders_of(blocks: Sequence[Sequence[int]]) -> dict[int, int]:
    """Leader of each lazy layer: the first of its block."""
    return {layer: block[0] for block in blocks for layer in block[1:]}


def blocks_of(lazy: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Blocks of lazy layers: each follows the nearest one before it that is not lazy."""
    blocks: list[tuple[int, ...]] = []
    for layer in sorted(lazy):
        if blocks and blocks[-1][-1] == layer - 1:
            blocks[-1] += (layer,)
        else:
            blocks.append((layer - 1, layer))
    return tuple(blocks)
