"""Table 4: one patch for every order of a set (kamera.md §5, Reorder).

For K predecessors patches are formed, and tried, in all their orders (24 sampled ones for more than 4): `own` is formed
in the tested order, `transfer` in another, `orbit` from the mean deficit of all orders but the tested one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from infra.reference.scenes import Form, Split
from kvstore.operator.patch import Patch, PatchKind, mean_deficit, orderings
from serving.bench.fidelity.items import items
from serving.bench.fidelity.probe import Probe
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import Study

FORMS = {3: Form(4, 8, 6), 4: Form(5, 8, 6), 6: Form(7, 6, 8)}
RANK = 16


def reorder(study: Study, predecessors: int, count: int) -> tuple[dict[str, Scores], float]:
    """Scores of the arms on `count` items, and relative distances of two orders' deficits."""
    reader, arms, probe = study.reader, study.arms, Probe(study.reader)
    scores: dict[str, Scores] = defaultdict(Scores)
    apart: list[float] = []
    drawn = items(reader, study.kind, Split.multi, count, FORMS[predecessors])
    for item in drawn:
        orders = orderings(range(predecessors))
        (canonical,) = probe.canonical(item.pages[-1:])
        prompts = [item.prompt(reader, (*order, predecessors)) for order in orders]
        cases = probe.behind(prompts, [canonical] * len(orders))
        deltas = [case.delta for case in cases]
        others = deltas[::-1]
        apart += [float((a - b).norm() / a.norm()) for a, b in zip(deltas, others, strict=True)]
        own: list[Patch | None] = [arms.formed(delta, RANK) for delta in deltas]
        unseen = [mean_deficit(deltas[:i] + deltas[i + 1 :]) for i in range(len(deltas))]
        patches: dict[str, list[Patch | None]] = {
            "blind": [None] * len(orders),
            "own": own,
            "transfer": own[::-1],
            "orbit": [arms.formed(delta, RANK, PatchKind.orbit) for delta in unseen],
        }
        probe.score(scores, cases, patches)
    return dict(scores), statistics.mean(apart)
