"""The tables of one model: name, row and column to a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import partial
from itertools import chain
from math import nan
from typing import TypeVar

import numpy as np
from rich.console import Console

from infra.reference.scenes import ASKED, Split
from kvstore.operator.patch import orderings
from serving.bench.fidelity import composition, envelope, growth, online, prefix, reorder, storage, windows
from serving.bench.fidelity.arms import RANKS, TOKEN_ARMS, Arm
from serving.bench.fidelity.reader import Prompt
from serving.bench.fidelity.scores import Scores, changed, margin, median, share, summary
from serving.bench.fidelity.shape import shape_of
from serving.bench.fidelity.study import Study
from serving.bench.fidelity.window_cases import Pictures
from serving.bench.harness import UNCERTAINTY
from serving.bench.kept import Kept
from serving.loadtest.records import machine

MAIN = ("accuracy", "kl", "eta", "flip_recover", "bytes_fraction", "computed")
EQUAL_BYTES = MAIN[:-1]
AT_EQUAL_BYTES = " at equal bytes"
BY_COMPOSITION = " by composition, "
PARTIAL = ("reprefill", "shallow", "layers")
BY_LAYERS = "eta by layers computed"
MARGIN = "eta of the patch over tokens at equal bytes"
BUDGETS = (6, 12, 25, 50)  # % of a page's KV bytes
STORED_RANK = 4  # low enough to tell ways of storing apart
LOST = 0.10  # accuracy; where blind reuse loses less, there is nothing to tell arms apart by
Table = dict[str, dict[str, float]]
Found = TypeVar("Found")
Rows = Mapping[str, Mapping[str, float]]  # arm and figure to a number


class Section(StrEnum):
    """Tables that are measured together."""

    splits = auto()
    shape = auto()
    orders = auto()
    drift = auto()
    online = auto()
    composition = auto()
    growth = auto()
    storage = auto()
    windows = auto()


def tables(
    study: Study, items: int, kept: Kept, console: Console, only: Collection[str] = tuple(Section)
) -> Iterator[tuple[str, Table]]:
    """The tables of these sections, as they come.

    Each cell is on `items` items, but for growth, which has as many between its numbers of pages.
    """
    made: dict[Section, Callable[[Study, int, Kept], Iterator[tuple[str, Table]]]] = {
        Section.splits: partial(_of_splits, console=console),
        Section.shape: _of_shape,
        Section.orders: _of_orders,
        Section.drift: _of_drift,
        Section.online: _of_online,
        Section.composition: _of_composition,
        Section.growth: _of_growth,
        Section.storage: _of_storage,
        Section.windows: partial(_of_windows, console=console),
    }
    for section, make in made.items():
        if section in only:
            yield from make(study, items, kept)


@dataclass(frozen=True)
class SplitResults:
    """Results of every split's items.

    `rows`: every arm's figures; `prompts`: one of each split.
    """

    rows: dict[Split, Rows] = field(default_factory=dict)
    prompts: dict[Split, Prompt] = field(default_factory=dict)


@dataclass(frozen=True)
class Tried:
    """Arms of the tables by split: standard ones, layer-computing ones, those of equal bytes."""

    standard: Mapping[str, Arm]
    partial: Mapping[str, Arm]
    within: Mapping[str, Arm]

    @classmethod
    def by(cls, study: Study) -> Tried:
        """All that a study's model can be tried with."""
        arms, layers, basis = study.arms, study.arms.layout.layers, study.basis(ASKED[Split.multi])
        made = zip(PARTIAL, (arms.reprefill, arms.shallow_layers, arms.deep_layers), strict=True)
        partial = {f"{name}_{round(100 * n / layers)}": arm(n / layers) for name, arm in made for n in range(1, layers)}
        return cls(arms.standard(basis), partial, dict(chain(*(arms.within(p, basis).items() for p in BUDGETS))))

    def measure(self, study: Study, split: Split, items: int) -> tuple[Rows, Prompt]:
        """All arms' figures on `items` items of a split, and the last one's prompt."""
        arms = {**self.standard, **self.partial, **self.within}
        scores = defaultdict[str, Scores](Scores)
        for one in chain.from_iterable(study.gathered(split, items, ASKED[split])):
            study.score(scores, one, arms)
        rows = summary(scores)
        for percent in BUDGETS:
            tokens = {arm: scores[f"{arm}_within_{percent}"] for arm in TOKEN_ARMS}
            found = margin(scores[f"patch_within_{percent}"], tokens, scores["blind"])
            if found is not None:
                rows[f"patch_within_{percent}"][f"margin {UNCERTAINTY}"] = found.uncertainty
        return rows, one.prompt


def _measure_splits(study: Study, tried: Tried, items: int, kept: Kept, console: Console) -> SplitResults:
    found = SplitResults()
    for split in ASKED:
        console.print(f"  {split}: {items} items")
        parts = kept.once(f"split {split}", partial(tried.measure, study, split, items))
        found.rows[split], found.prompts[split] = parts
    return found


def _of_splits(study: Study, items: int, kept: Kept, console: Console) -> Iterator[tuple[str, Table]]:
    tried = Tried.by(study)
    found = _measure_splits(study, tried, items, kept, console)
    for figure in MAIN:
        yield figure, _by_arm(found.rows, figure, ("exact", "prefix", *tried.standard))
    for figure in EQUAL_BYTES:
        yield figure + AT_EQUAL_BYTES, _by_arm(found.rows, figure, tried.within)
    yield MARGIN, {f"{percent}%": margins(found.rows, percent) for percent in BUDGETS}
    ranks = {f"patch_{rank}": str(rank) for rank in RANKS}
    yield (
        "eta by rank",
        {
            str(split): _with_uncertainty({rank: rows[arm] for arm, rank in ranks.items()}, "eta")
            for split, rows in found.rows.items()
        },
    )
    by_layers: Table = defaultdict(dict)
    for split, rows in found.rows.items():
        for arm in tried.partial:
            name, _, percent = arm.partition("_")
            by_layers[f"{split} {name}"] |= _with_uncertainty({f"{percent}%": rows[arm]}, "eta")
    yield BY_LAYERS, dict(by_layers)
    yield (
        "computed by prefix caching",
        {
            history: {str(split): prefix.computed(prompt, history) for split, prompt in found.prompts.items()}
            for history in prefix.HISTORIES
        },
    )


def _of_shape(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    shaped: dict[str, Table] = defaultdict(dict)
    for split, form in ASKED.items():
        shape = kept.once(f"shape {split}", partial(shape_of, study, split, items, form))
        for name, rows in shape.tables().items():
            shaped[name] |= {f"{split}{row}": dict(cells) for row, cells in rows.items()}
    yield from shaped.items()


def _by_arm(found: Mapping[Split, Rows], figure: str, arms: Iterable[str]) -> Table:
    """One figure of these arms by split, with its uncertainty where the figure has one."""
    table: Table = defaultdict(dict)
    for split, rows in found.items():
        for arm in arms:
            row = rows[arm]
            table[arm][str(split)] = row.get(figure, nan)
            if figure not in ("bytes_fraction", "computed"):
                table[arm][f"{split} {UNCERTAINTY}"] = row.get(f"{figure} {UNCERTAINTY}", nan)
    return dict(table)


def loses(lost: float) -> bool:
    """True if blind reuse loses enough accuracy (0 to 1) for arms to be told apart."""
    return lost >= LOST - 1e-9


def margins(found: Mapping[Split, Rows], percent: int) -> dict[str, float]:
    """η of the patch by split, less that of the best token-keeping arm of as many bytes.

    Where blind reuse loses less than LOST it is not defined.
    """
    cells = {}
    for split, rows in found.items():
        best = max(rows[f"{arm}_within_{percent}"].get("eta", nan) for arm in TOKEN_ARMS)
        patch = rows[f"patch_within_{percent}"]
        tells = loses(rows["exact"]["accuracy"] - rows["blind"]["accuracy"])
        cells[str(split)] = patch.get("eta", nan) - best if tells else nan
        if tells and (uncertainty := f"margin {UNCERTAINTY}") in patch:
            cells[f"{split} {UNCERTAINTY}"] = patch[uncertainty]
    return cells


def _of_orders(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    turned: dict[str, Table] = {"eta": {}, "accuracy": {}}
    for predecessors in reorder.FORMS:
        measure = partial(reorder.reorder, study, predecessors, items)
        scores, apart = kept.once(f"orders of {predecessors}", measure)
        rows, row = summary(scores, len(orderings(range(predecessors)))), f"K = {predecessors}"
        turned["eta"][row] = {**_with_uncertainty(_inexact(rows), "eta"), "orders apart": apart}
        turned["accuracy"][row] = _with_uncertainty(rows, "accuracy")
    yield "η by order", turned["eta"]
    yield "accuracy by order", turned["accuracy"]


def _of_drift(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    drifted = kept.once("drift", lambda: envelope.envelope(study, items))
    rows = {name: summary(scores) for name, scores in drifted.items()}
    yield "η by drift", {name: _with_uncertainty(_inexact(arms), "eta") for name, arms in rows.items()}
    told = [one.name for one in envelope.SITUATIONS if one.is_answerable]
    yield "accuracy by drift", {name: _with_uncertainty(rows[name], "accuracy") for name in told}
    answers = {name: {arm: share(changed(scores, arm)) for arm in _inexact(scores)} for name, scores in drifted.items()}
    yield "answers changed by drift", {name: _with_uncertainty(arms, "share") for name, arms in answers.items()}
    false = {f"false reuse, {name}": found for name, found in envelope.false_reuse(drifted)}
    yield "rule", {"linker's rule": _with_uncertainty(false, "share")}


def _of_online(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    """Each situation's items are of all splits alike."""
    checks = kept.once("situations", lambda: online.online(study, -(-items // len(online.SPLITS))))
    yield "rolling KL by situation", online.table(checks)


def _of_composition(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    for split, sizes in composition.SIZES.items():
        behind = {}
        for size in sizes:
            measure = partial(composition.compositions, study, split, size, items)
            behind[f"{composition.BEHIND}{size}"] = summary(kept.once(f"composition {split} {size}", measure))
        for figure in ("eta", "accuracy", "bytes_fraction", "computed"):
            rows = {name: _with_uncertainty(arms, figure) for name, arms in behind.items()}
            yield f"{figure}{BY_COMPOSITION}{split}", rows


def _of_growth(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    """Table of growth; its times are one machine's, measured again on another."""
    few = -(-items // len(growth.PAGES))
    grown = {
        pages: kept.once(f"growth {pages} on {machine()}", partial(growth.growth, study, pages, few))
        for pages in growth.PAGES
    }
    right: Table = {}
    took: Table = {}
    for mode in growth.MODES:
        right[mode] = _with_uncertainty({str(n): share(np.asarray(grown[n][mode][0])) for n in grown}, "share")
        took[mode] = _with_uncertainty({str(n): median(grown[n][mode][1]) for n in grown}, "median")
    yield "accuracy by pages", right
    yield "median TTFT by pages, ms", took


def _of_storage(study: Study, items: int, kept: Kept) -> Iterator[tuple[str, Table]]:
    measure = partial(storage.storage, study, Split.multi, STORED_RANK, items, ASKED[Split.multi])
    stored = summary(kept.once("storage", measure))
    yield (
        "equal bytes",
        {
            arm: {
                name: row[name]
                for figure in ("accuracy", "kl", "eta", "bytes_fraction")
                for name in (figure, f"{figure} {UNCERTAINTY}")
                if name in row
            }
            for arm, row in _inexact(stored).items()
        },
    )


def _of_windows(study: Study, items: int, kept: Kept, console: Console) -> Iterator[tuple[str, Table]]:
    cases = Pictures(study.reader, study.kind)
    yield from windows.tables(cases, study.arms, study.reader, items, kept, console)


def _inexact(arms: Mapping[str, Found]) -> dict[str, Found]:
    """All arms but `exact`."""
    return {arm: row for arm, row in arms.items() if arm != "exact"}


def _with_uncertainty(rows: Rows, figure: str) -> dict[str, float]:
    """One figure by arm, with its uncertainty where it has one."""
    cells: dict[str, float] = {}
    for arm, row in rows.items():
        cells[arm] = row.get(figure, nan)
        if (uncertainty := f"{figure} {UNCERTAINTY}") in row:
            cells[f"{arm} {UNCERTAINTY}"] = row[uncertainty]
    return cells
