"""Table 8: other ways to spend the same bytes on the last page's patch.

| arm | what is stored |
|---|---|
| uniform | rank m in every layer and segment, bf16 factors |
| spread | the same bytes spread over layers and segments by energy |
| int8 | rank 2m, factors in 8 bits with one scale a direction |
| int8_spread | both: the product's default form |
| neutral | a canonical computed behind a constant neutral prefix, and its deficit's rank-m patch |
| neutral_int8_spread | the same in the product's default form |
| neutral_blind | that canonical, and no patch |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from infra.reference.scenes import Form, Split
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind
from kvstore.records.patch_form import PatchForm
from kvstore.settings import FactorType
from serving.bench.fidelity.items import items
from serving.bench.fidelity.probe import Behind, Probe
from serving.bench.fidelity.scores import Scores
from serving.bench.fidelity.study import BATCH, Study

NEUTRAL = "<|im_start|>user\n"


def storage(study: Study, split: Split, rank: int, count: int, form: Form) -> dict[str, Scores]:
    """Scores of the arms at the bytes of a rank-`rank` patch, on `count` items of a split."""
    reader, probe, layout = study.reader, Probe(study.reader), study.arms.layout
    prefix = reader.ids(NEUTRAL)
    scores: dict[str, Scores] = defaultdict(Scores)
    drawn = items(reader, study.kind, split, count, form)
    while group := list(islice(drawn, BATCH)):
        prompts = [item.prompt(reader) for item in group]
        cases = probe.behind(prompts, probe.canonical([item.pages[-1] for item in group]))
        neutral = reader.alone([prompt.places[-1] for prompt in prompts], prefix)
        patches: dict[str, list[Patch | None]] = {"blind": [None] * len(cases)}
        patches |= {arm: _formed(form, cases, layout) for arm, form in forms(rank).items()}
        probe.score(scores, cases, patches, _beside_bf16)
        others = [replace(case, canonical=kv) for case, kv in zip(cases, neutral, strict=True)]
        behind: dict[str, list[Patch | None]] = {
            "neutral_blind": [None] * len(others),
            "neutral": _formed(forms(rank)["uniform"], others, layout),
            "neutral_int8_spread": _formed(forms(rank)["int8_spread"], others, layout),
        }
        _without_exact(probe, scores, others, behind)
    return dict(scores)


def forms(rank: int) -> dict[str, PatchForm]:
    """Forms of patches that take the bytes of rank `rank` in bf16."""
    return {
        "uniform": PatchForm(rank, factors=FactorType.model, spread=False),
        "spread": PatchForm(rank, factors=FactorType.model),
        "int8": PatchForm(2 * rank, spread=False),
        "int8_spread": PatchForm(2 * rank),
    }


def _formed(form: PatchForm, cases: Sequence[Behind], layout: Layout) -> list[Patch | None]:
    return [form.form(case.delta, layout, PatchKind.own, torch.bfloat16) for case in cases]


def _without_exact(
    probe: Probe, scores: dict[str, Scores], cases: Sequence[Behind], patches: dict[str, list[Patch | None]]
) -> None:
    own: dict[str, Scores] = defaultdict(Scores, {name: scores[name] for name in patches})
    probe.score(own, cases, patches, _beside_bf16)


def _beside_bf16(arm: str, patch: Patch) -> int:
    """A patch's bytes, scaled by the width of the reader's KV over bf16."""
    return patch.nbytes * torch.float32.itemsize // torch.bfloat16.itemsize
