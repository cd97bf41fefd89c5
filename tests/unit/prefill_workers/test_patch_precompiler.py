"""How the queue of what is compiled ahead is worked off, whatever its forwards compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from chunk_keys import chunk_keys

from kvstore.forget import CacheGroup
from prefill_workers.background.patch_precompiler import PatchPrecompiler
from prefill_workers.link.plan import LinkPlan
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming
from prefill_workers.patches.scratch import Pieces, Scratch
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.protocol import SessionRef
from prefill_workers.settings import CompileLimits


class TickingClock:
    """Later each time that it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


class Forwards:
    """Patches behind sets whose forwards over pairs take no engine."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.price = 0.0  # of a byte in the library
        self.library = SimpleNamespace(price=lambda tenant: self.price)
        self.engine = SimpleNamespace(layout=None, dtype=None)
        self.form = SimpleNamespace(footprint=lambda *_: SimpleNamespace(own=1))

    def unready(self, plan: Any) -> OrbitForming:
        ids = torch.arange(10)
        chunks = tuple(OrbitChunk(c.keys.canonical, c.span.content, ids, ids, None, 0) for c in plan.chunks)
        return OrbitForming((), chunks, plan.request.tenant, ())

    def pairs_step(
        self, forming: OrbitForming, batch: Sequence[int], limit: int, scratch: Scratch
    ) -> Pieces[tuple[int, int]]:
        first, *others = batch
        for second in others[:limit]:
            yield
            self.ran.append(forming.chunks[first].content + forming.chunks[second].content)
        return len(others[:limit]), 10 * (1 + len(others))

    def prefix_subset_step(self, forming: OrbitForming, step: Sequence[int], scratch: Scratch) -> Pieces[bool]:
        yield
        self.ran.append("subset")
        return True


def served(contents: str, keyed_by: tuple[int, ...] = (), session: SessionRef | None = None) -> LinkPlan:
    """A plan whose last chunk's patches are keyed by some text, too."""

    class Span(SimpleNamespace):
        def __len__(self) -> int:
            return 10

    chunks = [SimpleNamespace(keys=chunk_keys(f"key {c}"), span=Span(content=c)) for c in contents]
    chunks[-1].keys = replace(chunks[-1].keys, context=keyed_by)
    return cast(
        LinkPlan, SimpleNamespace(request=SimpleNamespace(tenant="acme", prefix=(), session=session), chunks=chunks)
    )


@pytest.fixture
def forwards() -> Forwards:
    return Forwards()


class Sums:
    allowed = True

    def __call__(self) -> bool:
        return self.allowed


@pytest.fixture
def sums() -> Sums:
    return Sums()


class Crowd:
    there = False

    def __call__(self) -> bool:
        return self.there


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


@pytest.fixture
def ahead(forwards: Forwards, sums: Sums, crowd: Crowd) -> PatchPrecompiler:
    limits = CompileLimits(orbit_chunks=0, subset_forwards=0, pair_forwards=12)
    scratch = Scratch(range(8), 16, lambda left: 64)
    return PatchPrecompiler(cast(SetPatches, forwards), scratch, limits, CacheGroup(), TickingClock(), sums, crowd)


def test_jobs_of_the_same_worth_do_not_swap_for_ever(ahead: PatchPrecompiler, forwards: Forwards):
    """What requests are worth decays while jobs are compared: of two equal ones that which is looked at first wins."""
    for contents in ("abx", "aby", "abz"):
        ahead.offer(served(contents), missed=True)
    for _ in range(1000):
        if not ahead:
            break
        ahead.step()
    assert not ahead
    assert {"ab", "ba", "ax", "xa", "by", "yb", "az", "zb"} <= set(forwards.ran)


def test_what_text_keys_is_not_compiled_in_other_orders_which_are_without_it(ahead: PatchPrecompiler):
    ahead.offer(served("abx", keyed_by=(1, 2)), missed=True)
    assert not ahead
    ahead.offer(served("abx"), missed=True)
    assert ahead


SESSION = SessionRef("camera")


@pytest.mark.parametrize(
    ("contents", "session", "has_pairs", "has_subsets"),
    [("abxy", None, True, True), ("abxy", SESSION, True, False), ("abxyz", SESSION, False, False)],
)
def test_of_a_sessions_window_pairs_alone_are_compiled_while_so_many_are_summed(
    forwards: Forwards, contents: str, session: SessionRef | None, has_pairs: bool, has_subsets: bool
):
    limits = CompileLimits(orbit_chunks=0, subset_forwards=4, pair_forwards=12, compose_up_to=3)
    scratch = Scratch(range(8), 16, lambda left: 64)
    ahead = PatchPrecompiler(cast(SetPatches, forwards), scratch, limits, CacheGroup(), TickingClock())
    for _ in range(2):
        ahead.offer(served(contents, session=session), missed=True)
    while ahead:
        ahead.step()
    assert {"ab", "ba", "xy", "yx"} <= set(forwards.ran) if has_pairs else "ab" not in forwards.ran
    assert ("subset" in forwards.ran) == has_subsets


def test_what_waits_keeps_no_embeddings(ahead: PatchPrecompiler, forwards: Forwards):
    plan = served("abx")
    chunks = tuple(replace(chunk, embeddings=torch.ones(10, 4)) for chunk in forwards.unready(plan).chunks)
    forwards.unready = lambda plan: OrbitForming((), chunks, "acme", ())  # type: ignore[method-assign]
    ahead.offer(plan, missed=True)
    jobs = list(ahead._queue._waiting.values())
    assert jobs
    assert all(chunk.embeddings is None for job in jobs for chunk in job.item.chunks)


def test_a_job_gives_way_to_a_better_one_between_its_forwards(ahead: PatchPrecompiler, forwards: Forwards):
    ahead.offer(served("abx"), missed=True)
    while not forwards.ran:
        ahead.step()
    for _ in range(20):
        ahead.offer(served("cd"), missed=True)
    while ahead:
        ahead.step()
    assert forwards.ran[2:4] in (["cd", "dc"], ["dc", "cd"]), "after the step that had begun"
    assert {"ab", "ba", "ax", "xa", "bx", "xb"} <= set(forwards.ran)


def test_a_job_waits_for_what_is_still_to_be_kept_and_others_do_not_wait_for_it(
    ahead: PatchPrecompiler, forwards: Forwards
):
    for contents in ("ab", "ab", "cd"):
        ahead.offer(served(contents), missed=True)
    awaited = {("acme", "b"), ("another", "c")}
    while ahead.may_go_on(awaited):
        ahead.step(awaited)
    assert set(forwards.ran) == {"cd", "dc"}
    while ahead.may_go_on(()):
        ahead.step()
    assert set(forwards.ran) == {"cd", "dc", "ab", "ba"}


def test_no_step_begins_while_the_compiler_has_enough_to_do(ahead: PatchPrecompiler, forwards: Forwards, crowd: Crowd):
    ahead.offer(served("abx"), missed=True)
    while not ahead.is_running:
        ahead.step()
    crowd.there = True
    while ahead.may_go_on(()):
        ahead.step()
    assert len(forwards.ran) == 2, "what has begun ends"
    assert len(ahead) == 1, "and the rest waits"
    crowd.there = False
    while ahead.may_go_on(()):
        ahead.step()
    assert {"ab", "ba", "ax", "xa", "bx", "xb"} <= set(forwards.ran)


def test_a_job_ends_where_the_library_holds_what_is_worth_more(ahead: PatchPrecompiler, forwards: Forwards):
    """It was worth its bytes when it was begun: what it is about to displace may be dearer by now."""
    ahead.offer(served("abxy"), missed=True)
    while not forwards.ran or ahead.is_running:
        ahead.step()
    ran, forwards.price = list(forwards.ran), 1e9
    while ahead:
        ahead.step()
    assert forwards.ran == ran
    assert ahead.stats().given_up["bytes"] == 1


def test_no_pair_is_worth_a_forward_while_sums_are_switched_off(
    ahead: PatchPrecompiler, forwards: Forwards, sums: Sums
):
    for contents in ("abx", "cdy"):
        ahead.offer(served(contents), missed=True)
    while not forwards.ran or ahead.is_running:
        ahead.step()
    sums.allowed, ran = False, list(forwards.ran)
    while ahead:
        ahead.step()
    assert forwards.ran == ran, "a step that has begun ends, no other begins"
    assert ahead.stats().given_up["sums"] > 1
    ahead.offer(served("efz"), missed=True)
    assert not ahead
    sums.allowed = True
    ahead.offer(served("ef"), missed=True)
    while ahead:
        ahead.step()
    assert set(forwards.ran[len(ran) :]) == {"ef", "fe"}
