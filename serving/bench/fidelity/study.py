"""Tables 1 and 2: what every arm answers, split by split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from infra.reference.families import ReferenceFamily
from infra.reference.scenes import Form, Split
from kvstore.operator.basis import SharedBasis, pool_basis
from kvstore.operator.patch import deficit, mean_deficit, orderings
from serving.bench.fidelity import prefix
from serving.bench.fidelity.arms import RANKS, Arm, Arms, PageKV, computed_share
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


class Study:
    """One family's items through all arms."""

    def __init__(self, reader: Reader, kind: ReferenceFamily) -> None:
        self.reader, self.kind = reader, kind
        self.arms = Arms.of(reader)

    def gathered(self, split: Split, count: int, form: Form, seed: int = SEED) -> Iterator[list[Gathered]]:
        """Items with their KV, a few at a time."""
        drawn = items(self.reader, self.kind, split, count, form, seed)
        while group := list(islice(drawn, BATCH)):
            yield self.gather(group)

    def gather(self, group: Sequence[Item]) -> list[Gathered]:
        """Every KV that the arms need of these items."""
        reader = self.reader
        prompts = [item.prompt(reader) for item in group]
        reads = reader.exact(prompts)
        alone = iter(reader.alone([place for prompt in prompts for place in prompt.places]))
        found = []
        for item, prompt, read, others in zip(group, prompts, reads, self._others(group, reads), strict=True):
            canonical = [next(alone) for _ in item.pages]
            pages = []
            for at, (kv, exact) in enumerate(zip(canonical, read.pages, strict=True)):
                start = prompt.places[at].page.span.first
                asked = torch.zeros(kv.shape[1], dtype=torch.bool)
                asked[start : start + len(item.asked[at])] = item.asked[at]
                page = PageKV(kv, exact, asked=asked)
                if 2 <= at <= MOST_PREDECESSORS:
                    deltas = {path[:-1]: deficit(others[path], kv) for path in _paths(at)}
                    page = replace(
                        page,
                        orbit=mean_deficit([delta for behind, delta in deltas.items() if len(behind) == at]),
                        pairs=tuple(deltas[(i,)] for i in range(at)),
                        base=deltas[()],
                    )
                pages.append(page)
            found.append(Gathered(item, prompt, read, pages))
        return found

    def _others(self, group: Sequence[Item], reads: Sequence[Read]) -> list[dict[tuple[int, ...], Tensor]]:
        """KV per item of pages behind other pages, by the path of indices to the page.

        Of pages with up to MOST_PREDECESSORS: an item of many pages would take dozens of forwards. Paths are gone one
        page at a time, over the KV of those before it, so that what several begin with is computed once.
        """
        found: list[dict[tuple[int, ...], Tensor]] = []
        wanted: list[set[tuple[int, ...]]] = []
        for item, read in zip(group, reads, strict=True):
            whole = tuple(range(len(item.pages)))
            found.append({whole[: i + 1]: kv for i, kv in enumerate(read.pages)})
            ends = [path for at in range(2, min(len(whole), 1 + MOST_PREDECESSORS)) for path in _paths(at)]
            wanted.append({path[: i + 1] for path in ends for i in range(len(path))} - found[-1].keys())
        for length in range(1, 2 + MOST_PREDECESSORS):
            todo = [(i, path) for i, paths in enumerate(wanted) for path in sorted(paths) if len(path) == length]
            prompts = [group[i].prompt(self.reader, path).pages_only for i, path in todo]
            given = [[*(found[i][path[:k]] for k in range(1, length)), None] for i, path in todo]
            for (i, path), read in zip(todo, self.reader.over(prompts, given, keep=[-1]), strict=True):
                found[i][path] = read.pages[0]
        return found

    def basis(self, form: Form) -> SharedBasis:
        """Directions pooled over items that no table asks about."""
        patches = []
        for group in self.gathered(Split.multi, _BASIS_ITEMS, form, seed=SEED + 1):
            patches += [self.arms.formed(page.delta, RANKS[-1]) for one in group for page in one.pages[1:]]
        return pool_basis(patches, RANKS[-1])

    def scored(self, groups: Iterable[Sequence[Gathered]], arms: Mapping[str, Arm]) -> dict[str, Scores]:
        """Scores of `exact` and of every arm, all pages linked by the arm."""
        scores: dict[str, Scores] = defaultdict(Scores)
        for group in groups:
            for one in group:
                self.score(scores, one, arms)
        return dict(scores)

    def score(self, scores: Mapping[str, Scores], one: Gathered, arms: Mapping[str, Arm]) -> None:
        """Add one item's outcome by `exact`, prefix caching and every arm, all pages linked."""
        wanted, exact = one.prompt.answer, one.exact.answers
        scores["exact"].add(exact, exact, wanted, computed=1.0)
        left = prefix.computed(one.prompt, "another order")
        scores["prefix"].add(exact, exact, wanted, kept=1.0, computed=left)
        linked = {name: [arm(page) for page in one.pages] for name, arm in arms.items()}
        reads: dict[str, Read] = {}
        for apart in {pages[0].apart for pages in linked.values()}:
            some = {name: pages for name, pages in linked.items() if pages[0].apart == apart}
            kv = [[page.kv for page in pages] for pages in some.values()]
            again = [[page.again for page in pages] for pages in some.values()]
            found = self.reader.over([one.prompt] * len(some), kv, again, apart=apart)
            reads |= zip(some, found, strict=True)
        for name, pages in linked.items():
            whole = sum(page.kv.nbytes for page in pages)
            scores[name].add(
                reads[name].answers,
                exact,
                wanted,
                kept=sum(page.nbytes for page in pages) / whole,
                computed=computed_share(pages),
            )


def _paths(at: int) -> list[tuple[int, ...]]:
    """Antecedents page `at` is read behind: every order of its predecessors, each alone, none.

    The present order is first.

    Each path ends with the page itself.
    """
    before = tuple(range(at))
    return [(*behind, at) for behind in (*orderings(before), *((i,) for i in before), ())]
