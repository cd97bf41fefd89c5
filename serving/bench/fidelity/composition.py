"""Table 7: patches behind a set from patches behind each of its members (DESIGN, Kinds, composed).

Δ(B|S) ≈ Δ(B|∅) + c·Σ (Δ(B|A_i) - Δ(B|∅)), where ∅ stands for the fixed text alone. Pair patches have rank m each; the
own and orbit patches they are compared with have rank m, and `own_wide` the composed patch's rank m·|S|.

| arm | scale c |
|---|---|
| sum | 1 |
| scaled | one for the model and this size of S, fitted to other items |
| by_layer | one per layer, fitted to other items |
| conditioned | 1, and A_i was itself read behind the rest of S that comes before it |

The last is for chains (page 3 refers to page 2, which refers to page 1): what page 3 takes from page 1 it takes through
page 2, and a page 2 that was read alone has nothing to give. A library can store it wherever A_i's own patch was known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.patch import Patch, PatchKind, compose
from serving.bench.fidelity.items import SEED, Item, items
from serving.bench.fidelity.probe import Behind, Probe
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import BATCH, Study

RANK = 16
_FITTED_ON = 16


@dataclass(frozen=True, eq=False)
class Parts:
    """A case with the deficits that its patch is put together from, each [layers, tokens, features]."""

    case: Behind
    base: Tensor
    pairs: list[Tensor]
    conditioned: list[Tensor]

    @property
    def added(self) -> Tensor:
        """Σ (Δ(B|A_i) - Δ(B|∅))."""
        return torch.stack(self.pairs).sum(0) - len(self.pairs) * self.base


def form(predecessors: int) -> Form:
    """Pages of an item with that many predecessors."""
    return Form(predecessors + 1, 6, 8)


def compositions(study: Study, split: Split, predecessors: int, count: int) -> dict[str, Scores]:
    """Scores of the arms behind sets of that size, on `count` items of a split."""
    arms, probe = study.arms, Probe(study.reader)
    fitted = list(_parts(study, split, predecessors, _FITTED_ON, SEED + 1))
    scale = _scale(fitted)
    by_layer = [_scale(fitted, layer) for layer in range(arms.layout.layers)]
    scores: dict[str, Scores] = defaultdict(Scores)
    parts = _parts(study, split, predecessors, count, SEED)
    while group := list(islice(parts, BATCH)):
        patches: dict[str, list[Patch | None]] = {"blind": [None] * len(group)}
        patches["own"] = [arms.formed(one.case.delta, RANK) for one in group]
        patches["own_wide"] = [arms.formed(one.case.delta, RANK * (predecessors + 1)) for one in group]
        patches["sum"] = [_composed(study, one, one.pairs, 1.0) for one in group]
        patches["scaled"] = [_composed(study, one, one.pairs, scale) for one in group]
        patches["by_layer"] = [_by_layer(study, one, by_layer) for one in group]
        patches["conditioned"] = [_composed(study, one, one.conditioned, 1.0) for one in group]
        probe.score(scores, [one.case for one in group], patches)
    return dict(scores)


def _composed(study: Study, one: Parts, pairs: Sequence[Tensor], scale: float) -> Patch:
    formed = [study.arms.formed(pair, RANK, PatchKind.pair) for pair in pairs]
    return compose(formed, scale, study.arms.formed(one.base, RANK))


def _by_layer(study: Study, one: Parts, scales: Sequence[float]) -> Patch:
    """Each layer of the sum with a scale of its own."""
    across = torch.tensor(scales)
    pairs = [_weighted(study.arms.formed(pair, RANK, PatchKind.pair), across) for pair in one.pairs]
    base = study.arms.formed(one.base, RANK)
    return compose([*pairs, _weighted(base, 1 - across * len(pairs))])


def _weighted(patch: Patch, by_layer: Tensor) -> Patch:
    return replace(patch, segments=tuple(part.weighted(by_layer) for part in patch.segments))


def _scale(parts: Sequence[Parts], layer: int | None = None) -> float:
    """The c that is nearest to these items' own deficits, in one layer or in all."""
    which = slice(None) if layer is None else slice(layer, layer + 1)
    along = sum(float((one.added[which] * (one.case.delta - one.base)[which]).sum()) for one in parts)
    across = sum(float(one.added[which].square().sum()) for one in parts)
    return along / across if across else 1.0


def _parts(study: Study, split: Split, predecessors: int, count: int, seed: int) -> Iterator[Parts]:
    drawn = items(study.reader, study.cell, split, count, form(predecessors), seed)
    while group := list(islice(drawn, BATCH)):
        yield from _parts_of(study, group, predecessors)


def _parts_of(study: Study, group: Sequence[Item], predecessors: int) -> Iterator[Parts]:
    reader, probe = study.reader, Probe(study.reader)
    canonical = probe.canonical([item.pages[-1] for item in group])
    cases = probe.behind([item.prompt(reader) for item in group], canonical)
    orders = [(), *((i,) for i in range(predecessors))]
    prompts = [item.prompt(reader, (*order, predecessors)) for item in group for order in orders]
    lone = [kv for kv in canonical for _ in orders]
    behind = iter(probe.behind(prompts, lone))
    given = _behind_patched(study, group, predecessors, canonical)
    for case, conditioned in zip(cases, given, strict=True):
        base, *pairs = (next(behind).delta for _ in orders)
        yield Parts(case, base, pairs, conditioned)


def _behind_patched(
    study: Study, group: Sequence[Item], predecessors: int, canonical: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Δ(B|A_i) where A_i's KV is what it is behind the pages before it."""
    reader = study.reader
    whole = reader.exact([item.prompt(reader) for item in group])
    prompts, pages = [], []
    for item, read in zip(group, whole, strict=True):
        for i in range(predecessors):
            prompts.append(item.prompt(reader, (i, predecessors)))
            pages.append([read.pages[i], None])
    found = iter(reader.over(prompts, pages, keep=[-1]))
    return [[next(found).pages[0].float() - kv.float() for _ in range(predecessors)] for kv in canonical]
