"""The prefill loop under load and under faults: same KV as one at a time, and no block lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from rig import MAX_MODEL_LEN, MIXED, Rig, all_free, apart, fill
from waiting import wait_for

from prefill_workers.link.plan import LinkPlan
from prefill_workers.protocol import LinkResult, Overloaded, PromptTooLarge, Sampling
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.scheduler.load_budget import KVLoadBudget
from prefill_workers.scheduler.loop_stats import drain
from prefill_workers.sequence import LinkSequence, Run

pytestmark = pytest.mark.engine


def test_links_batched_into_one_forward_equal_serial_ones(make_rig: Callable[..., Rig]):
    rig = make_rig(
        learns=False, cost_model=ForwardCostModel(fixed=10_000.0)
    )  # a forward of one's own is dear: all join
    serial = [rig.link(parts, "exact").kv for parts in MIXED]
    wanted = [None if i == 1 else Sampling() for i in range(len(MIXED))]
    plans = [rig.plan(parts, "exact", sampling=one) for parts, one in zip(MIXED, wanted, strict=True)]
    before = rig.loop.stats().forwards
    with rig.loop._wake:  # the loop sees all of them at once
        futures = [rig.loop.submit(plan) for plan in plans]
    results = [future.result(60) for future in futures]
    assert rig.loop.stats().forwards == before + 1
    for plan, result, alone, one in zip(plans, results, serial, wanted, strict=True):
        linked = rig.finish(plan, result)
        assert apart(linked.kv, alone) < 1e-5
        assert result.first_token == (None if one is None else int(linked.logprobs.argmax()))
    wait_for(lambda: all_free(rig))


def forwarded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[LinkSequence, int]]]:
    """A list that every forward adds itself to: its sequences, with how many tokens of each it computes."""
    seen: list[list[tuple[LinkSequence, int]]] = []
    forward = rig.engine.forward

    def noted(work: Sequence[tuple[LinkSequence, Sequence[Run]]], *more: Any) -> None:
        seen.append([(sequence, sum(map(len, runs))) for sequence, runs in work])
        forward(work, *more)

    monkeypatch.setattr(rig.engine, "forward", noted)
    return seen


def test_one_token_proves_the_engine_and_leaves_nothing_behind(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False)
    before, links = rig.loop.progressed, rig.loop.stats().forwards
    for _ in range(2):
        rig.loop.compute_one_token().result(60)
    assert rig.loop.progressed > before
    assert rig.loop.stats().forwards == links, "none of a link's, by which costs are learnt"
    assert rig.loop.cpu_seconds() > 0
    assert all_free(rig)


def test_links_go_in_the_order_in_which_they_are_due_and_join_where_that_saves_waiting(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(learns=False, cost_model=ForwardCostModel(fixed=16.0, seconds_per_token=1.0))
    long, short, tiny = rig.plan(MIXED[4], "exact"), rig.plan(MIXED[1], "exact"), rig.plan(["?"], "off")
    assert len(long.sequence) > 100 > len(short.sequence) > len(tiny.sequence)
    assert len(tiny.sequence) <= 2 * 16 < len(short.sequence)
    seen = forwarded(rig, monkeypatch)
    with rig.loop._wake:
        futures = {name: rig.loop.submit(plan) for name, plan in (("long", long), ("short", short), ("tiny", tiny))}
    for future in futures.values():
        rig.loop.abandon(future.result(60).lease)
    # `short` in the forward of `tiny` would delay that by more than it saves for itself and for `long`.
    assert [[sequence for sequence, _ in work] for work in seen] == [[tiny.sequence], [short.sequence], [long.sequence]]


def test_each_link_is_computed_as_soon_as_its_deviations_are_measured(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    """A partial forward for everybody would come before anybody's first token."""
    rig = make_rig(cost_model=ForwardCostModel(fixed=4.0, seconds_per_token=1.0))
    rig.link(MIXED[4], "exact")
    rig.link(MIXED[2], "exact")
    long, short = rig.plan(MIXED[4], "cacheblend-40"), rig.plan(MIXED[2], "cacheblend-40")
    wait_for(lambda: all(chunk.has_ended_load for chunk in [*long.chunks, *short.chunks]))
    events: list[tuple[str, LinkSequence]] = []
    forward, first = rig.engine.forward, rig.engine.forward_first

    def noted(work: Any, *more: Any) -> None:
        events.extend(("whole", sequence) for sequence, _ in work)
        forward(work, *more)

    def noted_first(work: Any, layers: int) -> None:
        events.extend(("partial", sequence) for sequence, _ in work)
        first(work, layers)

    monkeypatch.setattr(rig.engine, "forward", noted)
    monkeypatch.setattr(rig.engine, "forward_first", noted_first)
    with rig.loop._wake:
        futures = [rig.loop.submit(plan) for plan in (long, short)]
    for future in futures:
        rig.loop.abandon(future.result(60).lease)
    assert [kind for kind, _ in events] == ["partial", "whole", "partial", "whole"]
    assert events[0][1] is events[1][1] is not events[2][1] is events[3][1]


def test_a_link_that_arrives_waits_for_one_piece_of_the_background_work(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(
        cost_model=ForwardCostModel(fixed=2.0, seconds_per_token=1.0)
    )  # pieces of 8 tokens, 9 where they come out even
    asked = rig.plan(MIXED[0], "off")
    whole = rig.plan(MIXED[4], "auto")
    seen = forwarded(rig, monkeypatch)
    futures: list[Future[LinkResult]] = []
    noted = rig.engine.forward

    def meanwhile(work: Any, *more: Any) -> None:
        noted(work, *more)
        if len(seen) == 2:  # the first piece of the first harvest
            futures.append(rig.loop.submit(asked))

    monkeypatch.setattr(rig.engine, "forward", meanwhile)
    rig.loop.abandon(rig.loop.submit(whole).result(60).lease)
    drain(rig.loop)
    rig.library.flush()
    (future,) = futures
    rig.loop.abandon(future.result(60).lease)
    assert [sequence for sequence, _ in seen[0]] == [whole.sequence]
    assert [sequence for sequence, _ in seen[2]] == [asked.sequence]
    (piece,), (rest,) = seen[1], seen[3]
    assert piece[0] is rest[0], "the harvest goes on where it was"
    assert all(7 <= tokens <= 9 for work in [seen[1], *seen[3:]] for _, tokens in work)
    monkeypatch.undo()
    relinked = rig.link(MIXED[4], "auto")
    assert relinked.points == ["patched"] * 3
    assert apart(relinked.kv, rig.link(MIXED[4], "exact").kv) < 1e-3


def test_a_small_token_budget_splits_runs_and_changes_nothing(make_rig: Callable[..., Rig]):
    whole = make_rig(learns=False).link(MIXED[4], "exact")
    rig = make_rig(learns=False, budget=50)
    split = rig.link(MIXED[4], "exact", sampling=Sampling())
    stats = rig.loop.stats()
    assert split.result.first_token == int(whole.logprobs.argmax())
    assert stats.forwards == -(-stats.tokens_forwarded // 50)
    assert apart(split.kv, whole.kv) < 1e-5


def test_a_prompt_that_the_pool_can_never_hold_is_refused_at_once(make_rig: Callable[..., Rig], monkeypatch):
    rig = make_rig()
    monkeypatch.setattr(rig.loop._pool, "total", 2)
    with pytest.raises(PromptTooLarge, match=r"needs \d+ KV blocks, the prefill worker has 2"):
        rig.link(MIXED[4])


def test_links_wait_for_blocks_and_run_when_some_come_free(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False)
    plan = rig.plan(MIXED[3], "off")
    taken = []
    while rig.loop._pool.free > 1:
        taken.append(rig.loop._pool.allocate(32 * min(rig.loop._pool.free - 1, MAX_MODEL_LEN // 32)).id)
    future = rig.loop.submit(plan)
    time.sleep(0.2)
    assert not future.done()
    for lease in taken:
        rig.loop.abandon(lease)
    rig.loop.abandon(future.result(30).lease)
    wait_for(lambda: all_free(rig))


def test_more_links_than_the_queue_takes_are_refused(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False, max_queue=2)
    plan = rig.plan(MIXED[0], "off")
    with rig.loop._wake:
        futures = [rig.loop.submit(plan) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests wait already"):
            rig.loop.submit(plan)
    for future in futures:
        rig.loop.abandon(future.result(30).lease)
    wait_for(lambda: all_free(rig))


async def test_links_that_wait_until_others_have_let_go_of_what_they_loaded_wait_too(make_rig: Callable[..., Rig]):
    loaded = KVLoadBudget(1, bytes_per_token=1)
    rig = make_rig(learns=False, max_queue=2, load_budget=loaded)
    request = rig.plan(MIXED[1], "exact").request
    async with loaded.room_for(request):
        rig.loop.refuse_if_full()
        later = [asyncio.create_task(loaded.room_for(request).__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        stats = rig.loop.stats()
        assert stats.waiting == 2
        assert stats.tokens_queued == loaded.tokens > 0
        with pytest.raises(Overloaded, match="2 requests wait already"):
            rig.loop.refuse_if_full()
        for one in later:
            one.cancel()
        await asyncio.sleep(0)
    assert rig.loop.stats().waiting == 0


def test_cancelled_links_take_no_place_in_the_queue(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False, max_queue=2)
    plan, taken = rig.plan(MIXED[0], "off"), fill(rig)
    first, second = (rig.loop.submit(plan) for _ in range(2))
    second.cancel()
    wait_for(lambda: rig.loop.stats().waiting == 1)
    third = rig.loop.submit(plan)
    for lease in taken:
        rig.loop.abandon(lease)
    for future in (first, third):
        rig.loop.abandon(future.result(30).lease)
    wait_for(lambda: all_free(rig))


def test_cancelled_links_give_their_blocks_back_wherever_they_are(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False, budget=64)  # several forwards each, so that some are caught half-way
    plans = [rig.plan(parts, "off") for parts in MIXED for _ in range(4)]
    futures: list[Future[LinkResult]] = [rig.loop.submit(plan) for plan in plans]
    for i, future in enumerate(futures):
        if i % 2:
            future.cancel()
            time.sleep(0.01)
    for future in futures:
        try:
            rig.loop.abandon(future.result(60).lease)
        except CancelledError:
            continue
    drain(rig.loop)
    wait_for(lambda: all_free(rig))


def test_a_forward_that_fails_fails_its_links_and_nothing_else(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(learns=False)
    plan = rig.plan(MIXED[1], "off")

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(rig.engine, "forward", broken)
        with pytest.raises(RuntimeError, match="injected"):
            rig.loop.submit(plan).result(30)
        assert rig.loop.failing == 1
    wait_for(lambda: all_free(rig))
    assert rig.link(MIXED[1], "off").points == ["encoded"]
    assert rig.loop.failing == 0


def test_a_write_that_fails_tells_of_the_engine_as_a_forward_does(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig()
    rig.link(MIXED[1])
    drain(rig.loop)

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(rig.engine, "write_kv", broken)
        for failed in (1, 2):
            with pytest.raises(RuntimeError, match="injected"):
                rig.loop.submit(rig.plan(MIXED[1])).result(30)
            assert rig.loop.failing == failed
    wait_for(lambda: all_free(rig))
    assert rig.link(MIXED[1]).points == ["patched"]
    assert rig.loop.failing == 0


def test_images_are_encoded_between_forwards_and_what_is_wrong_with_one_call_concerns_no_other(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(learns=False, max_queue=3)
    segments = rig.render([1, " and ", 2])
    pixels = segments.pixels(range(len(segments.chunks)))
    alone, link = rig.engine.encode(pixels), rig.plan(MIXED[3], "off")
    calls: list[int] = []
    encode = rig.engine.encode
    monkeypatch.setattr(rig.engine, "encode", lambda items: calls.append(len(items)) or encode(items))
    with rig.loop._wake:
        wrong, cancelled, right = (rig.loop.encode(items) for items in ([("image", None)], pixels[:1], pixels))
        linked = rig.loop.submit(link)
        with pytest.raises(Overloaded, match="3 requests wait already"):
            rig.loop.encode(pixels)
        cancelled.cancel()
    with pytest.raises(AttributeError):
        wrong.result(30)
    for found, wanted in zip(right.result(30), alone, strict=True):
        assert torch.equal(found, wanted)
    rig.loop.abandon(linked.result(30).lease)
    assert calls == [2], "what nobody waits for is not encoded"
    wait_for(lambda: all_free(rig))
    rig.loop.stop()
    with pytest.raises(Overloaded, match="shutting down"):
        rig.loop.encode(pixels)


def test_an_engine_that_encodes_no_more_images_counts_as_failing_until_it_does(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    """A GPU that lost its context, where prefill workers encode and no link has come so far."""
    rig = make_rig(learns=False)
    segments = rig.render([1])
    pixels = segments.pixels(range(len(segments.chunks)))
    encode, errors = rig.engine.encode, [torch.AcceleratorError("injected"), ValueError("a broken image")]

    def failing(items: Any) -> Any:
        if errors:
            raise errors.pop()
        return encode(items)

    monkeypatch.setattr(rig.engine, "encode", failing)
    for error, counted in ((ValueError, 0), (torch.AcceleratorError, 1)):
        with pytest.raises(error):
            rig.loop.encode(pixels).result(30)
        assert rig.loop.failing == counted
    rig.loop.encode(pixels).result(30)
    assert rig.loop.failing == 0


def test_links_are_computed_between_handfuls_of_one_calls_images(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig(learns=False)
    segments = rig.render([1, " and ", 2, " and ", 3])
    pixels = segments.pixels(range(len(segments.chunks)))
    alone, link, events = rig.engine.encode(pixels), rig.plan(MIXED[3], "off"), list[str]()
    encode, forward = rig.engine.encode, rig.engine.forward
    monkeypatch.setattr(rig.engine, "spec", replace(rig.engine.spec, max_batch_tokens=1))
    monkeypatch.setattr(rig.engine, "encode", lambda items: events.append(f"{len(items)} encoded") or encode(items))
    monkeypatch.setattr(rig.engine, "forward", lambda *work: events.append("forward") or forward(*work))
    with rig.loop._wake:
        images, linked = rig.loop.encode(pixels), rig.loop.submit(link)
    for found, wanted in zip(images.result(30), alone, strict=True):
        assert torch.equal(found, wanted)
    rig.loop.abandon(linked.result(30).lease)
    assert events == ["1 encoded", "forward", "1 encoded", "1 encoded"]

    given_up = rig.loop.encode(pixels)
    wait_for(lambda: len(events) > 4)
    given_up.cancel()
    wait_for(lambda: not rig.loop._encode_queue)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["turn", "_finish"])
def test_a_defect_in_the_loop_leaves_nobody_waiting(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, where: str
):
    rig = make_rig(learns=False)
    plan, pixels = rig.plan(MIXED[1], "off"), rig.render([1]).pixels([0])
    monkeypatch.setattr(rig.loop._runner, where, lambda *_: 1 / 0)
    with rig.loop._wake:
        waiting = [rig.loop.submit(plan), *(rig.loop.encode(pixels) for _ in range(3))]
    with pytest.raises(ZeroDivisionError):
        waiting[0].result(30)
    wait_for(lambda: not rig.loop.alive())
    assert all(one.done() for one in waiting)


def test_a_lease_nobody_reads_ends_by_itself(make_rig: Callable[..., Rig]):
    rig = make_rig(lease_seconds=0.2)
    plan: LinkPlan = rig.plan(MIXED[1], "off")
    rig.loop.submit(plan).result(30)
    wait_for(lambda: all_free(rig))
    assert rig.loop.stats().leases_expired == 1


def test_embeddings_outlive_a_harvest_that_is_given_up_with_its_lease(make_rig: Callable[..., Rig]):
    rig = make_rig(lease_seconds=0.2, patience_seconds=30.0)
    plan = rig.plan(MIXED[1])
    rig.loop.submit(plan).result(30)
    wait_for(lambda: all_free(rig))
    assert rig.loop.stats().harvest == 0
    (keys, *_) = rig.linker.keys(plan.request)
    assert not rig.library.has("canonical", keys.canonical, "local")
    assert rig.library.has("embedding", keys.embedding, "local")


def test_a_lease_that_is_renewed_outlives_its_time(make_rig: Callable[..., Rig]):
    rig = make_rig(lease_seconds=2.0)
    lease = rig.loop.submit(rig.plan(MIXED[1], "off")).result(30).lease
    for _ in range(30):
        time.sleep(0.1)
        rig.loop.renew(lease)
    assert rig.loop.stats().leases == 1
    wait_for(lambda: all_free(rig))


def test_stopping_finishes_what_runs_and_refuses_what_waits(make_rig: Callable[..., Rig]):
    rig = make_rig(learns=False)
    plan = rig.plan(MIXED[2], "off")
    future = rig.loop.submit(plan)
    wait_for(lambda: rig.loop.stats().waiting == 0)
    rig.loop.stop()
    future.result(30)
    assert not rig.loop.alive()
    with pytest.raises(Overloaded, match="shutting down"):
        rig.loop.submit(plan)
