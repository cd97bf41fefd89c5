"""Links of sessions over a stand-in for the engine: what is taken, where it goes, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_support import FINGERPRINT, GQA, random_kv

from kvstore.library import Library
from kvstore.operator.apply import apply, relocate
from kvstore.operator.patch import form_patch
from kvstore.settings import LibrarySettings
from kvstore.tiers.memory import MemoryTier
from prefill_workers.block_index import NO_MATCH, CachedBlock, PrefixMatch
from prefill_workers.compaction.plan import OBSERVERS
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.link.session_links import SessionLinks
from prefill_workers.link.session_plan import SessionPlan
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.protocol import ChunkSpan, Compaction, LinkRequest, PrefetchRequest, SessionRef, Survivors
from prefill_workers.sequence import Run
from prefill_workers.sessions.store import SessionStore
from prefill_workers.settings import FidelitySettings, SessionSettings

PAGE = 5  # tokens
HEAD, WORDS = list(range(1, 11)), {"a": list(range(20, 32)), "b": list(range(40, 52)), "c": [60, 61]}
SESSION = SessionRef("s")


class Engine:
    """An engine whose pages hold whatever a test says that a link has left there."""

    fingerprint, layout, precision, dtype, block_size = FINGERPRINT, GQA, "float32", torch.float32, 16
    has_quantised_kv = False
    pages: torch.Tensor

    def read_kv(self, blocks: object, start: int, count: int) -> torch.Tensor:
        return self.pages[:, start : start + count].clone()


class Rig:
    """Links of sessions, whose forwards are random KV."""

    def __init__(self, library: Library) -> None:
        self.engine, self.library = Engine(), library
        self.fidelity = Fidelity(FidelitySettings(share=0))
        store = SessionStore(library, "float32", SessionSettings())
        self.links = SessionLinks(self.engine, library, store, self.fidelity.allows, free_text=2)  # type: ignore[arg-type]

    def request(self, *parts: str | list[int], mode: Mode = Mode.AUTO, session: SessionRef = SESSION) -> LinkRequest:
        """A request of texts, by their tokens or names, and pages, by their numbers."""
        tokens: list[int] = []
        spans = []
        for part in parts:
            if isinstance(part, str) and part.isdigit():
                start = len(tokens)
                spans.append(ChunkSpan(f"page {part}", "image", start, start + PAGE, start, PAGE))
                tokens += [900] * PAGE
            else:
                tokens += WORDS[part] if isinstance(part, str) else part
        return LinkRequest("request", tokens, tuple(spans), mode, "acme", session=session)

    def plan(self, request: LinkRequest, at: int = 0, known: int = 0) -> SessionPlan:
        """The session's part of a link, whose positions begin at `at` and whose first tokens are `known`."""
        opened = self.links.open(request)
        assert opened is not None
        positions = torch.arange(at, at + len(request.token_ids)).expand(3, -1)
        return self.links.place(opened, positions, Run(0, known))

    def finish(
        self,
        request: LinkRequest,
        session: SessionPlan,
        seed: int,
        made_at: OperatingPoint | None = None,
        prefix: PrefixMatch = NO_MATCH,
    ) -> torch.Tensor:
        """End a link: what is placed, and random KV for the rest, is in the pages and kept. Returns it.

        `made_at`: of its chunks; None: as the session serves them, or computed.
        """
        kv = random_kv(GQA, len(request.token_ids), seed=seed)
        for placed in session.placed:
            kv[:, placed.run.start : placed.run.stop] = relocate(placed.kv, placed.position, GQA)
        kept = session.chunk_outcomes()
        computed = SimpleNamespace(operating_point=OperatingPoint.RECOMPUTED)
        chunks = [
            SimpleNamespace(span=span, made_at=made_at or kept.get(i, computed).operating_point)
            for i, span in enumerate(request.chunks)
        ]
        self.engine.pages = kv
        plan: Any = SimpleNamespace(
            request=request,
            sequence=SimpleNamespace(blocks=()),
            prefix=prefix,
            chunks=chunks,
            session=session,
            compute_ms=1.0,
            tokens_computed=1,
        )
        self.links.keep(plan)
        return kv

    def link(self, *parts: str | list[int], at: int = 0, seed: int = 0, **options: Any) -> tuple[SessionPlan, Any]:
        request = self.request(*parts, **options)
        session = self.plan(request, at)
        return session, self.finish(request, session, seed)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Library(LibrarySettings(), FINGERPRINT, [MemoryTier()]) as library:
        yield Rig(library)


FIRST = (HEAD, "1", "a", "2", "b", "3")
SLID = (HEAD, "2", "b", "3", "c", "4", [7])


def test_kept_kv_is_placed_where_it_stands_now(rig: Rig):
    _, before = rig.link(*FIRST, at=3)
    session, _ = rig.link(*SLID, at=9, seed=1)
    assert [str(point) for point in session.points[:4]] == ["prefix"] + ["survived"] * 3
    assert session.points[4:] == [None] * 3
    assert session.outcome().new == 3
    assert session.outcome().tokens_reused == 10 + PAGE + 12 + PAGE
    (head, page, *_) = session.placed
    assert (head.run, head.position) == (Run(0, 10), 6)
    assert torch.equal(head.kv, before[:, :10])
    started = 10 + PAGE + 12  # of page 2, in the first prompt
    assert (page.run, page.position) == (Run(10, 15), 9 + 10 - (3 + started))
    assert torch.equal(page.kv, before[:, started : started + PAGE])
    assert session.chunk_outcomes().keys() == {0, 1}
    assert session.exact_tokens == 10, "up to the first survivor"


def test_it_is_rotated_from_where_it_was_computed_after_several_slides(rig: Rig):
    _, before = rig.link(*FIRST)
    rig.link(*SLID, seed=1)
    session, _ = rig.link(HEAD, "3", "c", "4", "a", "5", [7], seed=2)
    page = next(placed for placed in session.placed if placed.run.start == 10)
    started = 10 + 2 * (PAGE + 12)
    assert torch.equal(page.kv, before[:, started : started + PAGE])
    assert page.position == 10 - started


def test_the_same_prompt_computes_its_last_token_alone(rig: Rig):
    rig.link(HEAD, "1", "a")
    session = rig.plan(rig.request(HEAD, "1", "a"))
    assert session.runs == [Run(0, 10), Run(10, 15), Run(15, 26)]
    ends_in_a_page = rig.plan(rig.request(HEAD, "1"))
    assert ends_in_a_page.runs == [Run(0, 10)], "its last token may need the page's embeddings"


def test_the_words_that_choose_which_entries_are_handed_off_are_computed(rig: Rig):
    question = list(range(100, 140))
    rig.link(HEAD, "1", question)
    request = replace(rig.request(HEAD, "1", question), compaction=Compaction(budget=0.5))
    assert rig.plan(request).runs == [Run(0, 10), Run(10, 15), Run(15, 55 - OBSERVERS)]
    rig.link(HEAD, "1", "a", session=SessionRef("short"))
    request = replace(rig.request(HEAD, "1", "a", session=SessionRef("short")), compaction=Compaction(budget=0.5))
    assert rig.plan(request).runs == [Run(0, 10), Run(10, 15)], "no page is computed again for it"


def test_what_is_placed_otherwise_is_left_alone(rig: Rig):
    rig.link(*FIRST)
    assert rig.plan(rig.request(*FIRST), known=4).runs[0] == Run(4, 10)
    session = rig.plan(rig.request(*FIRST), known=10)
    assert session.runs[0] == Run(10, 15)
    whole, (cut, *_) = session.placed[0], session.left_to_write(12)
    assert (cut.run, cut.position) == (Run(12, 15), whole.position)
    assert torch.equal(cut.kv, whole.kv[:, 2:])
    assert session.left_to_write(0) == []


def test_a_segment_that_is_written_whole_is_the_records_own_and_may_stay_on_a_device(rig: Rig):
    rig.link(HEAD, "1", "a")
    segments = rig.links.store.open("acme", SESSION).session.segments
    records = [rig.library.get_segment(kept.conditioned.key, "acme").kv for kept in segments]
    session = rig.plan(rig.request(HEAD, "1", "a"))
    assert [one.kv_lasts for one in session.placed] == [True, True, False], "of the last one a token is computed"
    assert [one.kv is kv for one, kv in zip(session.placed, records, strict=True)] == [True, True, False]
    cut, page, _ = session.left_to_write(4)
    assert (cut.kv_lasts, page.kv_lasts, page.kv is records[1]) == (False, True, True)


def test_a_removal_patch_is_added_where_its_kv_is_turned_and_cut_with_it(rig: Rig):
    _, before = rig.link(*FIRST)
    head, *_, page = rig.links.store.get("acme", "s").segments[:4]
    record = rig.library.get_segment(page.conditioned.key, "acme")
    patch = form_patch(random_kv(GQA, PAGE, seed=9), GQA, 2)
    mended = rig.links.store_removal(page.conditioned, (head.id,), record, patch)
    rig.links.store.add_refreshed("acme", "s", {page.id: mended}, "mended")
    request = rig.request(*SLID, session=replace(SESSION, survivors=Survivors.REMOVAL))
    session = rig.plan(request)
    placed = session.placed[1]
    assert torch.equal(placed.kv, before[:, 27:32])
    assert placed.patch is not None
    whole = apply(placed.kv, placed.patch, placed.position, GQA)
    for start, cut in (12, session.left_to_write(12)[0]), (13, rig.plan(request, known=13).placed[0]):
        assert cut.run == Run(start, 15)
        torch.testing.assert_close(apply(cut.kv, cut.patch, cut.position, GQA), whole[:, start - 10 :])


def test_exact_takes_exact_kv_alone(rig: Rig):
    rig.link(*FIRST)
    for options in ({"mode": Mode.EXACT}, {"session": replace(SESSION, survivors=Survivors.EXACT)}):
        session = rig.plan(rig.request(*SLID, **options))
        assert set(session.points) == {OperatingPoint.PREFIX, None}
        assert session.outcome().prefix == 1
        assert session.outcome().computed == 3
    rig.fidelity.disable(OperatingPoint.SURVIVED, "a test")
    assert set(rig.plan(rig.request(*SLID)).points) == {OperatingPoint.PREFIX, None}
    assert rig.links.open(rig.request(*SLID, mode=Mode.FULL_REUSE)) is None


def test_what_is_computed_behind_a_survivor_is_not_exact(rig: Rig):
    rig.link(*FIRST)
    rig.link(*SLID, seed=1)
    again = rig.plan(rig.request(*SLID, mode=Mode.EXACT))
    assert [point is not None for point in again.points] == [True] + [False] * 6
    assert set(rig.plan(rig.request(*SLID)).points[1:]) == {OperatingPoint.SURVIVED}


def test_what_is_computed_behind_a_shared_patched_chunk_is_not_exact(rig: Rig):
    request = rig.request(HEAD, "1", "a", "2", [7])
    rig.finish(request, rig.plan(request), 0, made_at=OperatingPoint.PATCHED)
    found = rig.plan(rig.request(HEAD, "1", "a", "2", [7], mode=Mode.EXACT))
    assert [point is not None for point in found.points] == [True] + [False] * 4


def test_what_a_cascade_leaves_behind_something_new_is_named(rig: Rig):
    rig.link(*FIRST)
    asked = rig.request(HEAD, "9", "a", "2", "b", "3", session=replace(SESSION, cascade_tokens=1))
    session = rig.plan(asked)
    assert session.points[:4] == [OperatingPoint.PREFIX, None, None, OperatingPoint.SURVIVED]
    assert "new in front of it since: 1" in session.chunk_outcomes()[1].reason
    assert rig.plan(replace(asked, session=SESSION)).points[1:] == [None] * 5


def test_blocks_are_shared_up_to_what_was_rotated_or_survived(rig: Rig):
    first, _ = rig.link(*FIRST)
    assert first.shareable_tokens == len(rig.request(*FIRST).token_ids)
    assert rig.plan(rig.request(*SLID)).shareable_tokens == 10, "page 2 has moved"
    assert rig.plan(rig.request(*FIRST), at=1).shareable_tokens == 0, "all has moved"


def test_what_was_stored_of_a_session_that_could_not_be_kept_is_deleted(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    read = rig.engine.read_kv

    def fails(blocks: object, start: int, count: int) -> torch.Tensor:
        if start > 10:
            raise RuntimeError("no memory")
        return read(blocks, start, count)

    monkeypatch.setattr(rig.engine, "read_kv", fails)
    rig.link(HEAD, "1", "a")
    assert rig.links.store.get("acme", SESSION.id) is None
    rig.links.store._deleting.submit(lambda: None).result(10)
    rig.library.flush()
    assert rig.library.listed("segment") == []


def test_a_lost_record_is_computed(rig: Rig):
    rig.link(*FIRST)
    kept = rig.links.store.get("acme", "s").segments[3].conditioned
    rig.library.delete("segment", kept.key, "acme")
    session = rig.plan(rig.request(*SLID))
    assert session.points[1] is None
    assert session.points[2] is OperatingPoint.SURVIVED
    assert session.chunk_outcomes().keys() == {1}


def test_pages_of_few_bits_take_kv_where_it_was_computed_alone(rig: Rig):
    rig.link(*FIRST)
    rig.engine.has_quantised_kv = True
    assert [placed.position for placed in rig.plan(rig.request(*SLID)).placed] == [0]
    assert rig.plan(rig.request(*FIRST), at=1).placed == []


def test_a_prompt_on_its_way_looks_up_what_its_session_has_not(rig: Rig):
    rig.link(*FIRST)
    coming = PrefetchRequest(("page 2", "page 4"), tenant="acme", session=SESSION)
    assert set(rig.links.contents(coming)) == {"page 1", "page 2", "page 3"}
    assert not rig.links.contents(replace(coming, tenant="other"))
    fork = SessionRef("fork", "s")
    assert "page 2" in rig.links.contents(replace(coming, session=fork))
    assert not rig.links.contents(replace(coming, session=replace(fork, clean=True)))


def test_a_fork_shares_and_goes_its_own_way(rig: Rig):
    rig.link(*FIRST)
    fork, _ = rig.link(*SLID, session=SessionRef("fork", "s"), seed=1)
    assert fork.outcome().survived == 3
    assert rig.plan(rig.request(*FIRST)).outcome().prefix == 5, "the parent is as it was"
    clean = rig.plan(rig.request(*SLID, session=SessionRef("clean", "s", clean=True)))
    assert (clean.runs, clean.outcome().recalled) == ([], 4)


def test_what_was_computed_behind_a_survivor_goes_with_what_that_one_knows(rig: Rig):
    rig.link(HEAD, "1", "a", "2", "b")
    rig.link(HEAD, "2", "b", "3", [7, 8, 9], seed=1)
    session = rig.links.store.get("acme", SESSION.id)
    assert session is not None
    page = next(one for one in session.segments if one.content == "page 3")
    assert page.conditioned is not None
    assert rig.library.get_segment(page.conditioned.key, "acme") is not None
    rig.library.delete_content("page 1", "acme")
    assert rig.library.get_segment(page.conditioned.key, "acme") is None


def test_a_session_that_is_deleted_during_a_link_stays_deleted(rig: Rig):
    rig.link(HEAD, "1", "a")
    request = rig.request(HEAD, "1", "a", "2", "b")
    under_way = rig.plan(request)
    assert rig.links.store.delete("acme", SESSION.id)
    rig.finish(request, under_way, seed=1)
    assert rig.links.store.get("acme", SESSION.id) is None
    assert rig.links.store.nbytes == 0


def test_kv_made_at_a_point_that_is_switched_off_since_does_not_serve(rig: Rig):
    parts = HEAD, "1", "a", "2", [7]
    request = rig.request(*parts)
    rig.finish(request, rig.plan(request), 0, made_at=OperatingPoint.PATCHED)
    assert set(rig.plan(rig.request(*parts)).points[1:]) == {OperatingPoint.SURVIVED}
    rig.fidelity.disable(OperatingPoint.PATCHED, "a test")
    assert rig.plan(rig.request(*parts)).points == [OperatingPoint.PREFIX, *[None] * 4]
    rig.fidelity.allow(OperatingPoint.PATCHED)
    computed = rig.plan(rig.request(*parts))
    assert computed.points == [OperatingPoint.PREFIX, *[None] * 4], "its patch may be what it was switched off for"
    rig.finish(request, computed, 1, made_at=OperatingPoint.PATCHED)
    assert set(rig.plan(rig.request(*parts)).points[1:]) == {OperatingPoint.SURVIVED}, "the new patch is not"


def test_what_was_computed_behind_a_survivor_does_not_serve_once_survivors_were_switched_off(rig: Rig):
    rig.link(*FIRST)
    rig.link(*SLID, seed=1)
    served = rig.plan(rig.request(*SLID))
    assert served.points[5] is OperatingPoint.SURVIVED
    assert served.approximate == {OperatingPoint.SURVIVED}, "checks of such requests count for these"
    rig.fidelity.disable(OperatingPoint.SURVIVED, "a test")
    rig.fidelity.allow(OperatingPoint.SURVIVED)
    assert rig.plan(rig.request(*SLID)).points[4:6] == [None] * 2, "it was computed behind what may be wrong"


def test_what_was_linked_by_a_patch_serves_those_alone_who_ask_in_the_same_way(rig: Rig):
    request = rig.request(HEAD, "1", "a", "2", [7])
    rig.finish(request, rig.plan(request), 0, made_at=OperatingPoint.PATCHED)
    kept = rig.plan(request)
    assert set(kept.points[1:4]) == {OperatingPoint.SURVIVED}
    assert "patched" in kept.chunk_outcomes()[0].reason
    assert rig.plan(replace(request, text="strict")).points == [OperatingPoint.PREFIX, *[None] * 4]


def test_kv_that_was_turned_in_its_blocks_is_not_kept_to_be_turned_again(rig: Rig):
    request = rig.request(HEAD, "1", "a", "2", "b", [7])
    blocks = tuple(CachedBlock(i, "acme", (), (), frame, 0) for i, frame in enumerate((0, 3)))
    rig.finish(request, rig.plan(request, 3), 0, prefix=PrefixMatch(20, blocks, (), 3))  # the second one is its own
    assert [point is not None for point in rig.plan(request, 3).points] == [False] * 3 + [True] * 2


def test_survivors_exact_are_mode_exact_in_requests_and_their_announcements():
    careful = SessionRef("s", survivors=Survivors.EXACT)
    for session, mode in ((careful, Mode.EXACT), (SESSION, Mode.AUTO), (None, Mode.AUTO)):
        assert LinkRequest("request", [1], session=session).mode == mode
        assert PrefetchRequest(("page",), session=session).mode == mode
