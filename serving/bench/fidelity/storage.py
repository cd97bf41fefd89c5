"""Table 8: other ways to spend the same bytes on the last page's patch.

| arm | what is stored |
|---|---|
| uniform | rank m in every layer and segment, bf16 factors: the product's patch |
| spread | directions chosen over all layers and segments by energy per byte, as many as `uniform` has bytes for |
| int8 | rank 2m, factors in 8 bits with one scale per column |
| neutral | a canonical computed behind a constant neutral prefix, and its deficit's rank-m patch |
| neutral_blind | that canonical, and no patch |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from infra.reference.scenes import Form, Split
from kvstore.layout import Layout
from kvstore.patch import Patch, PatchKind, form_patch
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
    drawn = items(reader, study.cell, split, count, form)
    while group := list(islice(drawn, BATCH)):
        prompts = [item.prompt(reader) for item in group]
        cases = probe.behind(prompts, probe.canonical([item.pages[-1] for item in group]))
        neutral = reader.alone([prompt.places[-1] for prompt in prompts], prefix)
        uniform = [form_patch(case.delta, layout, rank, dtype=torch.bfloat16) for case in cases]
        doubled = [form_patch(case.delta, layout, 2 * rank) for case in cases]
        patches: dict[str, list[Patch | None]] = {
            "blind": [None] * len(cases),
            "uniform": list(uniform),
            "spread": [spread(case.delta, layout, patch.nbytes) for case, patch in zip(cases, uniform, strict=True)],
            "int8": [_rounded(patch) for patch in doubled],
        }
        probe.score(scores, cases, patches, _stored)
        others = [replace(case, canonical=kv) for case, kv in zip(cases, neutral, strict=True)]
        behind: dict[str, list[Patch | None]] = {
            "neutral_blind": [None] * len(others),
            "neutral": [form_patch(case.delta, layout, rank, dtype=torch.bfloat16) for case in others],
        }
        _without_exact(probe, scores, others, behind)
    return dict(scores)


def _without_exact(
    probe: Probe, scores: dict[str, Scores], cases: Sequence[Behind], patches: dict[str, list[Patch | None]]
) -> None:
    own: dict[str, Scores] = defaultdict(Scores, {name: scores[name] for name in patches})
    probe.score(own, cases, patches)


def spread(delta: Tensor, layout: Layout, nbytes: int) -> Patch:
    """The directions, over all layers and segments, that keep most energy within `nbytes` of bf16 factors.

    Layers of one segment are padded with zeros to one rank, which a format with a rank per layer would not store; the
    bytes that count are those of the directions chosen.
    """
    parts = [torch.linalg.svd(segment.float(), full_matrices=False) for segment in layout.split(delta)]
    energy, cost, place = [], [], []
    for index, (_, s, v) in enumerate(parts):
        energy.append(s.square().flatten())
        cost.append(torch.full((s.numel(),), 2.0 * (delta.shape[1] + v.shape[-1])))
        place += [(index, *divmod(at, s.shape[1])) for at in range(s.numel())]
    gain, price = torch.cat(energy), torch.cat(cost)
    order = (gain / price).argsort(descending=True)
    chosen = order[price[order].cumsum(0) <= nbytes]
    keep = [torch.zeros_like(s) for _, s, _ in parts]
    for at in chosen.tolist():
        index, layer, direction = place[at]
        keep[index][layer, direction] = 1.0
    rank = max(1, max(int(mask.sum(-1).max()) for mask in keep))
    left = tuple((u * (s * mask)[:, None])[..., :rank].bfloat16() for (u, s, _), mask in zip(parts, keep, strict=True))
    right = tuple(v.mT[..., :rank].bfloat16() for _, _, v in parts)
    total = float(gain.sum())
    return Patch(PatchKind.own, rank, left, right, (float(gain[chosen].sum()) / total,) * len(parts))


def _stored(arm: str, patch: Patch) -> int:
    """Bytes of an arm's patch: int8 elements and an fp32 scale per column; of `spread` only what was chosen."""
    if arm == "int8":
        factors = (*patch.left, *patch.right)
        return sum(factor.numel() + 4 * factor.shape[0] * factor.shape[2] for factor in factors)
    if arm == "spread":
        kept = sum(int(left.abs().amax(1).count_nonzero()) * (left.shape[1] + right.shape[1])
                   for left, right in zip(patch.left, patch.right, strict=True))  # fmt: skip
        return 2 * kept
    return patch.nbytes


def _rounded(patch: Patch) -> Patch:
    """The patch as it comes back from int8 factors: each column over its largest element, in 127 steps."""

    def rounded(factor: Tensor) -> Tensor:
        scale = factor.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return (factor.float() / scale).round() * scale

    return replace(patch, left=tuple(map(rounded, patch.left)), right=tuple(map(rounded, patch.right)))
