"""Survivors of a sliding window, and recalled chunks (kamera.md Table 1, §5, App. B).

Survivors, in a window of WINDOW units, after so many slides in a row:

| arm       | KV of what stays                                                                       |
|-----------|----------------------------------------------------------------------------------------|
| blind     | canonical                                                                              |
| kept      | as it was computed behind what has left, relocated: a session's `survivors: keep`      |
| removal   | the same with the paper's patch, of rank RANK, that takes out what has left            |
| refreshed | at every slide the oldest unit as it is behind the head alone: `survivors: refresh`    |

The newest unit is computed over it at each slide, so that what is wrong goes on into it. Recall, behind a window of
BEHIND_UNITS units of which so many per cent have turned over since the chunk left:

| arm       | patch of the recalled chunk, at the end of the window                                  |
|-----------|----------------------------------------------------------------------------------------|
| blind     | none                                                                                   |
| stale     | of rank RANK, formed behind the window when the chunk left                             |
| fresh     | of rank RANK, formed behind the window as it is now                                    |
| rebuilt   | of full rank, formed behind the window as it is now                                    |
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
from rich.console import Console
from torch import Tensor

from kvstore.operator.apply import apply
from kvstore.operator.patch import Patch, PatchKind, deficit
from serving.bench.fidelity.arms import Arms
from serving.bench.fidelity.probe import Probe
from serving.bench.fidelity.reader import Page, Place, Prompt, Reader
from serving.bench.fidelity.scores import Scores, average, summary
from serving.bench.fidelity.window_cases import Case, Cases
from serving.bench.harness import UNCERTAINTY
from serving.bench.kept import Kept

OF_WINDOWS = " of windows"
SAME_TOKENS = "same_tokens"
FIGURES = ("accuracy", SAME_TOKENS, "kl", "eta", "flip_recover", "bytes_fraction")
MOST_CASES = 100  # a table
WINDOW, SLIDES = 3, (1, 2, 4, 8)
BEHIND_UNITS = 5
TURNED = tuple(range(BEHIND_UNITS + 1))  # units of the window that have turned over
RANK = 32
CaseKV = list[list[Tensor]]  # per case and segment, [layers, tokens, features]
_BATCH = 8  # cases at a time: their KV is in memory
Measured = Callable[[int], None]  # told of so many more cases


def survivors(
    cases: Cases, arms: Arms, reader: Reader, split: str, slides: int, count: int, measured: Measured
) -> dict[str, Scores]:
    """Scores by arm after so many slides, on up to `count` cases."""
    scores: dict[str, Scores] = defaultdict(Scores)
    layout, unit = arms.layout, cases.unit
    stay = (WINDOW - 1) * unit
    for group in _grouped(cases.draw(split, WINDOW + slides, WINDOW, count)):
        kept, refreshed = _slid(reader, group, slides, unit)
        prompts = [case.ask(_window(case, slides, unit)) for case in group]
        exact = reader.exact(prompts, keep=range(stay))
        alone = iter(reader.alone([place for prompt in prompts for place in prompt.places[:stay]]))
        for i, (prompt, read) in enumerate(zip(prompts, exact, strict=True)):
            removals = [
                arms.formed(deficit(right, kv), RANK, PatchKind.removal)
                for right, kv in zip(read.pages, kept[i], strict=True)
            ]
            whole = sum(kv.nbytes for kv in kept[i])
            patches = sum(patch.nbytes for patch in removals) / whole
            given: dict[str, tuple[Sequence[Tensor], float]] = {  # with bytes beside the canonical KV
                "blind": ([next(alone) for _ in range(stay)], 0.0),
                "kept": (kept[i], 1.0),
                "removal": ([apply(kv, p, 0, layout) for kv, p in zip(kept[i], removals, strict=True)], 1.0 + patches),
                "refreshed": ([*read.pages[:unit], *refreshed[i][unit:]], 2.0),
            }
            new = _tokens(prompt.places[stay:]) / _tokens(prompt.places)
            scores["exact"].add(read.answers, read.answers, prompt.answer, computed=1.0)
            answered = reader.over([prompt] * len(given), [[*kv, *[None] * unit] for kv, _ in given.values()])
            for (arm, (_, nbytes)), one in zip(given.items(), answered, strict=True):
                scores[arm].add(one.answers, read.answers, prompt.answer, nbytes, new)
        measured(len(group))
    return dict(scores)


def _slid(reader: Reader, group: Sequence[Case], slides: int, unit: int) -> tuple[CaseKV, CaseKV]:
    """KV of what stays after so many slides, per case and segment: kept, and refreshed at every slide."""
    first = [case.ask(_window(case, 0, unit)).pages_only for case in group]
    kept = [read.pages for read in reader.exact(first)]
    refreshed = kept
    for slide in range(1, slides):
        prompts = [case.ask(_window(case, slide, unit)).pages_only for case in group]
        kept = _slide(reader, prompts, kept, unit, 0)
        refreshed = _slide(reader, prompts, refreshed, unit, unit)
    return [kv[unit:] for kv in kept], [kv[unit:] for kv in refreshed]


def _slide(reader: Reader, prompts: Sequence[Prompt], before: CaseKV, unit: int, oldest: int) -> CaseKV:
    """KV of windows one unit on: the newest unit is computed, and so are the first `oldest` segments."""
    given = [[*[None] * oldest, *kv[unit + oldest :], *[None] * unit] for kv in before]
    computed = [i for i, kv in enumerate(given[0]) if kv is None]
    found: CaseKV = []
    for kv, read in zip(given, reader.over(prompts, given, keep=computed), strict=True):
        pages = iter(read.pages)
        found.append([next(pages) if one is None else one for one in kv])
    return found


def recalled(cases: Cases, arms: Arms, reader: Reader, split: str, count: int, measured: Measured) -> dict[str, Scores]:
    """Scores by arm of a chunk that comes back, on up to `count` cases."""
    scores: dict[str, Scores] = defaultdict(Scores)
    probe, unit, behind = Probe(reader), cases.unit, BEHIND_UNITS * cases.unit
    for group in _grouped(cases.draw(split, 2 * BEHIND_UNITS + 1, BEHIND_UNITS + 1, count)):
        chunks = [case.segments[2 * behind] for case in group]
        windows = {turned: [_turned(case, turned, behind, unit) for case in group] for turned in TURNED}
        prompts = [case.ask([*window, chunk]) for case, window, chunk in zip(group, windows[0], chunks, strict=True)]
        canonical = reader.alone([prompt.places[-1] for prompt in prompts])
        now = probe.behind(prompts, canonical)
        deltas = {0: [one.delta for one in now]}
        for turned in TURNED[1:]:
            asked = zip(group, windows[turned], chunks, strict=True)
            then = reader.exact([case.ask([*window, chunk]).pages_only for case, window, chunk in asked], keep=[-1])
            deltas[turned] = [deficit(read.pages[0], kv) for read, kv in zip(then, canonical, strict=True)]
        patches: dict[str, list[Patch | None]] = {"blind": [None] * len(now)}
        for turned in TURNED:
            name = f"stale_{100 * turned // BEHIND_UNITS}"
            patches[name] = [arms.formed(delta, RANK) for delta in deltas[turned]]
        patches["rebuilt"] = [arms.formed(delta, None) for delta in deltas[0]]
        probe.score(scores, now, patches)
        measured(len(group))
    return {**scores, "fresh": scores["stale_0"]}


def _turned(case: Case, turned: int, behind: int, unit: int) -> Sequence[Page]:
    """The window of which so many units have left by now, the one that is asked behind."""
    start = behind - turned * unit
    return case.segments[start : start + behind]


def _window(case: Case, slide: int, unit: int) -> Sequence[Page]:
    return case.segments[slide * unit : (slide + WINDOW) * unit]


def _grouped(cases: Iterator[Case]) -> Iterator[list[Case]]:
    while group := list(islice(cases, _BATCH)):
        yield group


def _tokens(places: Sequence[Place]) -> int:
    return sum(place.stop - place.start for place in places)


def same_tokens(scores: Mapping[str, Scores], arm: str) -> dict[str, float]:
    """Share of the answers' tokens that are those of `exact`, and half its interval over cases."""
    pairs = zip(scores[arm].top, scores["exact"].top, strict=True)
    found = average([float(np.mean(np.equal(ours, theirs))) for ours, theirs in pairs])
    return {SAME_TOKENS: found.value, f"{SAME_TOKENS} {UNCERTAINTY}": found.uncertainty}


def tables(
    cases: Cases, arms: Arms, reader: Reader, count: int, kept: Kept, console: Console
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """A table of each figure, by arm and split: `kept_after_4`, `stale_20`, `fresh`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    count = min(count, MOST_CASES)
    progress = Progress(console, len(cases.splits) * (len(SLIDES) + 1), count)
    for split in cases.splits:
        rows: dict[str, dict[str, float]] = {}
        for slides in SLIDES:
            progress.begin(f"{split}: survivors of {slides} slides")
            measure = partial(survivors, cases, arms, reader, split, slides, count, progress.measured)
            scores = kept.once(f"survivors {split} {slides}", measure)
            rows |= {f"{arm}_after_{slides}": row for arm, row in _rows(scores).items()}
        progress.begin(f"{split}: recalled chunks")
        measure = partial(recalled, cases, arms, reader, split, count, progress.measured)
        again = kept.once(f"recalled {split}", measure)
        named = {"exact": "exact_recalled", "blind": "blind_recalled"}
        found[split] = rows | {named.get(arm, arm): row for arm, row in _rows(again).items()}
    for figure in FIGURES:
        table = _by_arm(found, figure)
        if table and (figure != "accuracy" or cases.has_answers):  # of few cases no flips are recovered
            yield figure + OF_WINDOWS, table


class Progress:
    """Progress of tables that are measured one after another, with an estimate of the time left.

    Args:
        parts: tables.
        count: cases of each, if its model has so many.
    """

    def __init__(self, console: Console, parts: int, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._left, self._count, self._clock = console, parts, count, clock
        self._done = self._whole = 0
        self._seconds, self._since = 0.0, clock()

    def begin(self, name: str) -> None:
        """Go on with the next table.

        One that was measured before takes no time, and counts for nothing.
        """
        self._done, self._since = 0, self._clock()
        self._left -= 1
        self._console.print(f"  {name}")

    def measured(self, cases: int) -> None:
        """Count further cases of the table, and tell what is left of all."""
        now = self._clock()
        self._done, self._whole = self._done + cases, self._whole + cases
        self._seconds, self._since = self._seconds + now - self._since, now
        each = self._seconds / self._whole
        left = each * (self._count - self._done + self._left * self._count)
        self._console.print(
            f"    {self._done} of {self._count} cases, {each:.1f} s each; about {left / 60:.0f} minutes left",
            highlight=False,
        )


def _rows(scores: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    return {arm: row | same_tokens(scores, arm) for arm, row in summary(scores).items()}


def _by_arm(found: Mapping[str, Mapping[str, Mapping[str, float]]], figure: str) -> dict[str, dict[str, float]]:
    """One figure by arm and split, with its uncertainty; where it is not defined, nothing."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
    for split, rows in found.items():
        for arm, row in rows.items():
            for name, column in ((figure, split), (f"{figure} {UNCERTAINTY}", f"{split} {UNCERTAINTY}")):
                if name in row:
                    table[arm][str(column)] = row[name]
    return dict(table)
