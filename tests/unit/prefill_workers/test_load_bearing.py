"""Load-bearing chunks over a small transformer in torch: losses equal those of links without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from chunk_keys import chunk_keys
from kvstore_support import FINGERPRINT
from small_transformer import BLOCK, LINK, SPARE, Transformer
from torch import Tensor

from kvstore.library import Library
from kvstore.operator.apply import relocate
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import CanonicalRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.memory import MemoryTier
from prefill_workers.background.load_bearing import LoadBearingChecks
from prefill_workers.block_pool import BlockPool
from prefill_workers.fidelity.monitor import compare
from prefill_workers.link.plan import ChunkPlan, ChunkState, LinkPlan
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.scratch import Scratch
from prefill_workers.protocol import TEXT, ChunkOutcome, ChunkSpan, LinkRequest, LoadBearing, LoadBearingState, Loss
from prefill_workers.sequence import LinkSequence, Run, complement

HEAD, WORDS, TAIL, AT = [1, 2, 3], [70, 71], [90, 91, 92], 5
PAGES = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35, 36]]


def request(pages: Sequence[int] = (0, 1, 2), tail: Sequence[int] = TAIL, **fields: Any) -> LinkRequest:
    """Documents, words between them, a head and a tail."""
    tokens, spans = [*HEAD], []
    for page in pages:
        tokens += WORDS if spans else []
        spans.append(
            ChunkSpan(f"page {page}", TEXT, len(tokens), len(tokens) + len(PAGES[page]), len(tokens), len(PAGES[page]))
        )
        tokens += PAGES[page]
    return LinkRequest("answer", [*tokens, *tail], tuple(spans), **{"load_bearing": True, **fields})


class Worker:
    """Links in full, and what is measured of them."""

    def __init__(self, library: Library, scratch: range = SPARE, piece: int = 9) -> None:
        self.engine: Any = Transformer()
        self.pool = BlockPool(LINK, BLOCK, 60.0, "test")
        harvester = Harvester(self.engine, library, PatchForm(), lambda job: True)
        spare = Scratch(scratch, BLOCK, lambda left: min(left, piece))
        self.checks = LoadBearingChecks(self.engine, library, harvester, self.pool, spare)
        self.library = library

    def link(self, asked: LinkRequest) -> tuple[LinkPlan, str]:
        """A finished link whose lease nobody else holds."""
        lease = self.pool.allocate(len(asked.token_ids), readers=1)
        tokens = torch.tensor(asked.token_ids, dtype=torch.int32)
        sequence = LinkSequence(tokens, torch.arange(AT, AT + len(tokens)), lease.blocks)
        self.engine.forward([(sequence, [Run(0, len(tokens))])])
        chunks = [
            ChunkPlan(
                span,
                chunk_keys(span.content.encode().hex().ljust(64, "0")),
                AT + span.start,
                ChunkOutcome(len(span), OperatingPoint.RECOMPUTED, i, ""),
                ChunkState.TO_COMPUTE,
            )
            for i, span in enumerate(asked.chunks)
        ]
        plan = LinkPlan(asked, sequence, chunks)
        self.checks.offer(plan, lease.id)
        self.pool.abandon(lease.id)
        return plan, lease.id

    def idle(self) -> LoadBearing | None:
        while self.checks:
            self.checks.step()
        return self.checks.get("local", "answer")

    def logits(self, tokens: Sequence[int], given: Sequence[tuple[Run, Tensor]]) -> Tensor:
        """Next-token logits over given KV, the rest computed."""
        sequence = LinkSequence(torch.tensor(tokens, dtype=torch.int32), torch.arange(AT, AT + len(tokens)), LINK)
        for run, kv in given:
            self.engine.write_kv(kv, self.engine.slots(LINK, run.start, run.stop))
        return self.engine.forward([(sequence, complement([run for run, _ in given], len(tokens)))], ends=[0])[0]

    def alone(self, span: ChunkSpan, tokens: Sequence[int]) -> Tensor:
        """KV(B|∅) where the chunk stands."""
        lone = LinkSequence(torch.tensor(tokens[span.start : span.stop]), torch.arange(len(span)) + AT, LINK)
        self.engine.forward([(lone, [Run(0, len(span))])])
        return relocate(self.engine.read_kv(LINK, 0, len(span)), span.start, self.engine.layout)


@pytest.fixture
def library() -> Iterator[Library]:
    with Library(LibrarySettings(), FINGERPRINT, [MemoryTier()]) as library, torch.inference_mode():
        yield library


def is_same(loss: Loss | None, before: Tensor, after: Tensor) -> bool:
    found = compare(before[None], after[None])
    return loss is not None and loss == Loss(pytest.approx(found.kl, rel=0.01), not found.agrees)


@pytest.mark.parametrize("scratch", [SPARE, SPARE[:9]], ids=["several rows together", "row by row"])
def test_losses_are_those_of_links_without_each_chunk_and_its_conditioning(library: Library, scratch: range):
    worker = Worker(library, scratch)
    asked = request()
    tokens = list(asked.token_ids)
    plan, _ = worker.link(asked)
    found = worker.idle()
    assert found is not None
    assert found.state is LoadBearingState.MEASURED
    assert [chunk.tokens for chunk in found.chunks] == [6, 5, 7]

    before = worker.logits(tokens, [])
    whole = worker.engine.read_kv(LINK, 0, len(tokens))
    runs = [Run(span.start, span.stop) for span in asked.chunks]
    alone = [worker.alone(span, tokens) for span in asked.chunks]
    for i, (run, chunk) in enumerate(zip(runs, found.chunks, strict=True)):
        kept = {other: whole[:, other.start : other.stop] for other in runs}
        off = worker.logits(tokens, list({**kept, run: alone[i]}.items()))
        assert is_same(chunk.patch_off, before, off)
        assert chunk.patch_off.kl > 1e-3

        rest = [
            (other, kv)
            if other.stop <= run.start
            else (
                Run(other.start - len(run), other.stop - len(run)),
                relocate(kv, -len(run), worker.engine.layout),
            )
            for other, kv in kept.items()
            if other != run
        ]
        without = worker.logits([*tokens[: run.start], *tokens[run.stop :]], rest)
        assert is_same(chunk.left_out, before, without)
    assert plan.request.load_bearing


def test_stored_canonical_kv_serves_as_what_a_chunk_is_without_its_patch(library: Library):
    worker = Worker(library)
    plan, _ = worker.link(request())
    other = torch.randn_like(worker.alone(plan.chunks[1].span, list(plan.request.token_ids)))
    library.put(
        CanonicalRecord(
            key=plan.chunks[1].keys.canonical, fingerprint=FINGERPRINT, tenant="local", content="page 1",
            recompute_seconds=1.0, layout=worker.engine.layout, kv=other,
        )
    )  # fmt: skip
    worker.link(request())  # its blocks were written over
    stored = worker.idle().chunks
    worker.link(request(mode=Mode.OFF))
    computed = worker.idle().chunks
    assert stored[1].patch_off.kl != pytest.approx(computed[1].patch_off.kl, rel=0.01), "off looks nothing up"
    assert stored[1].left_out.kl == pytest.approx(computed[1].left_out.kl)


def test_blocks_are_let_go_of_by_the_first_piece_or_when_somebody_needs_them(library: Library):
    worker = Worker(library)
    free = worker.pool.free
    worker.link(request())
    assert worker.pool.free < free
    assert worker.checks.get("local", "answer").state is LoadBearingState.QUEUED
    worker.checks.step()
    assert worker.pool.free == free
    assert worker.checks.is_running
    assert worker.idle().state is LoadBearingState.MEASURED

    worker.link(request())
    assert worker.checks.make_room()
    assert worker.pool.free == free
    assert "needed its KV blocks" in worker.idle().reason
    _, lease = worker.link(request())
    worker.checks.drop([lease])
    assert "lease ended" in worker.idle().reason


@pytest.mark.parametrize(
    ("asked", "scratch", "reason"),
    [
        (request(pages=()), SPARE, "no images or documents"),
        (request(tail=()), SPARE, "no text stands behind"),
        (request(), SPARE[:3], "longer than 12 tokens"),
    ],
)
def test_what_cannot_be_measured_is_skipped_and_says_why(
    library: Library, asked: LinkRequest, scratch: range, reason: str
):
    worker = Worker(library, scratch)
    free = worker.pool.free
    worker.link(asked)
    found = worker.idle()
    assert found.state is LoadBearingState.SKIPPED
    assert reason in found.reason
    assert worker.pool.free == free


def test_a_request_that_does_not_ask_is_not_measured_and_others_are_not_told(library: Library):
    worker = Worker(library)
    worker.link(request(load_bearing=False))
    assert not worker.checks
    assert worker.idle() is None
    worker.link(request(tenant="one"))
    assert worker.idle() is None
    assert worker.checks.get("one", "answer").state is LoadBearingState.MEASURED


def test_deleted_content_is_not_measured(library: Library):
    worker = Worker(library)
    free = worker.pool.free
    for steps in (0, 2):
        worker.link(request())
        for _ in range(steps):
            worker.checks.step()
        worker.checks.forget("page 1", "another")
        assert len(worker.checks) == 1
        worker.checks.forget("page 1", "local")
        assert not worker.checks
        assert worker.idle().reason == "a chunk of it was deleted"
        assert worker.pool.free == free
