"""Table 4: one patch for every order of a set (kamera.md §5, Reorder).

For K predecessors the patches are formed in all their orders (24 sampled ones for more than 4) and tried in two of
them, the first and its reverse: `own` is formed in the tested order, `transfer` in the other of the two, `orbit` from
the mean deficit of all orders but the tested one.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from infra.reference.scenes import Form, Split
from kvstore.patch import Patch, PatchKind, mean_deficit, orderings
from serving.bench.fidelity.items import items
from serving.bench.fidelity.probe import Probe
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import Study

FORMS = {3: Form(4, 8, 6), 4: Form(5, 8, 6), 6: Form(7, 6, 8)}
RANK = 16


def reorder(study: Study, predecessors: int, count: int) -> tuple[dict[str, Scores], float]:
    """Scores of the arms on `count` items, and how far deficits of two orders are apart, relative to one's norm."""
    reader, arms, probe = study.reader, study.arms, Probe(study.reader)
    scores: dict[str, Scores] = defaultdict(Scores)
    apart: list[float] = []
    drawn = items(reader, study.kind, Split.multi, count, FORMS[predecessors])
    for item in islice(drawn, count):
        orders = orderings(range(predecessors))
        if (reverse := tuple(reversed(orders[0]))) not in orders:
            orders[-1] = reverse
        (canonical,) = probe.canonical(item.pages[-1:])
        prompts = [item.prompt(reader, (*order, predecessors)) for order in orders]
        cases = dict(zip(orders, probe.behind(prompts, [canonical] * len(orders)), strict=True))
        tested = (orders[0], reverse)
        deltas = {order: case.delta for order, case in cases.items()}
        first, last = (deltas[order] for order in tested)
        apart.append(float((first - last).norm() / first.norm()))
        patches: dict[str, list[Patch | None]] = {
            "blind": [None, None],
            "own": [arms.formed(deltas[order], RANK) for order in tested],
            "transfer": [arms.formed(deltas[order], RANK) for order in reversed(tested)],
            "orbit": [
                arms.formed(mean_deficit([d for o, d in deltas.items() if o != order]), RANK, PatchKind.orbit)
                for order in tested
            ],
        }
        probe.score(scores, [cases[order] for order in tested], patches)
    return dict(scores), sum(apart) / len(apart)
