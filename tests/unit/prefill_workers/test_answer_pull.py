"""Answers read from a decode engine, over a small transformer: next turns begin with them, and nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_transformer import BLOCK, SPARE, Transformer
from test_answer_prefill import ANSWER, PROMPT, Worker, next_turn, request

from infra.hand_back import offered
from infra.vllm_env import BLOCK_SIZE
from prefill_workers.engine.transfer_notes import EndedPulls
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.sequence import Run

WHOLE = [*PROMPT, *ANSWER]


class Reading(Transformer):
    """The prefill worker's engine, and the decode engine's: that has what it offers in the spare blocks.

    Pulls end when they are polled for, or fail, or go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []  # name, blocks here and there
        self.ends, self.fails, self.knows = True, False, True

    def pull_kv(self, name: str, blocks: Sequence[int], offer: Mapping[str, Any]) -> bool:
        self.asked.append((name, tuple(blocks), tuple(offer["remote_block_ids"][0])))
        return self.knows

    def poll_pulls(self) -> tuple[list[str], list[str]]:
        if not self.ends:
            return [], []
        ended, self.asked = self.asked, []
        names = [name for name, blocks, _ in ended if blocks]
        if self.fails:
            return [], names
        for _, here, there in ended:
            if here:
                kv = self.read_kv(there, 0, len(there) * BLOCK)
                self.write_kv(kv, self.slots(here, 0, len(here) * BLOCK))
        return names, []


class Pulling(Worker):
    """Links whose answers a decode engine offers."""

    def __init__(self, blocks: int = 30) -> None:
        super().__init__(blocks)
        self.engine = Reading()
        self.hits._engine = self.answers._engine = self.answers._pulls._engine = self.engine

    def generated(self, token_ids: Sequence[int] = WHOLE, **fields: Any) -> dict[str, Any]:
        """Offer of an answer's KV, of which the last token has none."""
        self.engine.forward([(self.sequence(token_ids, SPARE), [Run(0, len(token_ids) - 1)])])
        self.engine.computed = 0
        blocks = list(SPARE)[: -(-len(token_ids) // BLOCK)]
        offer = {"remote_request_id": "answer", "remote_num_tokens": len(token_ids) - 1, "remote_block_ids": [blocks]}
        return {**offered(offer, BLOCK), **fields}

    def pull(self, lease: str, offer: dict[str, Any]) -> Future[bool]:
        ended: Future[bool] = Future()
        self.answers.add(lease, ANSWER, offer, ended)
        return ended


@pytest.fixture
def worker() -> Iterator[Pulling]:
    with torch.inference_mode():
        yield Pulling()


def test_a_next_turn_begins_with_the_answer_as_the_decode_engine_computed_it(worker: Pulling):
    """The prompt ends in the middle of a block, which comes with the answer."""
    lease = worker.link(request())
    free, offer = worker.pool.free, worker.generated()
    ended = worker.pull(lease, offer)
    assert worker.answers.pulling == 1
    assert worker.known(next_turn())[0] == 12, "nothing is named before it is there"
    assert not ended.done()
    (_, here, there) = worker.engine.asked[0]
    assert len(here) == len(there) == 8 - len(PROMPT) // BLOCK
    worker.answers.poll()
    assert ended.result(0) is True
    assert worker.answers.pulling == 0
    known, kv = worker.known(next_turn())
    assert known == 32
    assert worker.engine.computed == 0
    torch.testing.assert_close(kv, worker.whole(next_turn().token_ids)[:, :known], atol=1e-5, rtol=0)
    assert worker.match(next_turn(mode=Mode.EXACT)).tokens == 32
    assert worker.pool.free == free, "they are cached"
    assert (worker.answers.stats().pulled, worker.answers.stats().tokens) == (20, 0)


def test_what_could_not_be_read_is_computed(worker: Pulling):
    lease, offer = worker.link(request()), worker.generated()
    worker.engine.fails = True
    ended = worker.pull(lease, offer)
    worker.answers.poll()
    assert ended.result(0) is False, "the decode engine holds it still"
    assert worker.idle() == 20
    known, kv = worker.known(next_turn())
    assert known == 32
    torch.testing.assert_close(kv, worker.whole(next_turn().token_ids)[:, :known], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [{BLOCK_SIZE: 2 * BLOCK}, {"remote_block_ids": [[40, 41]]}, {"remote_num_tokens": 12}],
    ids=["blocks of another size", "fewer blocks than tokens", "no more than is known"],
)
@pytest.mark.parametrize("knows", [True, False])
def test_what_does_not_fit_is_refused_and_computed(worker: Pulling, fields: dict[str, Any], knows: bool):
    lease, offer = worker.link(request()), worker.generated(**fields)
    free, worker.engine.knows = worker.pool.free, knows
    assert worker.pull(lease, offer).result(0) is knows, "else the note waits for a handshake"
    assert [blocks for _, blocks, _ in worker.engine.asked] == [()], "the decode engine is told"
    assert (worker.answers.pulling, worker.pool.free) == (0, free)
    assert worker.idle() == 20


def test_an_engine_that_cannot_read_costs_no_answer(worker: Pulling):
    def broken(*_: Any) -> None:
        raise RuntimeError("no agent")

    lease, offer = worker.link(request()), worker.generated()
    free, worker.engine.pull_kv = worker.pool.free, broken
    assert worker.pull(lease, offer).result(0) is False
    assert worker.pool.free == free
    assert worker.idle() == 20


def test_fewer_tokens_than_the_answer_has_serve_in_whole_blocks(worker: Pulling):
    lease, offer = worker.link(request()), worker.generated(remote_num_tokens=30)
    worker.pull(lease, offer)
    worker.answers.poll()
    assert worker.known(next_turn())[0] == 28


def test_without_room_nothing_is_read():
    with torch.inference_mode():
        worker = Pulling(blocks=12)
        lease, offer = worker.link(request()), worker.generated()
        worker.pool.allocate(8 * BLOCK, readers=1)
        assert worker.pull(lease, offer).done()
        assert worker.answers.pulling == 0


@pytest.mark.parametrize("after", [0.0, 25.0])
def test_what_the_decode_engine_may_have_given_to_others_is_not_named(
    worker: Pulling, monkeypatch: pytest.MonkeyPatch, after: float
):
    """It comes too late to be read, or while it is read the time ends for which it is held."""
    now = [1000.0]
    monkeypatch.setattr("infra.hand_back.time", SimpleNamespace(time=lambda: now[0]))
    lease, offer = worker.link(request()), worker.generated()
    now[0] += 25 - after
    ended = worker.pull(lease, offer)
    now[0] += after
    worker.answers.poll()
    assert ended.result(0) is (after > 0), "a read that has ended is told"
    assert worker.known(next_turn())[0] == 12
    assert worker.idle() == 20


def test_nobody_waits_for_pulls_of_a_loop_that_ends(worker: Pulling):
    ended = worker.pull(worker.link(request()), worker.generated())
    worker.answers.give_up_pulls()
    assert ended.result(0) is False


def test_blocks_are_held_while_they_are_read_however_long_that_takes():
    with torch.inference_mode():
        worker = Pulling()
        now = [0.0]
        worker.pool._clock = lambda: now[0]
        lease, offer = worker.link(request()), worker.generated()
        worker.engine.ends = False
        worker.pull(lease, offer)
        (name, *_), *_ = worker.engine.asked
        for _ in range(5):
            now[0] += 50
            worker.answers.poll()
            worker.pool.expire()
            assert name in worker.pool
        worker.engine.ends = True
        worker.answers.poll()
        assert worker.known(next_turn())[0] == 32


def test_what_was_deleted_meanwhile_is_not_named(worker: Pulling):
    lease, offer = worker.link(request()), worker.generated()
    ended = worker.pull(lease, offer)
    worker.index.forget("page", "local")
    worker.answers.forget("page", "local")
    worker.answers.poll()
    assert ended.done()
    assert worker.match(next_turn()).tokens == 0


def test_an_answer_behind_approximate_kv_serves_no_exact_prompt(worker: Pulling):
    lease, offer = worker.link(request(), OperatingPoint.PATCHED), worker.generated()
    worker.pull(lease, offer)
    worker.answers.poll()
    assert worker.match(next_turn()).tokens == 32
    assert worker.match(next_turn(mode=Mode.EXACT)).tokens == 3


def test_of_an_answer_behind_other_kv_than_is_known_now_nothing_is_read(worker: Pulling):
    """Its prompt was linked with a patch; another one, computed meanwhile, would have it named as exact."""
    lease, offer = worker.link(request(), OperatingPoint.PATCHED), worker.generated()
    worker.link(request(mode=Mode.EXACT))
    assert worker.pull(lease, offer).done()
    assert worker.answers.pulling == 0
    assert worker.idle() == 20


def test_another_workers_answer_is_neither_read_nor_refused(worker: Pulling):
    assert worker.pull("another worker's", worker.generated()).result(0) is False
    assert worker.engine.asked == []


def test_a_pull_has_ended_once_it_has_on_every_rank():
    ended = EndedPulls(2)
    assert ended.take([(["a", "b"], []), (["b"], [])]) == (["b"], [])
    assert ended.take([([], ["c"]), (["a", "c"], [])]) == (["a"], ["c"])
    assert ended.take([([], []), ([], [])]) == ([], [])
