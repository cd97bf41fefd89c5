"""Look-ups: what is known early, what is loaded, and what a tier that stalls or fails may cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import torch
from kvstore_support import FINGERPRINT, MakeLibrary, canonical, embedding_of, patch_of

from kvstore.library import Library
from kvstore.operator.device_kernel import Placement
from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.records.record import CanonicalRecord, PatchRecord
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.faults import FaultyTier, HeldTier
from kvstore.tiers.memory import MemoryTier
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.link.linker import Linker
from prefill_workers.link.lookups import Found, Lookup, Lookups
from prefill_workers.link.place_kv import write_chunks
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest
from prefill_workers.sequence import LinkSequence, Run

Over = Callable[..., Lookups]
Start = Callable[..., Lookup]

TENANT = "acme"
RECORD = canonical("page")
OWN, ORBIT = patch_of(RECORD, ["own"]), patch_of(RECORD, ["orbit"])
EMBEDDING = embedding_of(RECORD)
KEYS = ChunkKeys(RECORD.key, (), OWN.key, ORBIT.key, EMBEDDING.key, owner=TENANT, patch_owners=(TENANT,))


class KindTier(HeldTier):
    """Holds actions on some kinds of records only."""

    def __init__(self, inner: Tier, *kinds: str, action: str = "get") -> None:
        super().__init__(inner, action)
        self.kinds = kinds

    def before(self, action: str, key: str) -> None:
        if any(f"/{kind}/" in key for kind in self.kinds):
            super().before(action, key)
        else:
            self.calls.append((action, key))

    def read(self) -> list[str]:
        """Kinds of the records that were asked for, in order."""
        return [key.split("/")[2] for action, key in self.calls if action == "get"]


@pytest.fixture
def full() -> Iterator[MemoryTier]:
    """A tier with everything stored for one chunk, except its own patch."""
    tier = MemoryTier()
    with Library(LibrarySettings(directory=None), FINGERPRINT, [tier]) as library:
        for record in (RECORD, ORBIT, EMBEDDING):
            library.put(record)
    return tier


@pytest.fixture
def over(make_library: MakeLibrary) -> Over:
    """Look-ups in a library on the tiers given."""
    return lambda *tiers, **settings: Lookups(
        make_library(*tiers, **{"directory": None, "load_timeout_s": 10, **settings})
    )


@pytest.fixture
def start(over: Over) -> Start:
    """A look-up of one chunk on a tier."""
    return lambda tier, mode=Mode.AUTO, keys=KEYS: over(tier).start(keys, mode)


@pytest.mark.parametrize("held", ["canonical", "patch"])
def test_kv_is_known_to_come_before_it_is_loaded(full: MemoryTier, held: str, start: Start) -> None:
    tier = KindTier(full, held)
    lookup = start(tier)
    assert lookup.is_coming(5)
    assert not lookup.done()
    ended: list[bool] = []
    lookup.when_done(lambda: ended.append(True))
    tier.release.set()
    found = lookup.found()
    assert isinstance(found.canonical, CanonicalRecord)
    assert torch.equal(found.canonical.kv, RECORD.kv)
    assert found.patch is not None
    assert found.patch.key == ORBIT.key, "the list has no patch of its own, its set has"
    assert ended == [True]
    assert "embedding" not in tier.read()


def test_canonical_kv_is_not_moved_without_a_patch(full: MemoryTier, start: Start) -> None:
    tier = KindTier(full)
    lookup = start(tier, keys=replace(KEYS, set_patch="0" * 64))
    assert not lookup.is_coming(5)
    found = lookup.found()
    assert (found.canonical, found.patch) == (None, None)
    assert found.embeddings is not None
    assert tier.read() == ["embedding"]


def test_a_sum_takes_parts_that_have_seen_references_only_from_everybody(start: Start) -> None:
    """Behind a reference and a private chunk, of which the tenant's own patch knows."""
    tier = MemoryTier()
    record = replace(RECORD, tenant=DYNAMIC_TENANT)
    parts = [patch_of(record), patch_of(record, ["reference"]), replace(patch_of(record, ["private"]), tenant=TENANT)]
    keys = replace(
        KEYS, own_patch="0" * 64, set_patch="1" * 64, owner=DYNAMIC_TENANT, parts=tuple(part.key for part in parts)
    )
    with Library(LibrarySettings(directory=None), FINGERPRINT, [tier]) as library:
        for stored in (record, *parts):
            library.put(stored)
    assert len(start(tier, keys=keys).found().parts) == 3
    assert not start(tier, keys=replace(keys, owner=TENANT)).found().parts, "a chunk of the tenant's own"


@pytest.mark.parametrize("parts", [(), ("2" * 64, "3" * 64)])
def test_a_tier_is_asked_once_what_it_has_of_a_chunks_patches(
    full: MemoryTier, parts: tuple[str, ...], start: Start
) -> None:
    asked: list[set[str]] = []

    class Asked(KindTier):
        def stored(self, keys: Collection[str]) -> set[str]:
            asked.append({Path(key).stem for key in keys if "/patch/" in key})
            return super().stored(keys)

    keys = replace(KEYS, set_patch="1" * 64, parts=parts)
    assert not start(Asked(full), keys=keys).is_coming(5)
    assert asked == [{keys.own_patch, keys.set_patch, *parts}]


def test_a_farther_tier_is_not_asked_for_what_a_nearer_one_makes_needless(full: MemoryTier, over: Over) -> None:
    far = KindTier(MemoryTier())
    keys = replace(KEYS, parts=("2" * 64, "3" * 64))

    def asked(*near: PatchRecord) -> set[str]:
        far.calls.clear()
        tier = MemoryTier()
        with Library(LibrarySettings(directory=None), FINGERPRINT, [tier]) as library:
            for record in (RECORD, *near):
                library.put(record)
        assert over(tier, far).start(keys, Mode.AUTO).found().patch is not None
        return {Path(key).stem for action, key in far.calls if action == "contains" and "/patch/" in key}

    assert asked(OWN, ORBIT) == asked(OWN) == set()
    assert asked(ORBIT) == {OWN.key}, "its own patch would be better; parts would not"


def test_full_reuse_needs_no_patch(full: MemoryTier, start: Start) -> None:
    tier = KindTier(full, "canonical")
    lookup = start(tier, Mode.FULL_REUSE)
    assert lookup.is_coming(5)
    tier.release.set()
    assert lookup.found().canonical is not None
    assert not start(full, Mode.FULL_REUSE, replace(KEYS, canonical="0" * 64)).is_coming(5)


@pytest.mark.parametrize(("mode", "read"), [(Mode.EXACT, ["embedding"]), (Mode.OFF, [])])
def test_other_modes_look_for_no_kv(full: MemoryTier, mode: Mode, read: list[str], start: Start) -> None:
    tier = KindTier(full)
    lookup = start(tier, mode)
    assert not lookup.is_coming(5)
    assert lookup.found().canonical is None
    assert tier.read() == read


@pytest.mark.parametrize(("mode", "with_embeddings"), [("mpic-0", False), ("mpic-8", True), ("cacheblend-8", True)])
def test_modes_that_compute_some_tokens_bring_their_embeddings_along(
    full: MemoryTier, mode: str, with_embeddings: bool, start: Start
) -> None:
    tier = KindTier(full, "canonical")
    lookup = start(tier, Mode.parse(mode))
    assert lookup.is_coming(5)
    tier.release.set()
    found = lookup.found()
    assert (found.canonical is not None, found.patch) == (True, None)
    assert (found.embeddings is not None) == with_embeddings
    assert ("embedding" in tier.read()) == with_embeddings
    lacking = start(full, Mode.parse(mode), replace(KEYS, canonical="0" * 64)).found()
    assert (lacking.canonical, lacking.embeddings is not None) == (None, True)


def test_kv_that_is_not_there_is_not_awaited_and_leaves_the_embeddings(full: MemoryTier, start: Start) -> None:
    lookup = start(full, keys=replace(KEYS, canonical="0" * 64))
    assert not lookup.is_coming(5)
    found = lookup.found()
    assert found.canonical is None
    assert found.patch is not None
    assert found.embeddings is not None


@pytest.mark.parametrize("kind", ["canonical", "patch"])
def test_kv_that_fails_to_come_leaves_the_embeddings(full: MemoryTier, kind: str, start: Start) -> None:
    class Torn(KindTier):
        def get(self, key: str) -> pa.Buffer | None:
            return pa.py_buffer(b"torn") if f"/{kind}/" in key else super().get(key)

    found = start(Torn(full)).found()
    assert found.canonical is None
    assert found.embeddings is not None
    assert found.is_unsure == (kind == "patch"), "a patch that did not come is none that is not stored"
    assert not start(full, keys=replace(KEYS, set_patch="0" * 64)).found().is_unsure


def test_a_failing_tier_finds_nothing_and_raises_nothing(full: MemoryTier, start: Start) -> None:
    lookup = start(FaultyTier(full, "get", "contains"))
    assert not lookup.is_coming(5)
    assert lookup.found().embeddings is None


def test_a_tier_that_does_not_answer_says_nothing_of_what_is_stored(full: MemoryTier, over: Over) -> None:
    lookups = over(FaultyTier(full, "contains"))
    for _ in range(LibrarySettings().tier_failures + 1):  # in the end the tier is left alone
        assert lookups.start(KEYS, Mode.AUTO).found().is_unsure


def test_a_stalled_tier_is_not_waited_for(full: MemoryTier, start: Start) -> None:
    tier = KindTier(full, "patch", action="contains")
    lookup = start(tier)
    assert not lookup.is_coming(0.01)
    tier.release.set()
    assert lookup.found().canonical is not None


def test_all_records_of_a_chunk_are_waited_for_together(full: MemoryTier, over: Over) -> None:
    """And its embeddings by themselves: they are what it is computed from then."""
    tier = KindTier(full, "canonical", "patch", "embedding")
    parts = [patch_of(RECORD), *(patch_of(RECORD, [name]) for name in "abc")]
    with Library(LibrarySettings(directory=None), FINGERPRINT, [full]) as library:
        for part in parts:
            library.put(part)
    keys = replace(KEYS, own_patch="0" * 64, set_patch="1" * 64, parts=tuple(part.key for part in parts))
    began = time.monotonic()
    found = over(tier, load_timeout_s=0.4, load_threads=64).start(keys, Mode.AUTO).found()
    assert time.monotonic() - began < 1.2
    assert (found.canonical, found.embeddings, found.is_unsure) == (None, None, True)
    tier.release.set()


def test_a_defect_is_heard_of(full: MemoryTier, start: Start) -> None:
    lookup = start(full, keys=replace(KEYS, own_patch="not a key"))
    assert lookup.is_coming(5), "so that whoever plans asks for what was found"
    with pytest.raises(ValueError, match="64 hex digits"):
        lookup.found()


# Plans


def chunk(start: int, stop: int, point: OperatingPoint, loading: bool = False) -> ChunkPlan:
    span = ChunkSpan("content", "image", start, stop, start, stop - start, grid=None)
    outcome = ChunkOutcome(stop - start, point, 0, "")
    found = ChunkPlan(span, KEYS, 0, outcome, lookup=Lookup() if loading else None)
    if not loading:
        found.settle(point)
    return found


def plan_of(*chunks: ChunkPlan, tokens: int = 100) -> LinkPlan:
    sequence = LinkSequence(torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens), ())
    return LinkPlan(LinkRequest("request", [0] * tokens), sequence, list(chunks))


def test_what_was_looked_up_ahead_serves_the_next_who_asks_and_nobody_after(
    full: MemoryTier, monkeypatch: pytest.MonkeyPatch, over: Over
) -> None:
    now = 100.0
    monkeypatch.setattr("prefill_workers.link.lookups.time", SimpleNamespace(monotonic=lambda: now))
    tier = KindTier(full)
    lookups = over(tier, memory_bytes=0)
    ahead = lookups.start_ahead(KEYS, Mode.AUTO)
    assert lookups.start(KEYS, Mode.EXACT) is not ahead, "another mode looks for something else"
    assert lookups.start(replace(KEYS, set_patch="behind others"), Mode.AUTO) is not ahead
    assert lookups.start(KEYS, Mode.AUTO) is ahead
    again = lookups.start(KEYS, Mode.AUTO)
    assert again is not ahead
    lookups.keep(KEYS, Mode.AUTO, again)
    now += 4
    assert lookups.start(KEYS, Mode.AUTO) is again
    lookups.keep(KEYS, Mode.AUTO, again)
    now += 6
    assert lookups.start(KEYS, Mode.AUTO) is not again, "it may be out of date"
    lookups.keep(KEYS, Mode.AUTO, again)
    lookups.forget("content", "acme")
    assert lookups.start(KEYS, Mode.AUTO) is not again
    lookups.keep(KEYS, Mode.AUTO, again)
    assert lookups.start(KEYS, Mode.AUTO) is not again, "what it found may have been deleted since"


def test_what_nobody_comes_for_is_not_kept(full: MemoryTier, monkeypatch: pytest.MonkeyPatch, over: Over) -> None:
    now = 100.0
    monkeypatch.setattr("prefill_workers.link.lookups.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("prefill_workers.link.lookups._MOST_KEPT", 3)
    lookups = over(full)
    for name in "abcd":
        lookups.start_ahead(replace(KEYS, set_patch=name), Mode.AUTO)
    assert [keys.set_patch for keys, _ in lookups._kept] == ["b", "c", "d"]
    now += 6
    lookups.start_ahead(KEYS, Mode.AUTO)
    assert [keys.set_patch for keys, _ in lookups._kept] == [ORBIT.key]
    now += 6
    lookups.start(replace(KEYS, set_patch="e" * 64), Mode.AUTO).found()
    assert not lookups._kept, "by whoever asks next, for whatever"


@pytest.mark.parametrize(("mode", "absent"), [(Mode.AUTO, False), (Mode.EXACT, False), (Mode.AUTO, True)])
def test_pixels_are_lacking_where_neither_kv_nor_embeddings_are_stored(
    full: MemoryTier, mode: Mode, absent: bool, start: Start
) -> None:
    tier = KindTier(MemoryTier() if absent else full, "canonical")
    lacks = start(tier, mode).lacks_pixels()
    assert not lacks.cancel(), "who waits for it may go"
    assert lacks.result(5) == absent
    tier.release.set()


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.EXACT, Mode.FULL_REUSE, Mode.OFF])
@pytest.mark.parametrize("without", ["", "canonical", "patch", "embedding", "canonical embedding", "patch embedding"])
def test_what_is_lacking_is_told_without_loading_anything(
    full: MemoryTier, mode: Mode, without: str, over: Over
) -> None:
    for key in list(full.keys()):
        if key.split("/")[2] in without.split():
            full.delete(key)
    tier = KindTier(full)
    told = over(tier).lacks_pixels(KEYS, mode).result(5)
    assert not tier.read()
    assert told == over(full).start(KEYS, mode).lacks_pixels().result(5)


def test_the_frontier_is_where_the_first_load_is_waited_for() -> None:
    patched, encoded = OperatingPoint.PATCHED, OperatingPoint.ENCODED
    plan = plan_of(chunk(10, 20, patched), chunk(30, 40, encoded), chunk(50, 60, patched, True), chunk(70, 80, patched))
    assert plan.frontier == 50
    assert plan.runs == [Run(0, 10), Run(20, 50), Run(60, 70), Run(80, 100)]
    assert plan.runs_between(0, plan.frontier) == [Run(0, 10), Run(20, 50)]
    assert plan.runs_between(15, 65) == [Run(20, 50), Run(60, 65)]
    assert (plan.tokens_reused, plan.tokens_computed) == (30, 70)
    plan.chunks[2].settle(patched)
    assert plan.frontier == 100


def test_a_chunk_with_stored_kv_may_be_computed_in_part() -> None:
    selected = chunk(10, 20, OperatingPoint.SELECTED)
    selected.selected = (Run(10, 12), Run(15, 16))
    whole = chunk(20, 30, OperatingPoint.SELECTED)
    whole.selected = (Run(20, 30),)
    plan = plan_of(selected, whole, chunk(40, 50, OperatingPoint.SELECTED), chunk(50, 60, OperatingPoint.ENCODED))
    assert plan.runs == [Run(0, 12), Run(15, 16), Run(20, 40), Run(50, 100)]
    assert (plan.tokens_reused, plan.tokens_computed) == (17, 83)
    assert (plan.is_placed, plan.needs_weighing) == (True, False)


def test_what_stands_behind_a_chunk_waits_until_its_tokens_are_chosen() -> None:
    selected, loading = (chunk(start, start + 10, OperatingPoint.SELECTED, True) for start in (10, 30))
    plan, found = plan_of(selected, loading), Found()
    selected.settle(OperatingPoint.SELECTED, found)
    assert (plan.frontier, plan.is_placed, plan.needs_weighing) == (10, False, False)
    loading.settle(OperatingPoint.SELECTED)
    assert (plan.frontier, plan.is_placed, plan.needs_weighing) == (10, False, True)
    assert selected.end_weighing() is found
    assert (plan.frontier, plan.is_placed, plan.needs_weighing) == (100, True, False)


def test_what_stands_behind_a_chunk_need_not_wait_while_a_forward_writes_it_layer_by_layer() -> None:
    streamed = chunk(10, 20, OperatingPoint.PATCHED, True)
    plan = plan_of(streamed)
    stream = cast(LayerwiseLoad, object())
    streamed.begin_stream(stream)
    assert (plan.frontier, plan.is_placed, plan.is_loading) == (100, False, True)
    streamed.drop_stream()
    assert (plan.frontier, streamed.stream) == (10, None)
    streamed.begin_stream(stream)
    assert streamed.lookup is not None
    streamed.lookup.end(Found())
    assert streamed.end_load() == (Found(), stream)
    streamed.settle(OperatingPoint.RECOMPUTED)
    assert (plan.frontier, plan.is_placed, plan.runs) == (100, True, [Run(0, 100)])


def test_a_plan_knows_of_loads_that_have_ended(start: Start) -> None:
    plan = plan_of(chunk(10, 20, OperatingPoint.PATCHED, True))
    assert not plan.has_ended_loads
    lookup = plan.chunks[0].lookup
    assert lookup is not None
    lookup.end(start(MemoryTier(), Mode.OFF).found())
    assert plan.has_ended_loads


def test_the_runs_of_a_settled_plan_are_found_once() -> None:
    ended: list[str] = []
    plan = plan_of(chunk(10, 20, OperatingPoint.PATCHED)).pinned_by(lambda: ended.append("unpinned"))
    expected = plan.runs
    assert plan.runs is not expected
    plan.fix()
    assert plan.runs == expected == [Run(0, 10), Run(20, 100)]
    assert plan.runs is plan.runs
    assert (plan.tokens_computed, ended) == (90, ["unpinned"])


def test_pins_end_with_the_plan_or_when_it_says_so() -> None:
    ended: list[str] = []
    plan = plan_of().pinned_by(lambda: ended.append("said"))
    plan.unpin()
    plan.unpin()
    assert ended == ["said"]
    plan_of().pinned_by(lambda: ended.append("dropped"))
    assert ended == ["said", "dropped"]


def test_what_may_stay_on_a_device_is_what_records_hold_not_what_is_bound_or_summed() -> None:
    page, record = chunk(10, 20, OperatingPoint.PATCHED), patch_of(RECORD)
    linker: Any = SimpleNamespace(form=SimpleNamespace(basis=None))
    found = Found(RECORD, record)
    placed = Linker._placed(linker, page, found)
    assert (placed.kv is RECORD.kv, placed.kv_lasts, placed.patch_lasts) == (True, True, True)
    assert Linker._placed(linker, page, Found(RECORD))[-2:] == (True, False)
    summed = replace(found, parts=(record.patch, record.patch))
    assert Linker._placed(linker, page, summed)[-2:] == (True, False)
    bound: Any = SimpleNamespace(patch=SimpleNamespace(bind=lambda basis: record.patch))
    assert Linker._placed(linker, page, Found(RECORD, bound))[-2:] == (True, False)
    sent: list[Placement] = []
    slots = lambda blocks, start, stop: torch.arange(start, stop)  # noqa: E731
    write_chunks(cast(Any, SimpleNamespace(places_on_device=True, slots=slots, place=sent.extend)), (), [placed])
    assert (sent[0].kv is RECORD.kv, sent[0].kv_lasts, sent[0].patch_lasts) == (True, True, True)
