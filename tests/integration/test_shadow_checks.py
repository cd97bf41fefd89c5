"""Online fidelity on a real engine: honest patches agree with exact, corrupted ones are noticed and switched off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rig import Page, Rig
from test_loop import all_free, wait_for
from torch import Tensor

from kvstore.library import Library
from kvstore.operator.basis import SharedBasis, pool_basis
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import PatchRecord
from kvstore.settings import FactorType, LibrarySettings
from prefill_workers.background import shadow_check as recheck
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.fidelity.monitor import PointStatus
from prefill_workers.modes import OperatingPoint
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.settings import FidelitySettings

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " and then say what follows."]
ALL = FidelitySettings(share=1.0, window=4, minimum=2, bounds={OperatingPoint.PATCHED: 0.05})
NEVER_OFF = ALL.model_copy(update={"bounds": {}})
FULL = 128  # features of the tiny model's keys, and of its values


def status(rig: Rig, point: OperatingPoint = OperatingPoint.PATCHED) -> PointStatus:
    return next(status for status in rig.fidelity.status() if status.point is point)


def turned(directions: Tensor) -> Tensor:
    """Right factors, their features in dimension 1, that point elsewhere: permuted, negated, and longer."""
    return -4.0 * directions.flip(1)


def stored_patches(rig: Rig) -> list[PatchRecord]:
    found = [rig.library.get_patch(chunk.keys.own_patch, "local") for chunk in rig.plan(PAGES).chunks]
    assert None not in found
    return found


def corrupt(rig: Rig) -> list[PatchRecord]:
    """Turn the basis of the pages' stored patches, with sound checksums; returns the honest records."""
    honest = stored_patches(rig)
    for record in honest:
        wrong = tuple(replace(part, right=turned(part.right)) for part in record.patch.segments)
        rig.library.put(replace(record, patch=replace(record.patch, segments=wrong)))
    rig.settle()
    return honest


def test_honest_patches_of_full_rank_agree_with_exact(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=ALL)
    assert rig.link(PAGES).points == ["encoded", "encoded"]
    assert status(rig).checks == 0, "nothing was reused"
    for _ in range(3):
        assert rig.link(PAGES).points == ["patched", "patched"]
    now = status(rig)
    assert (now.checks, now.agreements, now.allowed, now.skipped) == (3, 3, True, {})
    assert now.rolling_kl < 1e-9
    wait_for(lambda: all_free(rig))


def test_a_corrupted_patch_basis_is_switched_off_until_an_operator_allows_it(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
):
    rig = make_rig(fidelity=ALL)
    rig.link(PAGES)
    exact = rig.link(PAGES, "exact")
    honest = corrupt(rig)
    with caplog.at_level(logging.WARNING, logger="prefill_workers.fidelity.monitor"):
        wrong = [rig.link(PAGES) for _ in range(2)]
    assert [linked.points for linked in wrong] == [["patched", "patched"]] * 2
    now = status(rig)
    assert now.rolling_kl > 10 * now.bound
    assert not now.allowed
    (line,) = [record.getMessage() for record in caplog.records if record.name == "prefill_workers.fidelity.monitor"]
    assert "operating point patched is switched off" in line
    assert "orbitserve fidelity allow patched" in line

    after = rig.link(PAGES)
    assert after.points == ["recomputed", "recomputed"]
    reasons = {chunk.reason for chunk in after.result.chunks}
    assert reasons == {"operating point patched is switched off: computed in context"}
    assert (after.logprobs - exact.logprobs).abs().max() < 1e-4
    assert rig.link(["Others: ", 3, 1, "?"]).points == ["encoded", "recomputed"], "no request uses the point"
    assert status(rig).checks == 2

    for record in honest:
        rig.library.put(record)
    assert rig.fidelity.allow(OperatingPoint.PATCHED)
    assert rig.link(PAGES).points == ["patched", "patched"]
    now = status(rig)
    assert (now.checks, now.rolling_checks, now.allowed) == (3, 1, True)
    assert now.rolling_kl < 1e-9
    wait_for(lambda: all_free(rig))


def test_a_corrupted_shared_basis_is_switched_off(make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path):
    teacher = make_rig()
    teacher.link(PAGES)
    basis = pool_basis([record.patch for record in stored_patches(teacher)], FULL)
    wrong = SharedBasis(tuple(turned(part) for part in basis.directions), basis.first_layer)
    vars(wrong)["version"] = basis.version  # memory that went bad: it still says that it is the one
    rigs = []
    for held in (basis, wrong):
        library = Library(LibrarySettings(directory=tmp_path / "shared"), fp32.fingerprint)
        form = PatchForm(None, basis=held, factors=FactorType.model)
        rigs.append(make_rig(library=library, form=form, fidelity=ALL))
    good, bad = rigs
    good.link(PAGES)
    for _ in range(2):
        assert good.link(PAGES).points == bad.link(PAGES).points == ["patched", "patched"]
    assert status(good).allowed
    assert status(good).rolling_kl < 1e-9
    assert not status(bad).allowed
    assert bad.link(PAGES).points == ["recomputed", "recomputed"]


def test_full_reuse_is_measured_and_never_switched_off(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=ALL)
    rig.link(PAGES)
    for _ in range(3):
        assert rig.link(PAGES, "full-reuse").points == ["relocated", "relocated"]
    now = status(rig, OperatingPoint.RELOCATED)
    assert (now.checks, now.allowed, now.bound) == (3, True, None)
    assert now.rolling_kl > 1e-6


def test_what_is_measured_is_what_the_request_was_served(make_rig: Callable[..., Rig]):
    """Only the last token is compared: the check's KL is that of the two requests' own logits."""
    rig = make_rig(fidelity=NEVER_OFF.model_copy(update={"tokens": 1}))
    rig.link(PAGES)
    blind, exact = rig.link(PAGES, "full-reuse"), rig.link(PAGES, "exact")
    p, q = exact.logprobs.double(), blind.logprobs.double()
    now = status(rig, OperatingPoint.RELOCATED)
    assert now.kl_sum == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
    assert now.agreements == int(p.argmax() == q.argmax())


def test_a_check_leaves_the_served_kv_as_it_was(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=NEVER_OFF)
    rig.link(PAGES)
    plan = rig.plan(PAGES, "full-reuse")
    result = rig.loop.submit(plan).result(60)
    rig.settle()
    served = rig.engine.read_kv(plan.sequence.blocks, 0, len(plan.sequence))
    assert status(rig, OperatingPoint.RELOCATED).checks == 1
    unchecked = make_rig(library=rig.library)
    assert served.equal(unchecked.link(PAGES, "full-reuse").kv)
    rig.loop.abandon(result.lease)
    wait_for(lambda: all_free(rig))


def test_wherever_the_compared_tokens_lie_in_their_blocks_nothing_but_the_patch_counts(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=NEVER_OFF)
    rig.link(PAGES)
    lengths = set()
    for words in range(0, 36, 3):
        linked = rig.link([*PAGES, " and" * words])
        lengths.add(len(linked.plan.sequence) % rig.engine.block_size)
    assert lengths & set(range(1, 8)), "some compared tokens must begin in one block and end in the next"
    now = status(rig)
    assert (now.checks, now.agreements, now.kl_counts[0]) == (12, 12, 12)


def test_documents_and_a_prompt_that_ends_in_a_chunk_are_checked_a_piece_at_a_time(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=ALL, cost_model=ForwardCostModel(fixed=12.5, seconds_per_token=1.0))  # pieces of 50 tokens
    for parts in ([Page(1), "then ", Page(2)], [2, " beside ", Page(3)]):
        rig.link(parts)
        assert set(rig.link(parts).points) == {"patched"}
    now = status(rig)
    assert (now.checks, now.agreements) == (2, 2)
    assert now.rolling_kl < 1e-9
    wait_for(lambda: all_free(rig))


def test_checks_wait_for_links_and_links_never_for_checks(make_rig: Callable[..., Rig], monkeypatch):
    rig = make_rig(fidelity=NEVER_OFF)
    rig.link(PAGES)
    stepped: list[int] = []
    step = recheck.ShadowChecks.step

    def watched(self: recheck.ShadowChecks) -> None:
        stepped.append(rig.loop.stats().waiting + rig.loop.stats().running)
        step(self)

    monkeypatch.setattr(recheck.ShadowChecks, "step", watched)
    plans = [rig.plan(PAGES) for _ in range(6)]
    with rig.loop._wake:
        futures = [rig.loop.submit(plan) for plan in plans]
    leases = [future.result(60).lease for future in futures]
    rig.settle()
    assert stepped.count(0) == len(stepped) > 0
    assert status(rig).checks == 6
    for lease in leases:
        rig.loop.abandon(lease)
    wait_for(lambda: all_free(rig))


def test_blocks_that_a_link_needs_are_not_held_for_a_check(make_rig: Callable[..., Rig]):
    taught = make_rig()
    taught.link(PAGES)
    rig = make_rig(library=taught.library, fidelity=NEVER_OFF, learns=False, patience_seconds=60.0)
    first, unread = (rig.loop.submit(rig.plan(PAGES)).result(30).lease for _ in range(2))
    rig.loop.abandon(first)
    pool = rig.loop._pool
    wait_for(lambda: not rig.loop._abandoned)
    taken = []
    while pool.free > 1:
        taken.append(pool.allocate(pool.block_size * min(pool.free - 1, 64)).id)
    assert rig.loop.stats().harvest == 2, "both checks give way to the hand-off, the first holds its blocks alone"
    linked = rig.loop.submit(rig.plan(PAGES)).result(30)
    assert status(rig).skipped == {"blocks": 1}
    for lease in (*taken, unread, linked.lease):
        rig.loop.abandon(lease)
    rig.settle()
    assert status(rig).checks == 2
    wait_for(lambda: all_free(rig))


def test_a_check_ends_with_its_lease(make_rig: Callable[..., Rig]):
    taught = make_rig()
    taught.link(PAGES)
    rig = make_rig(library=taught.library, fidelity=NEVER_OFF, lease_seconds=0.3, patience_seconds=30.0)
    rig.loop.submit(rig.plan(PAGES)).result(30)
    wait_for(lambda: all_free(rig))
    assert status(rig).skipped == {"blocks": 1}
    assert rig.loop.stats().harvest == 0


def test_a_check_without_embeddings_is_skipped_and_counted(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=ALL)
    rig.link(PAGES)
    rig.library.delete("embedding", rig.linker.keys(rig.plan(PAGES).request)[0].embedding, "local")
    assert rig.link(PAGES).points == ["patched", "patched"]
    assert status(rig).skipped == {"embeddings": 1}
    wait_for(lambda: all_free(rig))


@pytest.mark.parametrize("error", [RuntimeError("injected"), ValueError("a shape that a kernel does not take")])
def test_a_check_that_fails_costs_nothing_but_itself(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, error: Exception
):
    rig = make_rig(fidelity=ALL)
    rig.link(PAGES)
    plan = rig.plan(PAGES)

    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rig.engine, "logits", broken)
        lease = rig.loop.submit(plan).result(30).lease
        rig.settle()
    rig.loop.abandon(lease)
    assert status(rig).skipped == {"failed": 1}
    wait_for(lambda: all_free(rig))
    assert rig.link(PAGES).points == ["patched", "patched"]
    assert status(rig).checks == 1


def test_without_a_share_nothing_is_checked(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recheck.ShadowChecks, "step", pytest.fail)
    rig = make_rig()
    rig.link(PAGES)
    rig.link(PAGES)
    assert status(rig).checks == 0


def test_checks_beyond_the_queue_are_dropped(make_rig: Callable[..., Rig]):
    rig = make_rig(fidelity=NEVER_OFF)
    rig.link(PAGES)
    plans = [rig.plan(PAGES) for _ in range(10)]
    with rig.loop._wake:
        futures = [rig.loop.submit(plan) for plan in plans]
    for future in futures:
        rig.loop.abandon(future.result(60).lease)
    rig.settle()
    now = status(rig)
    assert (now.checks, now.skipped) == (recheck._MAX_CHECKS, {"queue": 10 - recheck._MAX_CHECKS})
    wait_for(lambda: all_free(rig))
