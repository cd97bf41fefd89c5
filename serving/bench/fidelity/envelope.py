"""Table 5: how far a prompt may drift from the one a patch was formed in (kamera.md App. D).

A patch is formed for the page B behind A1, A2, A3. The same page is then asked about in prompts that differ: in their
pages, or in their text. `stale` serves the stored patch all the same; `rebuilt` one that was formed in the new prompt;
`updated` the stored one with a patch of what it leaves, of the same rank.

The linker's rule is its key: a patch serves behind the same pages (own: in the same order, orbit: in any) and the same
system prompt, whatever other text stands between them. A situation that the rule lets pass and in which the stale patch
changes the model's answer is a false reuse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.reference.scenes import Form, Split
from kvstore.patch import Patch, PatchKind, compose, remainder
from serving.bench.fidelity.items import Item, items
from serving.bench.fidelity.probe import Probe
from serving.bench.fidelity.reader import Page
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import Study

RANK = 16
FORM = Form(4, 8, 6)
_SENTENCE = "These are the pages of a report, and this is the one that was printed before."


@dataclass(frozen=True)
class Situation:
    """How the later prompt differs. `pages`: of (A1, A2, A3) and three pages of another item, those before B.

    `reused`: whether the linker's rule would serve the patch, own or orbit.
    """

    name: str
    pages: Callable[[Sequence[Page], Sequence[Page]], Sequence[Page]] = lambda ours, others: ours
    text: dict[str, Any] = field(default_factory=dict)
    reused: bool = True


SITUATIONS = (
    Situation("same"),
    Situation("reordered", lambda ours, others: ours[::-1]),
    Situation("one word before", text={"before": ["Page"]}),
    Situation("one word between", text={"before": ["", "", "", "Page"]}),
    Situation("a sentence before", text={"before": [_SENTENCE]}),
    Situation("a sentence between", text={"before": ["", "", "", _SENTENCE]}),
    Situation("a sentence before each", text={"before": [_SENTENCE] * 4}),
    Situation("another system prompt", text={"system": "You are a helpful assistant."}, reused=False),
    Situation("one dropped", lambda ours, others: ours[1:], reused=False),
    Situation("one twice", lambda ours, others: [ours[0], *ours], reused=False),
    Situation("one replaced", lambda ours, others: [others[0], *ours[1:]], reused=False),
    Situation("all replaced", lambda ours, others: others, reused=False),
    Situation("1 more", lambda ours, others: [*others[:1], *ours], reused=False),
    Situation("2 more", lambda ours, others: [*others[:2], *ours], reused=False),
    Situation("3 more", lambda ours, others: [*others[:3], *ours], reused=False),
)


def envelope(study: Study, count: int) -> dict[str, dict[str, Scores]]:
    """Scores by situation and arm, on `count` items."""
    reader, arms, probe = study.reader, study.arms, Probe(study.reader)
    scores: dict[str, dict[str, Scores]] = {one.name: defaultdict(Scores) for one in SITUATIONS}
    previous: Item | None = None
    for item in items(reader, study.kind, Split.multi, count + 1, FORM):
        if previous is None:
            previous = item
            continue
        *ours, page = item.pages
        others = previous.pages[:-1]
        (canonical,) = probe.canonical([page])
        prompts = [
            reader.prompt([*one.pages(ours, others), page], item.question, item.answer, **one.text)
            for one in SITUATIONS
        ]
        cases = probe.behind(prompts, [canonical] * len(prompts))
        stored = arms.formed(cases[0].delta, RANK)
        for one, case in zip(SITUATIONS, cases, strict=True):
            update = arms.formed(remainder(case.delta, stored), RANK, PatchKind.update)
            patches: dict[str, list[Patch | None]] = {
                "blind": [None],
                "stale": [stored],
                "updated": [compose([stored, update])],
                "rebuilt": [arms.formed(case.delta, RANK)],
            }
            probe.score(scores[one.name], [case], patches)
        previous = item
    return scores


def false_reuse(scores: dict[str, dict[str, Scores]]) -> float:
    """The share of reuses that the rule allows and that change the model's answer."""
    changed = [
        stale != exact
        for one in SITUATIONS
        if one.reused
        for stale, exact in zip(scores[one.name]["stale"].top, scores[one.name]["exact"].top, strict=True)
    ]
    return sum(changed) / len(changed)
