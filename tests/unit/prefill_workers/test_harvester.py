"""Which forwards patches may be formed from."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from chunk_keys import chunk_keys
from torch import Tensor

from kvstore.operator.layout import Layout
from kvstore.operator.patch import PatchKind
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.patch_form import PatchForm
from prefill_workers.block_index import ChunkForm
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import OperatingPoint
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.patch_compiler import PatchJob
from prefill_workers.patches.scratch import Scratch, at_once
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest
from prefill_workers.sequence import LinkSequence, Run

PREFIX, KEYED = (7,), (7, -1, 3)
LAYOUT = Layout.gqa(2, 1, 4, RotaryScheme((1.0, 0.1), "neox"))
SCRATCH = Scratch(range(1, 3), 16, lambda left: 8)
SPANS = ChunkSpan("a", "image", 1, 5, 2, 2), ChunkSpan("b", "image", 9, 13, 10, 2)


class Engine:
    """Computes KV of ones for whatever it is given, and remembers what that was."""

    dtype, layout, fingerprint = torch.float32, LAYOUT, "model"

    def __init__(self) -> None:
        self.computed: list[tuple[LinkSequence, Sequence[Run]]] = []

    def forward(self, work: Any) -> None:
        self.computed += work

    def read_kv(self, blocks: Sequence[int], start: int, count: int) -> Tensor:
        return torch.ones(LAYOUT.layers, count, LAYOUT.features)

    def embedding_key(self, content: str) -> str:
        return f"embedding of {content}"


class Library:
    """Holds canonical KV of zeros and embeddings, but for what is `missing`."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing

    def has(self, kind: str, key: str, owner: str) -> bool:
        return kind == "patch" and self.missing == "room for a patch"

    def get_canonical(self, key: str, owner: str) -> Any:
        kv = torch.zeros(LAYOUT.layers, 4, LAYOUT.features)
        return None if self.missing == "canonical" else SimpleNamespace(kv=kv)

    def get_embedding(self, key: str, owner: str) -> Any:
        return None if key == f"embedding of {self.missing}" else SimpleNamespace(embeddings=torch.zeros(2, 8))


def chunk(span: ChunkSpan, point: OperatingPoint, context: tuple[int, ...] = PREFIX) -> ChunkPlan:
    keys = chunk_keys(f"canonical {span.content}", f"patch {span.content}", context)
    outcome = ChunkOutcome(len(span), point, 0, "")
    return ChunkPlan(span, keys, span.start, outcome)


def harvester(missing: str = "") -> tuple[Harvester, Engine, list[PatchJob]]:
    engine, jobs = Engine(), list[PatchJob]()
    return Harvester(cast(Any, engine), cast(Any, Library(missing)), PatchForm(), jobs.append), engine, jobs


def plan(*chunks: ChunkPlan) -> LinkPlan:
    tokens = torch.arange(16, dtype=torch.int32)
    request = LinkRequest("request", tokens.tolist(), tuple(one.span for one in chunks), prefix=PREFIX)
    return LinkPlan(request, LinkSequence(tokens, torch.arange(16), range(5, 6)), list(chunks))


@pytest.mark.parametrize("front", [point for point in OperatingPoint if point is not OperatingPoint.PREFIX])
@pytest.mark.parametrize("is_shared", [False, True])
def test_patches_are_formed_behind_chunks_that_were_computed_alone(front: OperatingPoint, is_shared: bool):
    points = OperatingPoint.RECOMPUTED, front, OperatingPoint.ENCODED, OperatingPoint.RECOMPUTED
    made = plan(*(chunk(ChunkSpan(str(i), "image", i, i + 1, i, 1), point) for i, point in enumerate(points)))
    if is_shared:
        made.chunks[1].share(ChunkForm(front))
    formed = [harvester()[0].forms_patch(made, one) for one in made.chunks]
    exact = front in (OperatingPoint.RECOMPUTED, OperatingPoint.ENCODED)
    assert formed == [True, True, exact, exact]


def test_behind_stored_kv_a_patch_that_text_keys_is_formed_after_a_forward_of_its_own():
    made = plan(chunk(SPANS[0], OperatingPoint.PATCHED), chunk(SPANS[1], OperatingPoint.RECOMPUTED, KEYED))
    forms, engine, jobs = harvester()
    at_once(forms.form_anew(made, made.chunks[1], SCRATCH))
    (sequence, *_), runs = zip(*engine.computed, strict=True)
    assert [(run.start, run.stop) for part in runs for run in part] == [(0, 8), (8, 13)], "all up to the chunk's end"
    assert sequence.token_ids.tolist() == list(range(13))
    assert list(sequence.blocks) == [1, 2], "not in the request's blocks"
    assert [one.start for one in sequence.embedded] == [2, 10]
    (job,) = jobs
    assert (job.kind, job.content, job.antecedents) == (PatchKind.own, "b", ("a",))
    assert job.delta.abs().sum() > 0


@pytest.mark.parametrize("missing", ["canonical", "a", "b", "room for a patch"])
def test_what_is_gone_or_stored_already_takes_no_forward(missing: str):
    made = plan(chunk(SPANS[0], OperatingPoint.PATCHED), chunk(SPANS[1], OperatingPoint.RECOMPUTED, KEYED))
    forms, engine, jobs = harvester(missing)
    at_once(forms.form_anew(made, made.chunks[1], SCRATCH))
    assert not engine.computed
    assert not jobs


@pytest.mark.parametrize(
    ("front", "context"), [(OperatingPoint.RECOMPUTED, KEYED), (OperatingPoint.PATCHED, PREFIX)], ids=["exact", "free"]
)
def test_what_is_formed_otherwise_takes_no_forward(front: OperatingPoint, context: tuple[int, ...]):
    made = plan(chunk(SPANS[0], front), chunk(SPANS[1], OperatingPoint.RECOMPUTED, context))
    forms, engine, _ = harvester()
    at_once(forms.form_anew(made, made.chunks[1], SCRATCH))
    assert not engine.computed
