"""Table 9: rolling checks of requests served by patches, and the bound they need.

The check compares the next-token distributions of the last prompt tokens with exact ones and averages their KL over
the last `window` checks of an operating point; beyond the bound the point is switched off
(`prefill_workers.fidelity.monitor`). Here every page of a request is served by the stored orbit patches of the default
rank (behind one page or none: its own), and the prompt differs from that which taught them, or the patches are broken:

| situation | what serves | the rule (see `envelope`) |
|---|---|---|
| same, other order, other text in front or between | the patches of the set | reuses them |
| another system prompt | the same | would not |
| one replaced, all replaced | the patches behind the pages before | would not |
| wrong page, turned basis | the patches of the next page, or with their directions reversed | damaged |
| blind | no patch | |
| sums | the last page by the weighted sum of its pair patches, as the linker measures it | composed |
| plain sums | the same with every weight 1: a model that does not compose | composed |

`other order` is one of those that the patches are averaged over, as that of `same` is; of orders that a patch has not
seen tells `reorder`. Replaced pages are those of the next item.

Checks are drawn at random from a situation's items, of all splits alike, in streams of `_CHECKS`. `alarms at b`: the
share of streams whose rolling KL passes b nats at any time; `checks to b`: the median number of checks until it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, permutations
from typing import Any

import numpy as np
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.operator.apply import apply
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind, compose, deficit, mean_deficit
from kvstore.records.patch_form import PatchForm
from prefill_workers.fidelity.monitor import compare
from prefill_workers.settings import FidelitySettings
from serving.bench.fidelity.composition import composed_patch
from serving.bench.fidelity.items import Item, items
from serving.bench.fidelity.reader import Prompt
from serving.bench.fidelity.scores import average, median
from serving.bench.fidelity.study import BATCH, Study
from serving.bench.harness import UNCERTAINTY

SPLITS = (Split.multi, Split.legend, Split.frames, Split.single)
FORM = Form(3, 8, 6)
BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # nats
_CHECKS, _STREAMS = 640, 500
_SENTENCE = "These are the pages of a report."

Patches = dict[tuple[int, frozenset[int]], Patch]  # by page and the pages before it


@dataclass(frozen=True)
class Situation:
    """A later prompt: order of the pages, number of foreign ones instead, and its text.

    `broken`: what has become of the patches; None: nothing is stored. `summed`: the patch behind several pages, from
    those behind none and each of them, and from Δ [layers, tokens, features].
    """

    name: str
    order: tuple[int, ...] = (0, 1, 2)
    replaced: int = 0
    text: dict[str, Any] = field(default_factory=dict)
    broken: Callable[[Patch, Patch], Patch | None] = lambda patch, other: patch
    summed: Callable[[Patch, Sequence[Patch], Tensor], Patch] | None = None


def _turned(patch: Patch, other: Patch) -> Patch:
    segments = tuple(replace(part, right=part.right.flip(1)) for part in patch.segments if part.right is not None)
    return replace(patch, segments=segments)


SITUATIONS = (
    Situation("same"),
    Situation("other order", (1, 0, 2)),
    Situation("one word before", text={"before": ["Page"]}),
    Situation("a sentence before", text={"before": [_SENTENCE]}),
    Situation("one word between", text={"before": ["", "Page", "Page"]}),
    Situation("a sentence between", text={"before": ["", _SENTENCE, _SENTENCE]}),
    Situation("another system prompt", text={"system": "You are a helpful assistant."}),
    Situation("one replaced", replaced=1),
    Situation("all replaced", replaced=2),
    Situation("wrong page", broken=lambda patch, other: other),
    Situation("turned basis", broken=_turned),
    Situation("blind", broken=lambda patch, other: None),
    Situation("sums", summed=composed_patch),
    Situation("plain sums", summed=lambda base, pairs, delta: compose(pairs, 1.0, base)),
)


def online(study: Study, count: int) -> dict[str, list[float]]:
    """KL of the online check in nats, by situation: `count` items of every split."""
    found: dict[str, list[float]] = defaultdict(list)
    for split in SPLITS:
        drawn = pairwise(items(study.reader, study.kind, split, count + 1, FORM))
        while group := list(islice(drawn, BATCH)):
            _check(study, group, found)
    return found


def _check(study: Study, group: Sequence[tuple[Item, Item]], found: dict[str, list[float]]) -> None:
    """Add every first item's check in every situation; `replaced` pages are the second's."""
    reader, layout = study.reader, study.arms.layout
    taught = [_taught(study, item) for item, _ in group]
    tokens = FidelitySettings().tokens
    for one in SITUATIONS:
        prompts = []
        for item, other in group:
            pages = [*other.pages[: one.replaced], *item.pages[one.replaced :]]
            prompts.append(_tail(reader.prompt([pages[i] for i in one.order], item.question, "", **one.text), tokens))
        exact = reader.exact(prompts, keep=[-1])
        linked = [_linked(one, *known, read.pages[-1], layout) for known, read in zip(taught, exact, strict=True)]
        for right, served in zip(exact, reader.over(prompts, linked), strict=True):
            found[one.name].append(compare(right.answers, served.answers).kl)


def _linked(
    one: Situation, canonical: Sequence[Tensor], patches: Patches, last: Tensor, layout: Layout
) -> list[Tensor | None]:
    """KV of every place; None where another item's page stands, which is computed.

    `last`: the last one's, exact.
    """
    kv: list[Tensor | None] = []
    for place, i in enumerate(one.order):
        if i < one.replaced:
            kv.append(None)
            continue
        behind = frozenset(one.order[:place])
        others = [patch for (page, _), patch in patches.items() if page == (i + 1) % len(canonical)]
        whole = patches[i, behind]
        if one.summed and len(behind) > 1:
            base, *pairs = (patches[i, frozenset(part)] for part in ((), *zip(behind, strict=True)))
            whole = one.summed(base, pairs, deficit(last, canonical[i]))
        patch = one.broken(whole, others[-1])
        kv.append(apply(canonical[i], patch, 0, layout))
    return kv


def _taught(study: Study, item: Item) -> tuple[list[Tensor], Patches]:
    """Canonical KV of an item's pages, and the patches stored after reading all orders."""
    reader, form = study.reader, PatchForm()
    orders = list(permutations(range(len(item.pages))))
    canonical = reader.alone(item.prompt(reader).places)
    deltas: dict[tuple[int, frozenset[int]], list[Tensor]] = defaultdict(list)
    for order, read in zip(orders, reader.exact([item.prompt(reader, order) for order in orders]), strict=True):
        for place, (i, kv) in enumerate(zip(order, read.pages, strict=True)):
            deltas[i, frozenset(order[:place])].append(deficit(kv, canonical[i]))
    layout = study.arms.layout
    return canonical, {key: form.form(mean_deficit(found), layout, PatchKind.orbit) for key, found in deltas.items()}


def _tail(prompt: Prompt, tokens: int) -> Prompt:
    """The prompt without an answer, from whose last `tokens` tokens the predictions come."""
    first = max(prompt.places[-1].stop, len(prompt) - tokens)
    return replace(prompt, answer=(0,) * (len(prompt) - first))


def alarms(kls: Sequence[float], settings: FidelitySettings, bound: float) -> tuple[float, float]:
    """Share of random streams of checks that pass the bound, and median checks until then."""
    drawn = np.random.default_rng(0).choice(np.asarray(kls), (_STREAMS, _CHECKS))
    sums = np.pad(drawn.cumsum(1), ((0, 0), (1, 0)))
    at = np.arange(settings.minimum, _CHECKS + 1)
    since = np.maximum(at - settings.window, 0)
    passed = (sums[:, at] - sums[:, since]) / (at - since) > bound
    ever = passed.any(1)
    return float(ever.mean()), float(np.median(at[passed.argmax(1)][ever])) if ever.any() else float("nan")


def table(checks: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Rows of the table, by situation."""
    settings, rows = FidelitySettings(), {}
    for name, kls in checks.items():
        mean = average(kls)
        row = {
            "mean": mean.value, f"mean {UNCERTAINTY}": mean.uncertainty, **median(kls),
            "p95": float(np.quantile(kls, 0.95)),
        }  # fmt: skip
        for bound in BOUNDS:
            row[f"alarms at {bound}"], row[f"checks to {bound}"] = alarms(kls, settings, bound)
        rows[name] = row
    return rows
