"""Table 5: how far a prompt may drift from the one a patch was formed in (kamera.md App. D).

A patch is formed for the page B behind A1, A2, A3. The same page is then asked about in prompts that differ: in their
pages, or in their text, which is added or exchanged. `stale` serves the stored own patch all the same, `orbit` that of
the mean over the pages' orders; `rebuilt` one that was formed in the new prompt; `updated` the stored own patch with
a patch of what it leaves, of the same rank.

The linker's rule is its key: a patch serves behind the same pages (own: in the same order, orbit: in any) and the same
system prompt. Other text, before the first page or between pages, does not matter as long as it is short; where it is
not, a patch serves behind the same text alone (`prefill_workers.link.keys.contexts`:
what a sentence there costs is why). A situation that the rule lets pass and in which a stored patch changes the model's
answer is a false reuse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.operator.patch import Patch, PatchKind, compose, mean_deficit, orderings, remainder
from serving.bench.fidelity.items import items
from serving.bench.fidelity.probe import Behind, Probe
from serving.bench.fidelity.reader import Prompt
from serving.bench.fidelity.scores import Scores, changed, share
from serving.bench.fidelity.study import Study

RANK = 16
FORM = Form(4, 8, 6)
_SENTENCE = "These are the pages of a report, and this is the one that was printed before."
_OTHER = "Look at every picture of the series with care: what it shows may be asked for later."
_BOTH, _ORBIT, _NEITHER = ("stale", "orbit"), ("orbit",), ()  # arms whose patch the rule serves
_EACH = 4  # texts, one before every page


@dataclass(frozen=True)
class Situation:
    """A way in which the later prompt differs.

    `pages`: of (A1, A2, A3) and three pages of another item, those before B.

    `text`: that of the later prompt; `taught`: that of the prompt in which the patch was formed. `served`: the arms
    whose patch the linker's rule would serve.
    """

    name: str
    pages: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] = lambda ours, others: ours
    text: dict[str, Any] = field(default_factory=dict)
    served: tuple[str, ...] = _BOTH
    taught: dict[str, Any] = field(default_factory=dict)

    @property
    def is_answerable(self) -> bool:
        """True if all pages that the item's answer comes from are there."""
        return set("123") <= set(self.pages("123", "456"))


SITUATIONS = (
    Situation("same"),
    Situation("reordered", lambda ours, others: ours[::-1], served=_ORBIT),
    Situation("one word before", text={"before": ["Page"]}),
    Situation("one word between", text={"before": ["", "", "", "Page"]}),
    Situation("a sentence before", text={"before": [_SENTENCE]}),
    Situation("a sentence between", text={"before": ["", "", "", _SENTENCE]}, served=_NEITHER),
    Situation("a sentence before each", text={"before": [_SENTENCE] * _EACH}, served=_NEITHER),
    Situation("another word before each", text={"before": ["Picture"] * _EACH}, taught={"before": ["Page"] * _EACH}),
    Situation(
        "another sentence before each",
        text={"before": [_OTHER] * _EACH},
        served=_NEITHER,
        taught={"before": [_SENTENCE] * _EACH},
    ),
    Situation("a system prompt", text={"system": "You are a helpful assistant."}, served=_NEITHER),
    Situation(
        "another system prompt",
        text={"system": "You are a helpful assistant."},
        served=_NEITHER,
        taught={"system": "Answer with one word, and look at the pages again where you doubt."},
    ),
    Situation("one dropped", lambda ours, others: ours[1:], served=_NEITHER),
    Situation("one twice", lambda ours, others: [ours[0], *ours], served=_NEITHER),
    Situation("one replaced", lambda ours, others: [others[0], *ours[1:]], served=_NEITHER),
    Situation("all replaced", lambda ours, others: others, served=_NEITHER),
    Situation("1 more", lambda ours, others: [*others[:1], *ours], served=_NEITHER),
    Situation("2 more", lambda ours, others: [*others[:2], *ours], served=_NEITHER),
    Situation("3 more", lambda ours, others: [*others[:3], *ours], served=_NEITHER),
)


def envelope(study: Study, count: int) -> dict[str, dict[str, Scores]]:
    """Scores by situation and arm, on `count` items."""
    reader, arms, probe = study.reader, study.arms, Probe(study.reader)
    scores: dict[str, dict[str, Scores]] = {one.name: defaultdict(Scores) for one in SITUATIONS}
    for other, item in pairwise(items(reader, study.kind, Split.multi, count + 1, FORM)):
        *ours, page = item.pages
        (canonical,) = probe.canonical([page])

        def behind(prompts: Sequence[Prompt], canonical: Tensor = canonical) -> list[Behind]:
            return probe.behind(prompts, [canonical] * len(prompts))

        stored: dict[str, tuple[Patch, Patch]] = {}
        for one in SITUATIONS:
            if repr(one.taught) not in stored:
                orders = orderings(range(len(item.pages) - 1))
                taught = behind([item.prompt(reader, (*order, len(ours)), **one.taught) for order in orders])
                deltas = [case.delta for case in taught]
                orbit = arms.formed(mean_deficit(deltas), RANK, PatchKind.orbit)
                stored[repr(one.taught)] = (arms.formed(deltas[0], RANK), orbit)
        cases = behind([
            reader.prompt([*one.pages(ours, other.pages[:-1]), page], item.question, item.answer, **one.text)
            for one in SITUATIONS
        ])  # fmt: skip
        for one, case in zip(SITUATIONS, cases, strict=True):
            own, orbit = stored[repr(one.taught)]
            update = arms.formed(remainder(case.delta, own), RANK, PatchKind.update)
            patches: dict[str, list[Patch | None]] = {
                "blind": [None],
                "stale": [own],
                "orbit": [orbit],
                "updated": [compose([own, update])],
                "rebuilt": [arms.formed(case.delta, RANK)],
            }
            probe.score(scores[one.name], [case], patches)
    return scores


def false_reuse(scores: Mapping[str, Mapping[str, Scores]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Share of allowed reuses that change the model's answer: own patches, orbit patches."""
    for name, arm in (("own", "stale"), ("orbit", "orbit")):
        yield name, share(np.stack([changed(scores[one.name], arm) for one in SITUATIONS if arm in one.served], 1))
