"""Admission to blocks, and what a failing forward costs other links, whatever forwards compute."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from chunk_keys import chunk_keys

from kvstore.forget import ForgetRegistry
from prefill_workers.block_index import NO_MATCH
from prefill_workers.block_pool import BlockPool
from prefill_workers.compaction.plan import CompactionPlan, compaction_plan
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.link.linker import Linker
from prefill_workers.link.lookups import Lookup
from prefill_workers.link.plan import ChunkPlan, ChunkState, LinkPlan
from prefill_workers.modes import OperatingPoint
from prefill_workers.patches.harvester import Harvester
from prefill_workers.prefix_digests import prefix_chain
from prefill_workers.protocol import (
    ChunkOutcome,
    ChunkSpan,
    Compaction,
    CompactionRefused,
    HandedOff,
    LinkRequest,
    NonFiniteLogits,
)
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.link_job import LinkJob
from prefill_workers.scheduler.prefill_loop import PrefillLoop
from prefill_workers.scheduler.scheduler import ForwardResult, Scheduler
from prefill_workers.sequence import LinkSequence, Run
from prefill_workers.settings import FidelitySettings, LoopLimits


def job(tokens: int, reused: int = 0) -> LinkJob:
    """A link of a prompt, of which a stored chunk is the first `reused` tokens."""
    chunks = []
    if reused:
        span = ChunkSpan("content", "image", 0, reused, 0, reused)
        chunks.append(ChunkPlan(span, chunk_keys(), 0, ChunkOutcome(reused, OperatingPoint.PATCHED, 0, "")))
        chunks[0].settle(OperatingPoint.PATCHED)
    sequence = LinkSequence(torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens), ())
    return LinkJob(LinkPlan(LinkRequest("request", [0] * tokens), sequence, chunks), Future(), 0.0)


class Engine:
    """Fails forwards over some sequences; counts how often it was waited for."""

    accepts_layerwise_kv = False
    num_blocks, block_size, max_model_len = 41, 16, 160
    not_compactable = forward_span = None

    def __init__(self) -> None:
        self.broken: set[LinkSequence] = set()
        self.uncompactable: set[int] = set()  # by tokens
        self.compacted: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.finished_writes = 0

    def forward(self, work: Sequence[tuple[LinkSequence, list[Run]]], *_: Any) -> None:
        if any(sequence in self.broken for sequence, _ in work):
            raise RuntimeError("injected")

    def finish_writes(self) -> None:
        self.finished_writes += 1

    def transfer_parameters(self, *_: Any) -> dict[str, Any]:
        return {}

    def stored_bytes(self, tokens: int) -> int:
        return 64 * tokens

    def compact(self, link: str, blocks: Sequence[int], plan: CompactionPlan, into: Sequence[int]) -> None:
        if plan.tokens in self.uncompactable:
            raise RuntimeError("injected")
        self.compacted.append((link, tuple(blocks), tuple(into)))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(range(1, 11), block_size=16, lease_seconds=60, owner="test")


@pytest.fixture
def scheduler(pool: BlockPool) -> Scheduler:
    linker = SimpleNamespace(advance=lambda plan: None, match=lambda plan, fits: NO_MATCH, prefixes=None)
    cost_model = ForwardCostModel(fixed=0.0, seconds_per_token=1e-6)  # nobody joins another's forward
    return Scheduler(cast(Linker, linker), pool, cost_model, 4096, streams_layers=False)


def admit(scheduler: Scheduler, *jobs: LinkJob) -> None:
    for one in jobs:
        scheduler.add(one)
    assert scheduler.admit()


def computed(scheduler: Scheduler) -> list[LinkJob]:
    """The links that are done after a forward that went well."""
    return scheduler.update(scheduler.schedule(), ForwardResult(None, 1e-3))


def test_a_link_whose_logits_are_not_finite_ends_with_an_error_and_others_go_on(scheduler: Scheduler, pool: BlockPool):
    broken, sound = job(64, reused=16), job(64)
    broken.plan.chunks[0].stored = (("patch", "key", "owner"),)
    admit(scheduler, broken, sound)
    batch = scheduler.schedule()
    assert batch is not None
    assert [batch.work[i][0] for i in batch.ending] == [broken]
    assert scheduler.update(batch, ForwardResult(torch.tensor([[1.0, torch.nan]]), 1e-3)) == []
    error = broken.done.exception()
    assert isinstance(error, NonFiniteLogits)
    assert error.stored == (("patch", "key", "owner"),)
    assert (scheduler.running, pool.free, scheduler.failing) == ([sound], 6, 0)


def compacting(tokens: int) -> LinkJob:
    one = job(tokens)
    one.plan.request = replace(one.plan.request, compaction=Compaction(0.5), readers=2)
    one.compaction = compaction_plan(one.plan.request, 16)
    assert one.compaction is not None
    return one


def test_a_compacted_link_gets_all_its_blocks_at_once_or_none(scheduler: Scheduler, pool: BlockPool):
    """Two links that each waited for the other's blocks would never end."""
    first, second = compacting(96), compacting(96)  # 6 blocks, and 4 for 63 entries with a first token's slot
    for one in (first, second):
        scheduler.add(one)
    assert not scheduler.admit()
    assert (scheduler.running, pool.free, pool.leases) == ([first], 0, 2)
    lease, room = first.offered
    assert (lease, room, len(lease.blocks), lease.readers) == (first.compacted, 64, 4, 2)
    assert first.lease is not None
    assert first.lease.readers == 0, "no decode engine pulls the whole KV"
    scheduler.free(first)
    scheduler.remove([first])
    assert scheduler.admit()
    assert scheduler.running == [second]


def test_waiting_links_are_admitted_in_order_while_blocks_last(scheduler: Scheduler, pool: BlockPool):
    first, large, small = job(64), job(100), job(16)
    for one in (first, large, small):
        scheduler.add(one)
    assert not scheduler.admit()
    assert (list(scheduler.waiting), scheduler.running) == ([large, small], [first]), "nobody is overtaken"
    assert (scheduler.tokens_left, pool.free) == (180, 6)
    assert computed(scheduler) == [first]
    scheduler.remove([first])
    scheduler.free(first)
    assert scheduler.admit()
    assert (list(scheduler.waiting), scheduler.running, pool.free) == ([], [large, small], 2)
    assert small.lease is not None
    assert small.plan.sequence.blocks == small.lease.blocks


def test_cancelled_links_leave_no_blocks_taken(scheduler: Scheduler, pool: BlockPool):
    running, waiting = job(160), job(160)
    admit(scheduler, running)
    scheduler.add(waiting)
    for one in (running, waiting):
        one.done.cancel()
    assert scheduler.take_cancelled() == [waiting]
    assert scheduler.schedule() is None
    assert (scheduler.has_links, pool.free) == (False, 10)


def test_a_forward_that_fails_fails_the_links_in_it_alone(scheduler: Scheduler, pool: BlockPool):
    wrong, right = job(10), job(100)
    admit(scheduler, right, wrong)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.jobs == [wrong], "it is due first"
    scheduler.fail(batch.jobs, RuntimeError("injected"))
    assert scheduler.update(batch, None) == []
    with pytest.raises(RuntimeError, match="injected"):
        wrong.done.result(0)
    assert (scheduler.running, pool.free, scheduler.failing) == ([right], 3, 1)
    assert not right.done.done()
    assert right.pending == [Run(0, 100)], "it has lost nothing"
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.sequences == [(right.plan.sequence, [Run(0, 100)])]
    assert scheduler.update(batch, ForwardResult(None, 1e-3)) == [right]
    assert scheduler.failing == 0


def test_several_failures_of_a_turn_count_as_one(scheduler: Scheduler):
    for turns in (1, 2):
        jobs = [job(10), job(20)]
        admit(scheduler, *jobs)
        assert scheduler.schedule()
        for one in jobs:
            scheduler.fail([one], RuntimeError("injected"))
        assert scheduler.failing == turns


def test_a_link_whose_chunks_are_placed_is_done_although_the_forward_failed(scheduler: Scheduler):
    wrong, placed = job(10), job(50, reused=50)
    admit(scheduler, wrong, placed)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.fail(batch.jobs, RuntimeError("injected"))
    assert scheduler.update(batch, None) == [placed]
    assert scheduler.running == [placed], "until it is removed"


def begin_alike(pool: BlockPool, *jobs: LinkJob, first: int = 0) -> None:
    for one in jobs:
        tokens = [first, *[0] * (len(one.plan.sequence) - 1)]
        one.plan.chain = prefix_chain("acme", tokens, (), pool.block_size)


def test_a_link_waits_for_another_that_is_about_to_spare_it_its_beginning(scheduler: Scheduler, pool: BlockPool):
    leader, follower, other = job(80), job(96), job(70)
    begin_alike(pool, leader, follower)
    begin_alike(pool, other, first=1)
    for one in (leader, follower, other):
        scheduler.add(one)
    assert scheduler.admit(), "it is not for want of blocks that it waits"
    assert (scheduler.running, [*scheduler.waiting]) == ([leader, other], [follower])
    scheduler.remove([leader, other])
    for one in (leader, other):
        scheduler.free(one)
    assert scheduler.admit()
    assert scheduler.running == [follower]


def test_a_link_does_not_wait_for_one_that_has_much_else_to_compute(scheduler: Scheduler, pool: BlockPool):
    long, short = job(90), job(50)
    begin_alike(pool, long, short)
    admit(scheduler, long, short)
    assert not scheduler.waiting, "it would be spared fewer tokens than a forward is worth"


def loop_of(engine: Engine) -> PrefillLoop:
    """A loop whose thread does not run."""
    linker = SimpleNamespace(
        engine=engine,
        advance=lambda plan: None,
        match=lambda plan, fits: NO_MATCH,
        prefixes=None,
        sessions=None,
        sums=None,
        forgets=ForgetRegistry(),
        library=None,
        fidelity=Fidelity(FidelitySettings(share=0)),
    )
    return PrefillLoop(
        cast(Linker, linker),
        cast(Harvester, SimpleNamespace(engine=engine, library=None, form=None)),
        LoopLimits(budget=4096, max_queue=4, lease_seconds=60, learns=False),
        owner="test",
        cost_model=ForwardCostModel(fixed=0.0, seconds_per_token=1e-6),
    )


def test_what_was_written_for_a_link_is_there_before_it_ends_although_the_forward_failed():
    engine = Engine()
    loop = loop_of(engine)
    wrong, placed = job(10), job(50, reused=50)
    admit(loop._scheduler, wrong, placed)
    engine.broken.add(wrong.plan.sequence)
    placed.done.add_done_callback(lambda done: seen.append(engine.finished_writes))
    seen: list[int] = []
    loop._turn()
    with pytest.raises(RuntimeError, match="injected"):
        wrong.done.result(0)
    assert placed.done.result(0).tokens_reused == 50
    assert seen == [1]


def test_the_whole_kv_is_offered_where_the_pool_has_no_room_for_two():
    engine = Engine()
    loop = loop_of(engine)
    assert loop._pool.total == 30
    for tokens, kept in ((288, 159), (352, 352)):  # 18 and 10 blocks; 22 and 12
        asked = compacting(tokens)
        asked.plan.request = replace(asked.plan.request, readers=1)
        loop.submit(asked.plan)
        (waiting,) = loop._scheduler.waiting
        assert (tokens if waiting.compaction is None else waiting.compaction.kept) == kept
        loop._scheduler.waiting.clear()


def test_a_model_whose_kv_cannot_be_reduced_refuses_by_name():
    engine = Engine()
    engine.not_compactable = "its attention has sliding window"
    with pytest.raises(CompactionRefused, match="kv_budget: its attention has sliding window"):
        loop_of(engine).submit(compacting(96).plan)


def test_decode_engines_are_offered_the_entries_and_the_whole_kv_is_nobodys_afterwards():
    engine = Engine()
    loop = loop_of(engine)
    sound, broken = compacting(96), compacting(128)
    engine.uncompactable.add(128)
    admit(loop._scheduler, sound, broken)
    assert sound.lease is not None
    assert sound.compacted is not None
    loop._turn()
    loop._turn()
    result = sound.done.result(0)
    assert (result.lease, result.kv) == (sound.compacted.id, HandedOff(96, 63, 64 * 63))
    assert engine.compacted == [(sound.lease.id, sound.lease.blocks, sound.compacted.blocks)]
    with pytest.raises(RuntimeError, match="injected"):
        broken.done.result(0)
    assert (loop._pool.leases, loop._pool.free) == (1, loop._pool.total - 4)
    loop._pool.read(result.lease)
    assert loop._pool.leases == 1, "the other of its two readers"
    loop._pool.read(result.lease)
    assert loop._pool.free == loop._pool.total


def test_nan_behind_what_streams_in_waits_for_the_load_that_says_whose_it_is(scheduler: Scheduler):
    one, span = job(64), ChunkSpan("content", "image", 0, 16, 0, 16)
    outcome = ChunkOutcome(16, OperatingPoint.PATCHED, 0, "")
    chunk = ChunkPlan(span, chunk_keys(), 0, outcome, lookup=Lookup())
    one.plan.chunks.append(chunk)
    admit(scheduler, one)
    chunk.begin_stream(cast(Any, object()))
    scheduler.update(scheduler.schedule(), ForwardResult(torch.tensor([[1.0, torch.nan]]), 1e-3))
    assert not one.done.done()
    assert (chunk.state, one.reached, one.may_stream) == (ChunkState.LOADING, 0, False)


@pytest.mark.parametrize(("on_device", "learnt"), [(False, [40e-3]), (True, [])])
def test_waiting_for_layers_is_no_computing_where_the_host_computes(
    scheduler: Scheduler, on_device: bool, learnt: list[float]
):
    """A device goes on while its host waits: its seconds tell nothing of its pace then, nor does their difference."""
    one = job(128)
    admit(scheduler, one)
    batch = scheduler.schedule()
    assert batch is not None
    load: Any = SimpleNamespace(chunk=SimpleNamespace(state=ChunkState.PLACED), is_late=False, waited=60e-3)
    seconds: list[float] = []
    scheduler.cost_model = cast(Any, SimpleNamespace(learn=lambda tokens, computing: seconds.append(computing)))
    scheduler.update(replace(batch, streams=[(one, load)]), ForwardResult(None, 100e-3, on_device))
    assert seconds == pytest.approx(learnt)
    assert one.plan.compute_ms == pytest.approx(100.0 if on_device else 40.0)


def test_a_stream_that_failed_before_its_forward_ran_is_no_late_one(scheduler: Scheduler):
    one, span = job(64), ChunkSpan("content", "image", 0, 16, 0, 16)
    chunk = ChunkPlan(span, chunk_keys(), 0, ChunkOutcome(16, OperatingPoint.PATCHED, 0, ""))
    chunk.settle(OperatingPoint.RECOMPUTED)
    one.plan.chunks.append(chunk)
    admit(scheduler, one)
    batch = scheduler.schedule()
    assert batch is not None
    load: Any = SimpleNamespace(chunk=chunk, is_late=True, waited=0.0)
    assert scheduler.update(replace(batch, streams=[(one, load)]), ForwardResult(None, 1e-3)) == [one]
