"""Reference models' right answers from compacted pages (benchmark `elastic`).

`before`: the question is part of what is compacted; `after`: pages are compacted before it is asked, as by a chat's
next turn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from infra.reference import weights
from infra.reference.families import FAMILIES
from infra.reference.scenes import ASKED, Split
from prefill_workers.protocol import LinkRequest
from serving.bench.fidelity.scores import average
from serving.bench.harness import UNCERTAINTY
from tests.benchmarks.elastic_arms import ARMS, OTHERS, Held, compacted, logprobs, observe

SPLITS = (Split.single, Split.multi)
OURS = {"before": "evict", "after": "cover"}  # as the documents advise
Outcomes = dict[str, dict[str, dict[str, list[bool]]]]  # by when it is asked, arm and budget; one an item


def answers(family: str, count: int, budgets: Sequence[float], console: Console) -> Outcomes:
    """Right and wrong answers to `count` items of each split."""
    from serving.bench.fidelity.items import items
    from serving.bench.fidelity.reader import Reader

    reader, kind = Reader(weights(family)), FAMILIES[family]
    # vLLM would say at every picture that an engine in the same process keeps its threads.
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)
    right: Outcomes = {when: {} for when in OURS}
    try:
        for split in SPLITS:
            drawn = items(reader, kind, split, count, ASKED[split])
            for item in track(drawn, f"  {family}, {split}", total=count, console=console, transient=True):
                for when, arm, budget, good in _answered(reader, item.prompt(reader), budgets):
                    right[when].setdefault(arm, {}).setdefault(f"{budget:g}", []).append(good)
            console.print(f"  {family}, {split}: {count} items")
    finally:
        reader.close()
    return right


def _answered(reader: Any, prompt: Any, budgets: Sequence[float]) -> Iterator[tuple[str, str, float, bool]]:
    """When it was asked, arm, budget, and whether the answer is right."""
    engine, wanted = reader.engine, torch.tensor(prompt.answer)
    n, stop = len(prompt) - len(wanted) + 1, prompt.places[-1].stop
    chunks = tuple(place.page.chunk(place.start) for place in prompt.places)
    axis = prompt.positions if prompt.positions.dim() == 1 else prompt.positions[0]
    for when, end, again in (("before", n, 1), ("after", stop, 0)):
        # the token behind the last one that is compacted stands at the position that equals its index
        shift = end - (int(axis[end]) if end < len(prompt) else int(axis[-1]) + 1)
        beginning = replace(prompt, token_ids=prompt.token_ids[:end], positions=prompt.positions[..., :end] + shift)
        whole = Held(range(1, 2 + len(prompt) // engine.block_size), end)
        seen = observe(engine, reader.sequence(beginning, whole.blocks))
        request = LinkRequest("bench", beginning.token_ids.tolist(), chunks)
        for budget in budgets:
            held = {"full": whole} | compacted(engine, request, budget, seen, whole)
            said = logprobs(engine, prompt.token_ids[end - again :], list(held.values()), again)
            right = {
                arm: bool((rows[-len(wanted) :].argmax(-1) == wanted).all())
                for arm, rows in zip(held, said, strict=True)
            }
            for arm in ("full", *ARMS):  # an arm that leaves nothing out is the full one
                yield when, arm, budget, right.get(arm, right["full"])


def shares(outcomes: Mapping[str, Mapping[str, Sequence[bool]]]) -> dict[str, dict[str, float]]:
    """Share of right answers by arm and budget, with its interval."""
    table: dict[str, dict[str, float]] = {}
    for arm, by_budget in outcomes.items():
        found = {budget: average([float(good) for good in one]) for budget, one in by_budget.items()}
        table[arm] = {budget: share.value for budget, share in found.items()}
        table[arm] |= {f"{budget} {UNCERTAINTY}": share.uncertainty for budget, share in found.items()}
    return table


def figures(by_kind: Mapping[str, Outcomes], budget: float) -> dict[str, float]:
    """Ours over the full cache and over the best other arm, by family and of the worst."""
    found: dict[str, float] = {}
    for when, ours in OURS.items():
        for name in ("full", "best"):
            over: list[float] = []
            for kind, outcomes in by_kind.items():
                right = {arm: sum(one[f"{budget:g}"]) for arm, one in outcomes[when].items()}
                other = right["full"] if name == "full" else max(right[arm] for arm in OTHERS)
                over.append(right[ours] / max(other, 1))
                found[f"{kind}.{when}_over_{name}"] = over[-1]
            found[f"{when}_over_{name}"] = min(over)
    return found
