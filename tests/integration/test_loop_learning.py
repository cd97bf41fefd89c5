"""What the prefill loop learns from links beside them: when, of what, and that it costs no request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from rig import MIXED, Rig, all_free, fill
from waiting import wait_for

from kvstore.records.record import CanonicalRecord, Record, RecordKind
from prefill_workers.modes import Text
from prefill_workers.protocol import LinkResult
from prefill_workers.scheduler.loop_stats import drain

pytestmark = pytest.mark.engine


def test_what_could_be_learnt_is_not_given_up_for_blocks_that_decode_engines_have_still_to_read(
    make_rig: Callable[..., Rig],
):
    rig = make_rig(patience_seconds=30.0)
    linked = rig.loop.submit(rig.plan(MIXED[2], "auto", text=Text.FREE)).result(30)
    learnt = 3  # two chunks and what the second takes from the first; the answer is given before
    wait_for(lambda: rig.loop.stats().harvest == learnt)
    taken, waiting = fill(rig), rig.loop.submit(rig.plan(MIXED[0], "off"))
    time.sleep(0.2)
    assert not waiting.done()
    assert rig.loop.stats().harvest == learnt, "giving it up would free nothing"
    rig.loop.abandon(linked.lease)
    rig.loop.abandon(waiting.result(30).lease)
    assert rig.loop.stats().harvest < learnt, "now it did"
    for lease in taken:
        rig.loop.abandon(lease)
    drain(rig.loop)
    wait_for(lambda: all_free(rig))


def test_an_answer_is_given_before_the_loop_learns_from_it_and_whatever_that_comes_to(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig()
    futures: list[Future[LinkResult]] = []
    done: list[list[bool]] = []

    def broken(*_: Any) -> None:
        done.append([future.done() for future in futures])
        raise ValueError("injected")

    plans = [rig.plan(["?"], "off"), rig.plan(["!"], "off")]
    with monkeypatch.context() as patched:
        patched.setattr(rig.loop._background, "add", broken)
        with rig.loop._wake:
            futures += [rig.loop.submit(plan) for plan in plans]
        for future in futures:
            rig.loop.abandon(future.result(30).lease)
        wait_for(lambda: all_free(rig))
    assert all(seen[i] for i, seen in enumerate(done))
    assert rig.loop.stats().harvest_failures == 2
    assert rig.link(MIXED[1]).points == ["encoded"]


def test_a_link_that_is_cancelled_when_it_has_been_computed_has_taught_what_it_can(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
):
    rig = make_rig()
    plan, forward, futures = rig.plan(MIXED[1]), rig.engine.forward, list[Future[LinkResult]]()

    def cancelling(*work: Any) -> Any:
        computed = forward(*work)
        futures[0].cancel()
        return computed

    monkeypatch.setattr(rig.engine, "forward", cancelling)
    with rig.loop._wake:
        futures.append(rig.loop.submit(plan))
    wait_for(lambda: rig.loop.stats().forwards == 1)
    drain(rig.loop)
    wait_for(lambda: all_free(rig))
    assert rig.library.has("canonical", plan.chunks[0].keys.canonical, "local")


def test_background_work_gives_way_to_hand_offs_but_not_for_ever(make_rig: Callable[..., Rig]):
    rig = make_rig(patience_seconds=3.0)
    result = rig.loop.submit(rig.plan(MIXED[2], "auto")).result(30)
    time.sleep(0.2)
    assert rig.loop.stats().harvest > 0, "the lease is not read: nothing may be harvested yet"
    assert drain(rig.loop, seconds=20).harvest == 0, "after a while it goes on beside the lease"
    rig.loop.abandon(result.lease)
    wait_for(lambda: all_free(rig))


def test_while_requests_are_on_their_way_only_what_was_asked_for_before_is_kept(make_rig: Callable[..., Rig]):
    rig = make_rig(patience_seconds=0.1)
    over = threading.Event()

    def announce() -> None:
        while not over.wait(0.01):
            rig.loop.expect()

    announcing = threading.Thread(target=announce)
    announcing.start()
    try:
        first, second = (rig.plan(MIXED[2], "auto") for _ in range(2))
        keys = [chunk.keys.canonical for chunk in first.chunks]
        rig.loop.submit(first).result(30)
        time.sleep(0.5)
        assert not any(rig.library.has("canonical", key, "local") for key in keys), "nobody has asked for these before"
        rig.loop.submit(second).result(30)
        wait_for(lambda: all(rig.library.has("canonical", key, "local") for key in keys))
    finally:
        over.set()
        announcing.join()


def test_where_images_never_come_again_none_is_kept_before_it_has_been_quiet_for_long(make_rig: Callable[..., Rig]):
    rig = make_rig(patience_seconds=0.2)
    for page in range(10):
        rig.link([page, "?"])
    plan = rig.plan([11, "?"])
    key = plan.chunks[0].keys.canonical
    rig.loop.abandon(rig.loop.submit(plan).result(30).lease)
    time.sleep(0.3)
    assert not rig.library.has("canonical", key, "local")
    assert rig.loop.stats().harvest == 1
    wait_for(lambda: rig.library.has("canonical", key, "local"))
    drain(rig.loop)

    plan = rig.plan([12, "?"])
    rig.loop.abandon(rig.loop.submit(plan).result(30).lease)
    drain(rig.loop)  # nobody who asks for what was learnt waits for a quiet time
    assert rig.library.has("canonical", plan.chunks[0].keys.canonical, "local")


def test_a_link_that_began_before_a_deletion_teaches_nothing_of_it_and_a_later_one_does(make_rig: Callable[..., Rig]):
    """However long after it is harvested: the library remembers deletions for a while only, here not at all."""
    rig = make_rig()
    plan = rig.plan([1, 4, "?"])
    rig.linker.forgets.start(plan.request.chunks[0].content, "local")
    rig.finish(plan, rig.loop.submit(plan).result(60))

    def stored(kind: RecordKind) -> list[bool]:
        keys = [rig.linker.keys(plan.request)[i] for i in range(2)]
        named = [key.canonical if kind == "canonical" else key.embedding or "" for key in keys]
        return [rig.library.has(kind, name, "local") for name in named]

    assert stored("canonical") == stored("embedding") == [False, False]
    rig.link([1, 4, "?"])
    assert stored("canonical") == stored("embedding") == [True, True]


def test_what_cannot_be_kept_costs_a_patch_not_a_request(make_rig: Callable[..., Rig], monkeypatch):
    rig = make_rig()
    put = rig.library.put

    def broken(record: Record) -> None:
        if isinstance(record, CanonicalRecord):
            raise OSError("injected: disk full")
        put(record)

    monkeypatch.setattr(rig.library, "put", broken)
    assert rig.link(MIXED[1]).points == ["encoded"]
    assert rig.loop.stats().harvest_failures > 0
    assert rig.link(MIXED[1]).points == ["recomputed"]
    wait_for(lambda: all_free(rig))
