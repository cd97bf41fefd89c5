"""Blocks in host memory: what the pool evicts comes back as it was, to whom it may serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from small_transformer import BLOCK, SPARE, Transformer
from torch import Tensor

from prefill_workers.block_index import BlockIndex, ChunkForm
from prefill_workers.block_pool import BlockPool
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.host_blocks import HostBlocks, HostStats
from prefill_workers.link.prefix_hits import PrefixHits, asked_by
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.prefix_digests import PrefixChain, prefix_chain
from prefill_workers.protocol import TEXT, ChunkSpan, LinkRequest
from prefill_workers.sequence import LinkSequence, Run
from prefill_workers.settings import FidelitySettings

PAGE = ChunkSpan("page", TEXT, 3, 9, 3, 6)
PROMPT = list(range(1, 24))  # five blocks, and three tokens of a sixth
EXACT, PATCHED = OperatingPoint.RECOMPUTED, OperatingPoint.PATCHED


class Worker:
    """Links over a pool of few blocks, with host memory behind it."""

    def __init__(self, blocks: int = 10, host_blocks: int = 20) -> None:
        self.engine: Any = Transformer()
        self.index = BlockIndex(BLOCK)
        self.pool = BlockPool(range(blocks), BLOCK, 60.0, "test", index=self.index)
        self.hits = PrefixHits(self.engine, self.index, Fidelity(FidelitySettings(share=0)))
        size = self.engine.layout.layers * BLOCK * self.engine.layout.features * 4
        self.host = HostBlocks(self.engine, self.pool, self.hits, host_blocks * size)

    def link(self, request: LinkRequest, point: OperatingPoint = EXACT) -> None:
        chain, match = self.hits.look_up(request, 0)
        assert chain is not None
        lease = self.pool.allocate(len(request.token_ids), match=match)
        self.hits.copy(match, lease.blocks)
        self.engine.forward([(sequence(request.token_ids, lease.blocks), [Run(match.tokens, len(request.token_ids))])])
        form = ChunkForm(EXACT) if point is EXACT else ChunkForm(point, asked_by(request))
        forms = (*match.forms, *[form] * (len(request.chunks) - len(match.forms)))
        self.index.add(lease.blocks, chain, forms, match, 0, self.index.epoch)
        self.pool.abandon(lease.id)

    def evict(self) -> None:
        """Have all blocks handed out."""
        lease = self.pool.allocate(self.pool.total * BLOCK)
        self.engine.write_kv(
            torch.randn(self.engine.pages.shape[0], self.pool.total * BLOCK, 32), self.slots(lease.blocks)
        )
        self.pool.abandon(lease.id)

    def slots(self, blocks: Sequence[int]) -> Tensor:
        return self.engine.slots(blocks, 0, len(blocks) * BLOCK)

    def known(self, request: LinkRequest) -> int:
        return self.hits.look_up(request, 0)[1].tokens

    def kv(self, request: LinkRequest) -> Tensor:
        match = self.hits.look_up(request, 0)[1]
        return self.engine.read_kv([one.block for one in match.blocks], 0, match.tokens)

    def restore(self, request: LinkRequest) -> None:
        self.host.restore(request, chain(request))


def chain(request: LinkRequest) -> PrefixChain:
    return prefix_chain(request.tenant, request.token_ids, request.chunks, BLOCK)


def sequence(token_ids: Sequence[int], blocks: Sequence[int]) -> LinkSequence:
    return LinkSequence(torch.tensor(token_ids, dtype=torch.int32), torch.arange(len(token_ids)), blocks)


def request(token_ids: Sequence[int] = PROMPT, **fields: Any) -> LinkRequest:
    return LinkRequest("r", [*token_ids], (PAGE,), **fields)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with torch.inference_mode():
        yield Worker()


def test_what_was_evicted_comes_back_bit_for_bit(worker: Worker):
    worker.link(request())
    before = worker.kv(request())
    worker.evict()
    assert worker.known(request()) == 0
    assert worker.host.holds(chain(request()))
    free = worker.pool.free
    worker.restore(request())
    assert worker.known(request()) == 20
    assert torch.equal(worker.kv(request()), before)
    assert (worker.pool.free, worker.pool.cached) == (free, 5), "cached, by no lease"
    assert (worker.host.stats().restored, worker.host.stats().blocks) == (5, 0)
    longer = request([*PROMPT, 70, 71])
    worker.link(longer)
    worker.engine.forward([(sequence(longer.token_ids, SPARE), [Run(0, 25)])])
    torch.testing.assert_close(worker.kv(longer), worker.engine.read_kv(SPARE, 0, 24), atol=1e-5, rtol=0)


def test_it_goes_on_behind_what_the_pool_still_has(worker: Worker):
    worker.link(request())
    before = worker.kv(request())
    taken = worker.pool.allocate(7 * BLOCK)  # a prompt's end goes first
    assert worker.known(request()) == 12
    worker.pool.abandon(taken.id)
    worker.restore(request())
    assert worker.host.stats().restored == 2
    assert worker.known(request()) == 20
    assert torch.equal(worker.kv(request()), before)


def test_what_comes_back_takes_no_lease_s_blocks_nor_what_it_stands_behind(worker: Worker):
    worker.link(request())
    taken = worker.pool.allocate(7 * BLOCK)
    worker.restore(request())
    assert worker.host.stats().restored == 0
    assert worker.pool.cached == 3
    worker.pool.abandon(taken.id)
    small = worker.pool.allocate(6 * BLOCK)
    worker.restore(request())
    assert worker.host.stats().restored == 1
    assert worker.known(request()) == 16
    worker.pool.abandon(small.id)


def test_it_serves_whom_it_served_before(worker: Worker):
    worker.link(request(), PATCHED)
    worker.evict()
    worker.restore(request(mode=Mode.EXACT))
    assert worker.known(request(mode=Mode.EXACT)) == 3, "up to the page, in the first block"
    assert worker.host.stats().restored == 1
    assert not worker.host.holds(chain(request(tenant="another")))
    worker.restore(request())
    assert worker.known(request()) == 20
    assert worker.known(request(mode=Mode.EXACT)) == 3


def test_the_longest_unused_goes_first(worker: Worker):
    small = Worker(host_blocks=5)  # under the fixture's inference mode
    small.link(request())
    small.evict()
    other = request([*PROMPT[:-1], 90], tenant="other")
    small.link(other)
    small.evict()
    assert small.host.stats().blocks == 5
    assert not small.host.holds(chain(request()))
    small.restore(other)
    assert small.known(other) == 20


def test_what_comes_back_may_give_way_to_what_makes_room_for_it(worker: Worker):
    small = Worker(host_blocks=5)
    small.link(request())
    before = small.kv(request())
    small.evict()
    small.link(LinkRequest("r", [*range(30, 69)]))  # nine blocks that others begin with, one that none does
    small.restore(request())
    assert small.known(request()) == 20
    assert torch.equal(small.kv(request()), before)
    assert small.host.stats().blocks == 4


def test_deleted_content_does_not_come_back(worker: Worker):
    worker.link(request())
    worker.evict()
    worker.index.forget("page", "local")
    worker.restore(request())  # before the loop's thread has forgotten
    worker.host.forget("page", "local")
    assert worker.known(request()) == 0
    worker.link(request())
    worker.evict()
    worker.host.forget("page", "another")
    assert worker.host.stats().blocks == 5
    worker.host.forget("page", "local")
    assert worker.host.stats() == HostStats(blocks=0, nbytes=0, restored=5)


def test_what_may_have_been_wrong_does_not_come_back(worker: Worker):
    worker.link(request())
    worker.evict()
    worker.index.clear()
    worker.restore(request())
    assert worker.known(request()) == 0
    assert worker.host.stats().blocks == 0


def test_routers_are_told_of_it_until_it_is_gone(worker: Worker):
    long = LinkRequest("r", [*range(1, 70)])
    worker = Worker(blocks=20, host_blocks=18)
    worker.link(long)
    marks = worker.index.marks(9)
    assert marks
    worker.evict()
    assert worker.index.marks(9) == marks
    worker.link(LinkRequest("r", [*range(50, 119)], tenant="other"))
    worker.evict()
    assert len(worker.index.marks(9)) == len(marks)
    assert worker.index.marks(9) != marks, "the other prompt's alone"


def test_blocks_that_cannot_be_copied_are_handed_out_all_the_same(worker: Worker, monkeypatch: pytest.MonkeyPatch):
    worker.link(request())

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker.engine, "read_kv", fail)
    lease = worker.pool.allocate(worker.pool.total * BLOCK)
    worker.pool.abandon(lease.id)
    assert (worker.pool.free, worker.host.stats().blocks) == (worker.pool.total, 0)
