"""Table 7: patches behind a set from pair patches (`prefill_workers.link.compose`).

Δ(B|S) ≈ Δ(B|∅) + Σ c_i (Δ(B|A_i) - Δ(B|∅)), where ∅ stands for the fixed text alone. Pair patches have rank m each; the
own and orbit patches they are compared with have rank m, and `own_wide` the composed patch's rank m·|S|.

| arm | weights c_i |
|---|---|
| sum | 1 |
| scaled | one, fitted to other items of this split and size: one for the whole model can be no better |
| by_layer | one per layer, fitted alike |
| weighted | per token, from the attention that A_i takes in the first layer where it stands alone (see `masses`) |
| placed | the same from the first layer's attention in the very prompt, as `Weighing.ATTENTION` does |
| relative | what A_i takes of that attention over what it takes where it stands alone, 1 at most |
| measured | per token, whose sum is nearest to the second layer's KV in context, which the first layer alone gives |
| conditioned | 1, and A_i was itself read behind the rest of S that comes before it |
| conditioned_measured | both |
| cacheblend_r | none: r % of B's tokens computed in context |

`weighted` needs |S| numbers a token stored with the patches, `placed` the first layer's queries of B, `relative` both,
`measured` a partial forward over the request's tokens through one layer, like CacheBlend's choice.

`conditioned` is for chains (page 3 refers to page 2, which refers to page 1): what page 3 takes from page 1 it takes
through page 2, and a page 2 that was read alone has nothing to give. A library can store it wherever A_i's own patch
was known.

From the accuracies comes how far the linker sums (`holds_up_to`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import torch
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.operator.patch import Patch, PatchKind, compose, deficit, mean_deficit, orderings
from prefill_workers.link.compose import measured_weights, weighted_sum
from prefill_workers.link.token_selection import MEASURED_LAYER
from serving.bench.fidelity.arms import PageKV
from serving.bench.fidelity.items import SEED, Item, items
from serving.bench.fidelity.masses import FirstLayer, relative_weights, weights
from serving.bench.fidelity.probe import Behind, Probe
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import BATCH, Study

RANK = 16
SIZES = {
    **dict.fromkeys((Split.multi, Split.frames, Split.legend, Split.tally), (2, 3, 4, 5, 6)),
    Split.chain: (2, 3, 4), Split.single: (3, 6), Split.control: (3, 6),
}  # fmt: skip
BEHIND = "|S| = "  # so many antecedents: a row of the table
SHARES = (15, 30, 50)  # per cent of cacheblend
MOST_LOST = 0.02  # accuracy: half of the 95% interval of 500 items of which 0.95 are right
ANSWERED = 0.9  # accuracy of exact, behind some number of antecedents: as much as acceptance asks of multi-hop
_FITTED_ON = 16
_ORDERS = 4  # of an orbit patch, at most


@dataclass(frozen=True, eq=False)
class Parts:
    """A case with what its patch is put together from. Deficits are [layers, tokens, features].

    `alone`, `placed` [antecedents, heads, tokens]: `masses.FirstLayer.ratios` in the pairs' prompts and in the case's.
    """

    case: Behind
    base: Tensor
    pairs: list[Tensor]
    conditioned: list[Tensor]
    orbit: Tensor
    alone: Tensor
    placed: Tensor

    @property
    def added(self) -> Tensor:
        """Σ (Δ(B|A_i) - Δ(B|∅))."""
        return torch.stack(self.pairs).sum(0) - len(self.pairs) * self.base


def holds_up_to(accuracies: Mapping[str, Mapping[str, Mapping[str, float]]], by: str = "measured") -> int:
    """Largest antecedent set whose pair patches may be summed (`compose_up_to`); 0: none.

    A split holds up to the largest |S| that it was measured behind, if there and behind every smaller one that arm is
    at most MOST_LOST less accurate than `own`. The model's sums hold as far as all splits do that it answers behind
    some |S| (ANSWERED): what lies beyond a split's measurements is not claimed, and of questions that it mostly guesses
    at the tables tell what it loses. A model that answers chains sums nothing: what comes through a page between is in
    no pair.

    Args:
        accuracies: by split the table of `|S| = n`, by arm.
    """
    held = [_held(table, by) for table in accuracies.values() if _answered(table)]
    most = min(held, default=0)
    return most if most > 1 else 0


def _held(table: Mapping[str, Mapping[str, float]], by: str) -> int:
    held = 0
    for size, arms in _rows(table):
        if not arms["own"] - arms[by] <= MOST_LOST + 1e-9:
            break
        held = size
    return held


def _answered(table: Mapping[str, Mapping[str, float]]) -> bool:
    return any(arms["exact"] >= ANSWERED for arms in table.values())


def _rows(table: Mapping[str, Mapping[str, float]]) -> list[tuple[int, Mapping[str, float]]]:
    """Rows by |S|, the smallest first."""
    return sorted(((int(row.removeprefix(BEHIND)), arms) for row, arms in table.items()), key=itemgetter(0))


def form(predecessors: int) -> Form:
    """Pages of an item with that many predecessors."""
    return Form(predecessors + 1, 6, 8)


def compositions(study: Study, split: Split, predecessors: int, count: int) -> dict[str, Scores]:
    """Scores of the arms behind sets of that size, on `count` items of a split."""
    arms, probe = study.arms, Probe(study.reader)
    first = FirstLayer(study.reader.checkpoint, study.reader.engine.config.model_config.hf_text_config)
    fitted = list(_parts(study, first, split, predecessors, _FITTED_ON, SEED + 1))
    scale = _scale(fitted)
    by_layer = torch.tensor([_scale(fitted, layer) for layer in range(arms.layout.layers)])
    scores: dict[str, Scores] = defaultdict(Scores)
    parts = _parts(study, first, split, predecessors, count, SEED)
    while group := list(islice(parts, BATCH)):
        patches: dict[str, list[Patch | None]] = defaultdict(list)
        for one in group:
            base = arms.formed(one.base, RANK)
            pairs, conditioned = (_formed(study, deltas) for deltas in (one.pairs, one.conditioned))
            patches["blind"].append(None)
            patches["own"].append(arms.formed(one.case.delta, RANK))
            patches["own_wide"].append(arms.formed(one.case.delta, RANK * (predecessors + 1)))
            patches["orbit"].append(arms.formed(one.orbit, RANK, PatchKind.orbit))
            patches["sum"].append(compose(pairs, 1.0, base))
            patches["scaled"].append(compose(pairs, scale, base))
            patches["by_layer"].append(weighted_sum(base, pairs, by_layer[:, None].expand(predecessors, -1, 1)))
            patches["weighted"].append(weighted_sum(base, pairs, weights(one.alone)[:, None]))
            patches["placed"].append(weighted_sum(base, pairs, weights(one.placed)[:, None]))
            patches["relative"].append(weighted_sum(base, pairs, relative_weights(one.placed, one.alone)[:, None]))
            patches["measured"].append(composed_patch(base, pairs, one.case.delta))
            patches["conditioned"].append(compose(conditioned, 1.0, base))
            patches["conditioned_measured"].append(composed_patch(base, conditioned, one.case.delta))
        probe.score(scores, [one.case for one in group], patches)
        _blend(study, scores, [one.case for one in group])
    for name in ("measured", "conditioned_measured"):
        scores[name].computed = [_first_layers(study)] * count
    return dict(scores)


def composed_patch(base: Patch, pairs: Sequence[Patch], delta: Tensor) -> Patch:
    """The linker's composed patch, of Δ(B|S) only the layer that it measures."""
    return weighted_sum(base, pairs, measured_weights(base, pairs, delta[[MEASURED_LAYER]])[:, None])


def _formed(study: Study, deltas: Sequence[Tensor]) -> list[Patch]:
    return [study.arms.formed(delta, RANK, PatchKind.pair) for delta in deltas]


def _blend(study: Study, scores: dict[str, Scores], cases: Sequence[Behind]) -> None:
    """cacheblend_r on the last page, whose choice takes the first layers' partial forward."""
    for percent in SHARES:
        arm = study.arms.cacheblend(percent / 100)
        repaired = [arm(PageKV(case.canonical, case.exact.pages[-1])) for case in cases]
        before = [case.exact.pages[:-1] for case in cases]
        reads = study.reader.over(
            [case.prompt for case in cases],
            [[*exact, page.kv] for exact, page in zip(before, repaired, strict=True)],
            [[*(None for _ in exact), page.again] for exact, page in zip(before, repaired, strict=True)],
        )
        for case, page, read in zip(cases, repaired, reads, strict=True):
            computed = page.computed(page.measured)
            scores[f"cacheblend_{percent}"].add(read.answers, case.exact.answers, case.prompt.answer, computed=computed)


def _first_layers(study: Study) -> float:
    """The share of a prefill that a partial forward up to the measured layer takes."""
    return (MEASURED_LAYER + 1) / study.arms.layout.layers


def _scale(parts: Sequence[Parts], layer: int | None = None) -> float:
    """The c that is nearest to these items' own deficits, in one layer or in all."""
    which = slice(None) if layer is None else slice(layer, layer + 1)
    along = sum(float((one.added[which] * (one.case.delta - one.base)[which]).sum()) for one in parts)
    across = sum(float(one.added[which].square().sum()) for one in parts)
    return along / across if across else 1.0


def _parts(study: Study, first: FirstLayer, split: Split, predecessors: int, count: int, seed: int) -> Iterator[Parts]:
    drawn = items(study.reader, study.kind, split, count, form(predecessors), seed)
    while group := list(islice(drawn, BATCH)):
        yield from _parts_of(study, first, group, predecessors)


def _parts_of(study: Study, first: FirstLayer, group: Sequence[Item], predecessors: int) -> Iterator[Parts]:
    reader, probe = study.reader, Probe(study.reader)
    canonical = probe.canonical([item.pages[-1] for item in group])
    cases = probe.behind([item.prompt(reader) for item in group], canonical)
    others = [order for order in orderings(range(predecessors), _ORDERS)[1:] if order != tuple(range(predecessors))]
    behind = [(), *((i,) for i in range(predecessors)), *others]
    prompts = [item.prompt(reader, (*order, predecessors)) for item in group for order in behind]
    found = iter(probe.behind(prompts, [kv for kv in canonical for _ in behind]))
    given = _behind_patched(study, group, cases)
    for case, conditioned in zip(cases, given, strict=True):
        base, *pairs = (next(found) for _ in range(1 + predecessors))
        yield Parts(
            case,
            base.delta,
            [pair.delta for pair in pairs],
            conditioned,
            orbit=mean_deficit([case.delta, *(next(found).delta for _ in others)]),
            alone=torch.cat([first.ratios(pair.prompt) for pair in pairs]),
            placed=first.ratios(case.prompt),
        )


def _behind_patched(study: Study, group: Sequence[Item], cases: Sequence[Behind]) -> list[list[Tensor]]:
    """Δ(B|A_i) where A_i's KV is what it is behind the pages before it."""
    reader = study.reader
    prompts, pages = [], []
    for item, case in zip(group, cases, strict=True):
        *before, _ = case.exact.pages
        for i, kv in enumerate(before):
            prompts.append(item.prompt(reader, (i, len(before))))
            pages.append([kv, None])
    found = iter(reader.over(prompts, pages, keep=[-1]))
    return [[deficit(next(found).pages[0], case.canonical) for _ in case.exact.pages[1:]] for case in cases]
