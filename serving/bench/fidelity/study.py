"""Tables 1 to 3: what every arm answers, split by split, and what the deficit that it has to repair looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.basis import SharedBasis, pool_basis
from kvstore.patch import mean_deficit, orderings
from serving.bench.fidelity.arms import RANKS, Arm, Arms, PageKV
from serving.bench.fidelity.items import SEED, Item, items
from serving.bench.fidelity.reader import Prompt, Read, Reader
from serving.bench.fidelity.scores import Scores

BATCH = 8
MOST_PREDECESSORS = 3
_BASIS_ITEMS = 24


@dataclass(frozen=True, eq=False)
class Gathered:
    """An item's prompt, what an exact prefill of it gave, and its pages' KV."""

    item: Item
    prompt: Prompt
    exact: Read
    pages: list[PageKV]


@dataclass
class Shape:
    """What the deficit of the last page looks like, item by item.

    `depth` [items][layers]: its norm relative to the canonical KV's; `ranks`, `tokens` [items]: how many directions
    (the largest over layers and segments) and which share of the tokens hold 90 % of its energy.
    """

    depth: list[list[float]] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def add(self, page: PageKV, widths: Sequence[int]) -> None:
        """Take one item's last page."""
        delta = page.delta
        norm = delta.square().sum((1, 2)).sqrt() / page.canonical.float().square().sum((1, 2)).sqrt()
        self.depth.append(norm.tolist())
        deepest = delta[-1].split(list(widths), -1)
        self.ranks.append(max(_enough(torch.linalg.svdvals(part).square()) for part in deepest))
        energy = delta.square().sum((0, 2))
        self.tokens.append(_enough(energy.sort(descending=True).values) / len(energy))


def _enough(sorted_energy: Tensor, share: float = 0.9) -> int:
    total = sorted_energy.cumsum(0)
    return int((total < share * total[-1]).sum()) + 1


class Study:
    """One family's items through all arms."""

    def __init__(self, reader: Reader, cell: int) -> None:
        self.reader, self.cell = reader, cell
        self.arms = Arms(reader.engine.layout, reader.engine.dtype)

    def gathered(self, split: Split, count: int, form: Form, seed: int = SEED) -> Iterator[list[Gathered]]:
        """Items with their KV, a few at a time."""
        drawn = items(self.reader, self.cell, split, count, form, seed)
        while group := list(islice(drawn, BATCH)):
            yield self.gather(group)

    def gather(self, group: Sequence[Item]) -> list[Gathered]:
        """Every KV that the arms need of these items."""
        reader = self.reader
        prompts = [item.prompt(reader) for item in group]
        reads = reader.exact(prompts)
        alone = iter(reader.alone([place for prompt in prompts for place in prompt.places]))
        others = self._others(group)
        found = []
        for index, (item, prompt, read) in enumerate(zip(group, prompts, reads, strict=True)):
            canonical = [next(alone) for _ in item.pages]
            pages = []
            for at, (kv, exact) in enumerate(zip(canonical, read.pages, strict=True)):
                behind = others.get((index, at), {})
                deltas = {order: other.float() - kv.float() for order, other in behind.items()}
                orders = [delta for order, delta in deltas.items() if len(order) == at]
                start = prompt.places[at].page.span.first
                asked = torch.zeros(kv.shape[1], dtype=torch.bool)
                asked[start : start + len(item.asked[at])] = item.asked[at]
                pages.append(
                    PageKV(
                        kv,
                        exact,
                        orbit=mean_deficit([exact.float() - kv.float(), *orders]) if orders else None,
                        pairs=tuple(deltas[(i,)] for i in range(at)) if orders else (),
                        base=deltas.get(()),
                        asked=asked,
                    )
                )
            found.append(Gathered(item, prompt, read, pages))
        return found

    def _others(self, group: Sequence[Item]) -> dict[tuple[int, int], dict[tuple[int, ...], Tensor]]:
        """KV(B|A) behind other antecedents, by (item, page) and the antecedents' indices: orders, pairs, nothing.

        Of pages with up to MOST_PREDECESSORS: an item of many pages would take dozens of forwards.
        """
        wanted: list[tuple[int, int, tuple[int, ...]]] = []
        for index, item in enumerate(group):
            for at in range(2, min(len(item.pages), 1 + MOST_PREDECESSORS)):
                before = tuple(range(at))
                orders = [order for order in orderings(before, 6) if order != before]
                wanted += [(index, at, order) for order in (*orders, *((i,) for i in before), ())]
        prompts = [group[index].prompt(self.reader, (*order, at)) for index, at, order in wanted]
        reads = self.reader.exact(prompts, keep=[-1])
        found: dict[tuple[int, int], dict[tuple[int, ...], Tensor]] = {}
        for (index, at, order), read in zip(wanted, reads, strict=True):
            found.setdefault((index, at), {})[order] = read.pages[-1]
        return found

    def basis(self, form: Form) -> SharedBasis:
        """Directions pooled over items that no table asks about."""
        patches = []
        for group in self.gathered(Split.multi, _BASIS_ITEMS, form, seed=SEED + 1):
            patches += [self.arms.formed(page.delta, RANKS[-1]) for one in group for page in one.pages[1:]]
        return pool_basis(patches, RANKS[-1])

    def scored(
        self, groups: Iterator[list[Gathered]], arms: Mapping[str, Arm], shape: Shape | None = None
    ) -> dict[str, Scores]:
        """Scores of `exact` and of every arm, all pages linked by the arm."""
        scores = {name: Scores() for name in ("exact", *arms)}
        widths = [segment.features for segment in self.reader.engine.layout.segments]
        for group in groups:
            for one in group:
                wanted = one.prompt.answer
                scores["exact"].add(one.exact.answers, one.exact.answers, wanted, computed=1.0)
                if shape is not None:
                    shape.add(one.pages[-1], widths)
            for name, arm in arms.items():
                self._score(scores[name], group, arm)
        return scores

    def _score(self, scores: Scores, group: Sequence[Gathered], arm: Arm) -> None:
        linked = [[arm(page) for page in one.pages] for one in group]
        reads = self.reader.over(
            [one.prompt for one in group],
            [[page.kv for page in pages] for pages in linked],
            [[page.again for page in pages] for pages in linked],
        )
        for one, pages, read in zip(group, linked, reads, strict=True):
            tokens = sum(page.kv.shape[1] for page in pages)
            scores.add(
                read.answers,
                one.exact.answers,
                one.prompt.answer,
                kept=sum(page.nbytes for page in pages) / sum(page.kv.nbytes for page in pages),
                computed=sum(len(page.again) for page in pages if page.again is not None) / tokens,
            )
