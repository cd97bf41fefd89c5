"""What a real engine compiles ahead of requests: pairs that serve new sets, the most valuable first, within budgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from clock import Clock
from rig import Page, Rig, apart

from kvstore.catalog.catalogue import PatchCatalogue
from kvstore.library import Library
from kvstore.operator.patch import Patch
from kvstore.settings import LibrarySettings
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.patches.orbit_patches import OrbitForming
from prefill_workers.patches.scratch import Pieces
from prefill_workers.patches.set_patches import SetPatches
from prefill_workers.protocol import LinkRequest
from prefill_workers.scheduler.cost_model import ForwardCostModel
from serving.placement.orderer import PatchAwareOrderer

pytestmark = pytest.mark.engine


def pair_key(rig: Rig, first: int, second: int) -> str:
    """Key of the patch of the second page behind the first alone."""
    segments = rig.render([first, second, "?"])
    return rig.linker.keys(LinkRequest("test", segments.token_ids, segments.chunks, Mode.AUTO))[1].set_patch


def has_pair(rig: Rig, first: int, second: int) -> bool:
    """Whether that patch is stored."""
    return rig.library.has("patch", pair_key(rig, first, second), "local")


def pair_patch(rig: Rig, first: int, second: int) -> Patch:
    """That patch, which is stored."""
    record = rig.library.get_patch(pair_key(rig, first, second), "local")
    assert record is not None
    return record.patch


@pytest.mark.parametrize(
    "limits",
    [{"orbit_chunks": 2}, {"orbit_chunks": 0, "pair_forwards": 12, "compose_up_to": 3}],
    ids=["orders", "pairs"],
)
def test_patches_of_sets_are_formed_behind_what_prompts_begin_with(
    make_rig: Callable[..., Rig], limits: dict[str, int]
):
    rig = make_rig(**limits)  # patches of full rank
    head = rig.plan([1, 2, "What?"]).request.chunks[0].start
    assert head > 0
    rig.link([1, 2, "What?"], head=head)
    linked, exact = (rig.link([2, 1, "Well?"], mode, head=head) for mode in ("auto", "exact"))
    assert linked.points == ["patched", "patched"]
    assert apart(linked.kv, exact.kv) < 1e-4


def test_pairs_that_were_compiled_when_idle_serve_a_set_never_seen_before(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0, pair_forwards=12, compose_up_to=3)
    for served in ([1, 2, 3], [1, 4, 3], [2, 4]):
        rig.link([*served, "What?"])
    compiled = rig.loop.stats().compiled
    assert compiled.forwards == {"pairs": 6 + 4 + 2}, "those of 1 and 3 were stored when they came again"
    assert compiled.seconds > 0
    assert compiled.waiting == 0
    leading, served = 4, 3  # the first page of later sets is linked by its patch behind nothing: none is formed behind
    assert rig.compiler.formed == served + 6 + 4 + 2 + leading, "each patch was formed once"

    partial = rig.loop.stats().forwards_partial
    linked = rig.link([4, "or", 1, "and", 2, "?"])
    assert linked.points == ["patched", "patched", "composed"]
    assert linked.result.chunks[2].reason == "weighted sum of the stored pair patches behind 2 antecedents"
    assert linked.result.tokens_reused == sum(chunk.tokens for chunk in linked.result.chunks), "no chunk was computed"
    assert rig.loop.stats().forwards_partial == partial + 1
    exact, blind = (rig.link([4, "or", 1, "and", 2, "?"], mode).chunk_kv(2) for mode in ("exact", "full-reuse"))
    assert (linked.chunk_kv(2) - exact).norm() < (blind - exact).norm()


def test_a_patch_behind_nothing_that_is_gone_is_compiled_again_although_all_pairs_are_there(
    make_rig: Callable[..., Rig],
):
    rig = make_rig(orbit_chunks=0, pair_forwards=12, compose_up_to=3)
    rig.link([1, 2, 4, "What?"])
    new = [4, "or", 1, "and", 2, "?"]
    segments = rig.render(new)
    base, *pairs = rig.linker.keys(LinkRequest("test", segments.token_ids, segments.chunks, Mode.AUTO))[2].parts
    assert rig.library.delete("patch", base, "local")
    rig.harvester._sent.clear()  # long ago
    assert all(rig.library.has("patch", pair, "local") for pair in pairs)
    assert rig.link(new).points == ["patched", "patched", "recomputed"]
    assert rig.library.has("patch", base, "local")
    assert rig.link([1, "or", 4, "and", 2, "?"]).points == ["patched", "patched", "composed"]


def test_no_pairs_are_compiled_while_sums_are_switched_off(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=2, pair_forwards=12, compose_up_to=3)
    rig.fidelity.disable(OperatingPoint.COMPOSED, "a test")
    rig.link([1, 2, 3, "What?"])
    assert rig.loop.stats().compiled.forwards == {}
    rig.link([4, 1, "What?"])
    assert rig.loop.stats().compiled.forwards.keys() == {"orders"}
    rig.fidelity.allow(OperatingPoint.COMPOSED)
    rig.link([2, 1, 3, "What?"])
    assert rig.loop.stats().compiled.forwards["pairs"] > 0


@pytest.mark.parametrize("piece", [4096, 48])
def test_pairs_behind_the_same_chunk_are_what_each_is_by_itself(make_rig: Callable[..., Rig], piece: int):
    """The first chunk is computed once for all of them, and what stood behind it before leaves no trace."""
    together = make_rig(
        orbit_chunks=0, pair_forwards=12, cost_model=ForwardCostModel(fixed=piece / 4, seconds_per_token=1.0)
    )
    together.link([1, 2, 3, "What?"])
    assert together.loop.stats().compiled.forwards == {"pairs": 6}
    for pair in combinations([1, 2, 3], 2):
        alone = make_rig(orbit_chunks=2)
        alone.link([*pair, "What?"])
        for first, second in permutations(pair):
            found, expected = (pair_patch(rig, first, second).dense() for rig in (together, alone))
            assert apart(found, expected) < 1e-5


def test_popular_chunks_that_never_met_are_compiled_behind_one_another(make_rig: Callable[..., Rig]):
    """Sets of three from pages that were seen in other sets only need no chunk to be computed."""
    rig = make_rig(orbit_chunks=2, pair_forwards=12, compose_up_to=3)
    for served in ([1, 2], [3, 4], [2, 1, "again"], [1, 2, 5], [3, 4, 5]):
        rig.link([*served, "?"])
    assert all(has_pair(rig, *pair) for a in (1, 2) for b in (3, 4) for pair in ((a, b), (b, a)))
    linked = rig.link([3, 1, 4, "?"])
    assert linked.points == ["patched", "patched", "composed"]
    assert linked.result.tokens_reused == sum(chunk.tokens for chunk in linked.result.chunks)


@pytest.mark.parametrize("way", ["forgotten", "deleted"])
def test_nothing_is_conditioned_on_a_chunk_that_was_deleted(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path, way: str
):
    """Neither here, where its deletion is told of, nor where only its records are gone."""
    library = Library(LibrarySettings(directory=tmp_path / "library", deletion_grace_s=0), fp32.fingerprint)
    rig = make_rig(library=library, orbit_chunks=2, pair_forwards=12, compose_up_to=3)
    for served in ([1, 2], [2, 1, "again"]):
        content = rig.link([*served, "?"]).plan.chunks[1].span.content  # at last page 1
    if way == "forgotten":
        rig.linker.forgets.start(content, "local")
    else:
        rig.library.delete_content(content, "local")
    for served in ([3, 4], [4, 3, "again"], [3, 4, 5]):
        rig.link([*served, "?"])
    assert has_pair(rig, 2, 3)
    assert not has_pair(rig, 1, 3)
    assert not has_pair(rig, 3, 1)


def test_a_deletion_ends_a_step_that_has_begun(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch):
    rig = make_rig(
        orbit_chunks=0, pair_forwards=12, cost_model=ForwardCostModel(fixed=4.0, seconds_per_token=1.0)
    )  # pieces of 16 tokens
    step, begun = SetPatches.pairs_step, []

    def meanwhile(sets: SetPatches, forming: OrbitForming, *more: Any) -> Pieces[tuple[int, int]]:
        pieces = step(sets, forming, *more)
        next(pieces)
        begun.append(forming.chunks[0].content)
        rig.linker.forgets.start(begun[0], "local")
        yield
        return (yield from pieces)

    monkeypatch.setattr(SetPatches, "pairs_step", meanwhile)
    rig.link([1, 2, "?"])
    assert len(begun) == 1
    assert rig.loop.stats().compiled.forwards == {}
    assert not has_pair(rig, 1, 2)


@pytest.mark.parametrize(("mode", "orders"), [("full-reuse", 0), ("mpic-8", 0), ("cacheblend-15", 0), ("exact", 1)])
def test_nothing_is_compiled_for_requests_whose_modes_use_no_patches(
    make_rig: Callable[..., Rig], mode: str, orders: int
):
    rig = make_rig(orbit_chunks=2)
    rig.link([1, 2, "?"], mode)
    compiled = rig.loop.stats().compiled
    assert (compiled.waiting, bool(compiled.forwards)) == (0, bool(orders))


def test_only_as_many_pairs_are_compiled_at_a_time_as_are_allowed(make_rig: Callable[..., Rig]):
    """What is stored does not count: the rest follows when the set is missed again."""
    rig = make_rig(orbit_chunks=0, pair_forwards=3)
    for compiled in (3, 6, 6):
        rig.link([Page(1), Page(2), Page(3), "What?"], "exact")
        assert rig.loop.stats().compiled.forwards == {"pairs": compiled}


def test_under_a_tight_budget_the_most_valuable_pair_is_compiled_and_the_others_wait(make_rig: Callable[..., Rig]):
    clock, share = Clock(), 1e-5  # no more is saved up than 1.2 ms: enough for one forward, never for two
    rig = make_rig(orbit_chunks=0, pair_forwards=12, share=share, clock=clock)
    rig.link([1, 2, "?"])
    assert rig.loop.stats().compiled.forwards == {"pairs": 1}, "and with it the budget is spent"
    rig.link([4, 5, "?"])
    rig.link([1, 3, "?"])
    rig.link([1, 3, "?"], "exact")
    stats = rig.loop.stats()
    assert (stats.compiled.forwards, stats.compiled.waiting, stats.harvest) == ({"pairs": 1}, 3, 0)

    clock.now = stats.compiled.seconds / share  # the debt is paid, however long the first forward took
    deadline = time.monotonic() + 30
    while rig.loop.stats().compiled.forwards["pairs"] == 1:
        assert time.monotonic() < deadline, "compiling did not go on"
        time.sleep(0.01)
    rig.settle()
    assert rig.loop.stats().compiled.forwards == {"pairs": 2}
    assert has_pair(rig, 1, 3) or has_pair(rig, 3, 1)
    assert not has_pair(rig, 4, 5)
    assert not has_pair(rig, 5, 4)


def test_a_full_library_is_not_filled_with_what_is_worth_less_than_what_it_holds(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path
):
    library = Library(LibrarySettings(directory=tmp_path / "small", disk_bytes=8 << 20), fp32.fingerprint)
    rig = make_rig(library=library, orbit_chunks=0, pair_forwards=12)
    page = 1
    while not library.price("local"):
        rig.link([page, page + 1, "?"])
        page += 2
        assert page < 100, "the library was never full"
    before = rig.loop.stats().compiled
    rig.link([page, page + 1, "?"])
    after = rig.loop.stats().compiled
    assert after.forwards == before.forwards
    assert after.given_up["bytes"] == before.given_up.get("bytes", 0) + 1


def test_an_ingress_that_starts_later_finds_on_disk_what_this_worker_compiled(make_rig: Callable[..., Rig]):
    """Entries from records' headers name what linkers find: the same contents, tenant and prefix as a request's."""
    rig = make_rig()
    prefix = (5, 6, 7)
    rig.link([1, 2, 3, "What?"], prefix=prefix)
    assert rig.library.disk is not None
    orderer = PatchAwareOrderer()
    orderer.formed(PatchCatalogue(rig.library.disk, rig.engine.fingerprint, rig.linker.form).look())
    assert len(orderer.index) == 3 + 12
    contents = [span.content for span in rig.render([3, 1, 2, "?"]).chunks]
    orderer.popularity.observe("local", contents)
    problem = orderer.problem(contents, [0, 0, 0], "local", prefix)
    assert problem.stored.sets == {mask: 0b111 & ~mask for mask in range(0b111)}
