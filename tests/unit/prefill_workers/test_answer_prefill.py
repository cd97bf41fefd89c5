"""Answers computed in idle time over a small transformer: next turns begin with them, as if they had been computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_transformer import BLOCK, SPARE, Transformer
from torch import Tensor

from prefill_workers.background.answer_prefill import AnswerPrefill
from prefill_workers.block_index import BlockIndex, ChunkForm, PrefixMatch
from prefill_workers.block_pool import BlockPool
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.link.prefix_hits import PrefixHits, asked_by
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.protocol import TEXT, ChunkSpan, LinkRequest
from prefill_workers.sequence import LinkSequence, Run
from prefill_workers.settings import FidelitySettings

PAGE = ChunkSpan("page", TEXT, 3, 9, 3, 6)
PROMPT, ANSWER = list(range(1, 15)), list(range(60, 81))  # the prompt ends in the middle of a block
FRAME = 0


class Worker:
    """Links, and answers behind them."""

    def __init__(self, blocks: int = 30, piece: int = 100) -> None:
        self.engine: Any = Transformer()
        self.index = BlockIndex(BLOCK)
        self.pool = BlockPool(range(blocks), BLOCK, 60.0, "test", index=self.index)
        self.hits = PrefixHits(self.engine, self.index, Fidelity(FidelitySettings(share=0)))
        self.answers = AnswerPrefill(self.engine, self.pool, self.hits, lambda left: min(left, piece))

    def link(self, request: LinkRequest, point: OperatingPoint = OperatingPoint.RECOMPUTED, **session: Any) -> str:
        """A finished link whose chunks are computed, or count as linked at another point; returns its lease."""
        chain, match = self.hits.look_up(request, FRAME)
        assert chain is not None
        lease = self.pool.allocate(len(request.token_ids), readers=1, match=match)
        self.hits.copy(match, lease.blocks)
        self.engine.forward(
            [(self.sequence(request.token_ids, lease.blocks), [Run(match.tokens, len(request.token_ids))])]
        )
        exact = ChunkForm(OperatingPoint.RECOMPUTED)
        form = exact if point is OperatingPoint.RECOMPUTED else ChunkForm(point, asked_by(request))
        forms = (*match.forms, *[form] * (len(request.chunks) - len(match.forms)))
        self.index.add(lease.blocks, chain, forms, match, FRAME, self.index.epoch)
        kept = SimpleNamespace(**session) if session else None
        plan: Any = SimpleNamespace(
            request=request,
            chain=chain,
            frame=FRAME,
            session=kept,
            sequence=request.token_ids,
            chunks=[SimpleNamespace(form=form) for form in forms],
        )
        self.answers.remember(plan, lease.id)
        self.pool.abandon(lease.id)
        return lease.id

    def sequence(self, token_ids: Sequence[int], blocks: Sequence[int]) -> LinkSequence:
        return LinkSequence(torch.tensor(token_ids, dtype=torch.int32), torch.arange(len(token_ids)), blocks)

    def idle(self) -> int:
        """Work off what is queued; returns the tokens that it took."""
        before = self.engine.computed
        while self.answers:
            free = self.pool.free
            self.answers.step()
            assert self.pool.free == free, "nothing is held between two pieces"
        return self.engine.computed - before

    def match(self, request: LinkRequest) -> PrefixMatch:
        return self.hits.look_up(request, FRAME)[1]

    def known(self, request: LinkRequest) -> tuple[int, Tensor]:
        """Tokens that a prompt begins with, and their KV."""
        match = self.match(request)
        kv = self.engine.read_kv([one.block for one in match.blocks], 0, match.tokens)
        return match.tokens, kv

    def whole(self, token_ids: Sequence[int]) -> Tensor:
        """KV of a full prefill."""
        self.engine.forward([(self.sequence(token_ids, SPARE), [Run(0, len(token_ids))])])
        return self.engine.read_kv(SPARE, 0, len(token_ids))


def request(token_ids: Sequence[int] = PROMPT, **fields: Any) -> LinkRequest:
    return LinkRequest("turn", [*token_ids], (PAGE,), **fields)


def next_turn(answer: Sequence[int] = ANSWER, **fields: Any) -> LinkRequest:
    return request([*PROMPT, *answer, 100, 101, 102], **fields)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with torch.inference_mode():
        yield Worker()


def test_a_next_turn_begins_with_the_answer_as_a_full_prefill_computes_it(worker: Worker):
    lease = worker.link(request())
    before, _ = worker.known(next_turn())
    assert before == 12, "of the prompt, up to a place where others may go on"
    worker.answers.add(lease, ANSWER)
    assert worker.idle() == 20
    known, kv = worker.known(next_turn())
    assert known == 32
    torch.testing.assert_close(kv, worker.whole(next_turn().token_ids)[:, :known], atol=1e-5, rtol=0)
    assert worker.answers.stats().tokens == 20
    assert worker.match(next_turn(mode=Mode.EXACT)).tokens == 32


def test_an_answer_that_comes_back_changed_serves_up_to_there(worker: Worker):
    worker.answers.add(worker.link(request()), ANSWER)
    worker.idle()
    changed = [*ANSWER[:9], 120, *ANSWER[10:]]
    known, kv = worker.known(next_turn(changed))
    assert known == 20, "the last place before the token that differs, which is the 24th"
    torch.testing.assert_close(kv, worker.whole(next_turn(changed).token_ids)[:, :known], atol=1e-5, rtol=0)


@pytest.mark.parametrize("piece", [1, 5, 7, 9])
def test_in_pieces_it_is_the_same_and_each_piece_serves_by_itself(piece: int):
    with torch.inference_mode():
        worker = Worker(piece=piece)
        lease, seen = worker.link(request()), []
        worker.answers.add(lease, ANSWER)
        while worker.answers:
            worker.answers.step()
            known, kv = worker.known(next_turn())
            torch.testing.assert_close(kv, worker.whole(next_turn().token_ids)[:, :known], atol=1e-5, rtol=0)
            seen.append(known)
        assert seen == sorted(set(seen))
        assert len(seen) > 2
        assert seen[-1] == 32
        assert worker.answers.stats().tokens == 20


def test_answers_take_turns():
    with torch.inference_mode():
        worker = Worker(piece=4)
        first = worker.link(request())
        second = worker.link(request([*PROMPT[:-1], 50]))
        worker.answers.add(first, ANSWER)
        worker.answers.add(second, ANSWER)
        worker.answers.step()
        worker.answers.step()
        assert worker.known(next_turn())[0] == 16
        assert worker.known(request([*PROMPT[:-1], 50, *ANSWER]))[0] == 16


def test_an_answer_behind_approximate_kv_serves_no_exact_prompt(worker: Worker):
    """Nor, once exact KV stands before it, does the approximate one serve `auto` any more."""
    worker.answers.add(worker.link(request(), OperatingPoint.PATCHED), ANSWER)
    worker.idle()
    approximate = worker.match(next_turn())
    assert approximate.tokens == 32
    assert not approximate.forms[0].is_exact
    assert worker.match(next_turn(mode=Mode.EXACT)).tokens == PAGE.start
    worker.answers.add(worker.link(request(mode=Mode.EXACT)), ANSWER)
    worker.idle()
    for mode in (Mode.EXACT, Mode.AUTO):
        exact = worker.match(next_turn(mode=mode))
        assert exact.tokens == 32
        assert exact.forms[0].is_exact
        assert not {one.block for one in exact.blocks} & {one.block for one in approximate.blocks}


def test_another_tenant_finds_nothing_of_it(worker: Worker):
    worker.answers.add(worker.link(request(tenant="acme")), ANSWER)
    worker.idle()
    assert worker.match(next_turn(tenant="acme")).tokens == 32
    assert worker.match(next_turn(tenant="other")).tokens == 0


def test_what_was_computed_before_its_turn_or_belongs_to_another_worker_is_not_computed(worker: Worker):
    worker.answers.add("another worker's", ANSWER)
    assert not worker.answers
    lease = worker.link(request())
    worker.answers.add(lease, ANSWER)
    worker.link(next_turn())
    assert worker.idle() == 0
    worker.answers.add(lease, ANSWER)
    assert not worker.answers, "it was told once"
    worker.answers.add(worker.link(request()), [60])
    assert worker.idle() == 0, "too short to be found"
    worker.answers.add(worker.link(request(), shareable_tokens=9), ANSWER)
    assert not worker.answers, "what a session's survivors stand before is not shared"


def test_an_answer_gives_way_to_whoever_needs_its_blocks():
    with torch.inference_mode():
        worker = Worker(blocks=12)
        worker.answers.add(worker.link(request()), ANSWER)
        taken = worker.pool.allocate(8 * BLOCK, readers=1)  # the prompt's are let go of last
        worker.idle()
        assert worker.answers.stats().given_up == {"blocks": 1}
        worker.pool.abandon(taken.id)
        worker.answers.add(worker.link(request()), ANSWER)
        worker.pool.abandon(worker.pool.allocate(12 * BLOCK, readers=1).id)
        assert worker.idle() == 0
        assert worker.answers.stats().given_up == {"blocks": 1, "evicted": 1}


def test_deleted_content_takes_answers_behind_it_along(worker: Worker):
    queued, later = worker.link(request()), worker.link(request([*PROMPT, 40]))
    worker.answers.add(queued, ANSWER)
    worker.answers.forget("page", "another")
    assert worker.answers
    worker.answers.forget("page", "local")
    worker.answers.add(later, ANSWER)
    assert not worker.answers
    worker.answers.add(worker.link(request()), ANSWER)
    worker.idle()
    worker.index.forget("page", "local")
    assert worker.match(next_turn()).tokens == 0


def test_what_the_model_cannot_compute_is_not_kept(worker: Worker):
    worker.answers.add(worker.link(request()), ANSWER)
    worker.engine.embedding[ANSWER] = torch.nan
    worker.idle()
    assert worker.match(next_turn()).tokens == 12
    assert worker.answers.stats().given_up == {"not finite": 1}
