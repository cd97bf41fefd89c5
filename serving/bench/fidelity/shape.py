"""Shape of the deficit that arms repair (kamera.md §4, Figs. 3, 5 and 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.operator.layout import Layout
from prefill_workers.link.token_selection import MEASURED_LAYER
from serving.bench.fidelity.arms import PageKV
from serving.bench.fidelity.scores import average
from serving.bench.fidelity.study import Study
from serving.bench.harness import UNCERTAINTY

DIRECTIONS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = (5, 10, 25, 50, 75)  # % of a page's


@dataclass
class Shape:
    """The deficits of the items' last pages, item by item.

    `depth` [items][layers]: norm relative to the canonical KV's; `ranks`, `tokens` [items]: how many directions (in the
    deepest layer, the larger number of its segments) and which share of the tokens hold 90 % of the energy.
    `by_rank`: by segment, [items][DIRECTIONS] the share that the first so many directions hold, mean over the layers
    that have a deficit; `by_tokens` [items][TOKENS]: the share that the tokens with most of it hold.
    """

    layout: Layout
    depth: list[list[float]] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    by_rank: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    by_tokens: list[list[float]] = field(default_factory=list)

    def add(self, page: PageKV) -> None:
        """Take one item's last page."""
        delta = page.delta
        norm = delta.square().sum((1, 2)).sqrt() / page.canonical.float().square().sum((1, 2)).sqrt()
        self.depth.append(norm.tolist())
        ranks = []
        for segment, part in zip(self.layout.segments, self.layout.split(delta), strict=True):
            spectrum = _spectrum(part)
            ranks.append(_enough(spectrum[-1]))
            held = spectrum.cumsum(1)[MEASURED_LAYER:] / spectrum[MEASURED_LAYER:].sum(1, keepdim=True)
            last = held.shape[1] - 1
            self.by_rank[segment.name].append([float(held[:, min(count - 1, last)].mean()) for count in DIRECTIONS])
        self.ranks.append(max(ranks))
        energy = delta.square().sum((0, 2)).sort(descending=True).values
        self.tokens.append(_enough(energy) / len(energy))
        share = energy.cumsum(0) / energy.sum()
        self.by_tokens.append([float(share[max(len(energy) * percent // 100 - 1, 0)]) for percent in TOKENS])

    def tables(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        """Rows of all splits, by table and row suffix."""
        spread = [*zip(self.tokens, self.ranks, strict=True)]
        return {
            "deficit norm by layer": {"": _means(range(self.layout.layers), self.depth)},
            "deficit spread": {"": _means(("tokens for 90%", "directions for 90%"), spread)},
            "energy by rank": {f" {name}": _means(DIRECTIONS, held) for name, held in self.by_rank.items()},
            "energy by tokens": {"": _means((f"{percent}%" for percent in TOKENS), self.by_tokens)},
        }


def shape_of(study: Study, split: Split, items: int, form: Form) -> Shape:
    """The deficits of a split's items."""
    found = Shape(study.arms.layout)
    for one in chain.from_iterable(study.gathered(split, items, form)):
        found.add(one.pages[-1])
    return found


def _means(columns: Iterable[object], items: Sequence[Sequence[float]]) -> dict[str, float]:
    """Column means over `items` [items][columns], with their uncertainty."""
    cells: dict[str, float] = {}
    for name, values in zip(columns, zip(*items, strict=True), strict=True):
        found = average(values)
        cells |= {str(name): found.value, f"{name} {UNCERTAINTY}": found.uncertainty}
    return cells


def _spectrum(delta: Tensor) -> Tensor:
    """Squared singular values [layers, n] of [layers, tokens, features], largest first."""
    tall = delta.double() if delta.shape[1] >= delta.shape[2] else delta.mT.double()
    return torch.linalg.eigvalsh(tall.mT @ tall).clamp_min(0.0).flip(-1)


def _enough(sorted_energy: Tensor) -> int:
    """Number of leading values that hold 90 % of the energy."""
    total = sorted_energy.cumsum(0)
    return int((total < 0.9 * total[-1]).sum()) + 1
