"""A window that slides over a small transformer in torch: what is served, computed anew in idle time, and exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_support import FINGERPRINT, GQA
from small_transformer import BLOCK, LINK, SPARE, Transformer
from torch import Tensor

from kvstore.library import Library
from kvstore.operator.apply import relocate
from kvstore.operator.patch import Patch
from kvstore.records.patch_form import PatchForm
from kvstore.settings import LibrarySettings
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import record_path
from prefill_workers.background.session_refresh import SessionRefresh
from prefill_workers.block_index import NO_MATCH
from prefill_workers.link.place_kv import write_chunks
from prefill_workers.link.session_links import SessionLinks
from prefill_workers.modes import OperatingPoint
from prefill_workers.patches.scratch import Scratch
from prefill_workers.protocol import TEXT, ChunkSpan, LinkRequest, SessionRef, Survivors
from prefill_workers.sequence import LinkSequence, Run, complement
from prefill_workers.sessions.store import SessionStore
from prefill_workers.settings import SessionSettings


class InBfloat16(Transformer):
    """The transformer with KV that is rounded as it is read."""

    dtype = torch.bfloat16

    def write_kv(self, kv: Tensor, slots: Tensor) -> None:
        super().write_kv(kv.float(), slots)

    def read_kv(self, blocks: Sequence[int], start: int, count: int) -> Tensor:
        return super().read_kv(blocks, start, count).bfloat16()


class Worker:
    """Links and refreshes of sessions on the transformer, one after the other."""

    def __init__(self, library: Library, engine: Transformer | None = None) -> None:
        self.engine: Any = engine or Transformer()
        store = SessionStore(library, "float32", SessionSettings())
        self.links = SessionLinks(self.engine, library, store, lambda point, made=0.0: True, free_text=2)
        scratch = Scratch(SPARE, BLOCK, lambda left: min(left, 5))
        self.refresh = SessionRefresh(self.engine, library, self.links, scratch)

    def link(self, request: LinkRequest, at: int = 0) -> tuple[list[str], Tensor]:
        """Link a request whose positions begin at `at`; its segments' points ("": computed), and its KV."""
        opened = self.links.open(request)
        assert opened is not None
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        positions = torch.arange(at, at + len(tokens))
        session = self.links.place(opened, positions, Run(0, 0))
        sequence = LinkSequence(tokens, positions, LINK)
        write_chunks(self.engine, LINK, session.left_to_write(0))
        runs = complement(session.runs, len(tokens))
        self.engine.forward([(sequence, runs)])
        kept = session.chunk_outcomes()
        computed = SimpleNamespace(operating_point=OperatingPoint.RECOMPUTED)
        plan: Any = SimpleNamespace(
            request=request,
            sequence=sequence,
            prefix=NO_MATCH,
            session=session,
            chunks=[
                SimpleNamespace(span=span, embeddings=None, made_at=kept.get(i, computed).operating_point)
                for i, span in enumerate(request.chunks)
            ],
            compute_ms=1.0,
            tokens_computed=sum(map(len, runs)),
        )
        self.links.keep(plan)
        self.refresh.offer(plan)
        return [str(point or "") for point in session.points], self.engine.read_kv(LINK, 0, len(tokens))

    def idle(self) -> int:
        """Work off what is queued; returns the tokens that it took."""
        before = self.engine.computed
        while self.refresh:
            self.refresh.step()
        return self.engine.computed - before

    def exact(self, request: LinkRequest, at: int = 0) -> Tensor:
        """KV of a full prefill."""
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        sequence = LinkSequence(tokens, torch.arange(at, at + len(tokens)), SPARE)
        self.engine.forward([(sequence, [Run(0, len(tokens))])])
        return self.engine.read_kv(SPARE, 0, len(tokens))


@pytest.fixture
def library() -> Iterator[Library]:
    with Library(LibrarySettings(), FINGERPRINT, [MemoryTier()]) as library, torch.inference_mode():
        yield library


@pytest.fixture
def worker(library: Library) -> Worker:
    return Worker(library)


HEAD, TAIL = [1, 2, 3, 4], [9, 8]


def request(*pages: int, survivors: Survivors = Survivors.REFRESH) -> LinkRequest:
    """Documents of 7 tokens with actions of 6 between them, a head and a tail."""
    tokens, spans = [*HEAD], []
    for page in pages:
        if spans:
            tokens += [60 + pages[len(spans) - 1] * 6 + i for i in range(6)]
        spans.append(ChunkSpan(f"page {page}", TEXT, len(tokens), len(tokens) + 7, len(tokens), 7))
        tokens += [10 + page * 7 + i for i in range(7)]
    return LinkRequest("r", [*tokens, *TAIL], tuple(spans), session=SessionRef("s", survivors=survivors))


PAGE_1, ACTION_1, PAGE_2 = Run(4, 11), Run(11, 17), Run(17, 24)  # of a window that begins with page 1


def apart(a: Tensor, b: Tensor, run: Run) -> float:
    return float((a - b)[:, run.start : run.stop].abs().max())


def test_what_stays_is_exact_once_idle_time_has_computed_it(worker: Worker):
    worker.link(request(0, 1, 2), at=5)
    assert worker.idle() == (7 + 6 + 7) + 7, "the second page with its action, the third, and this behind the second"
    points, kv = worker.link(request(1, 2, 3), at=2)
    assert points == ["prefix"] * 4 + [""] * 3
    exact = worker.exact(request(1, 2, 3), at=2)
    assert apart(kv, exact, Run(0, kv.shape[1])) < 1e-5, "also what is new, behind what stays"
    assert worker.idle() == (6 + 7) + 7, "the action behind page 2 and page 3; this behind page 2"
    assert worker.idle() == 0
    points, _ = worker.link(request(2, 3, 4))
    assert points[:4] == ["prefix"] * 4


def test_the_oldest_survivor_comes_first_where_idle_time_ends(worker: Worker):
    worker.link(request(0, 1, 2), at=5)
    before = worker.engine.computed
    while worker.engine.computed - before < 7 + 6:
        worker.refresh.step()
    worker.refresh.step()
    points, kv = worker.link(request(1, 2, 3), at=2)
    assert points == ["prefix", "prefix", "prefix", "survived", "", "", ""]
    exact = worker.exact(request(1, 2, 3), at=2)
    assert apart(kv, exact, Run(0, 17)) < 1e-5
    assert apart(kv, exact, PAGE_2) > 1e-2, "it knows what left"


def test_sessions_take_turns_in_idle_time(worker: Worker):
    for name in "st":
        worker.link(replace(request(0, 1, 2), session=SessionRef(name)))
    before = worker.engine.computed
    while worker.engine.computed - before < 2 * (7 + 6):
        worker.refresh.step()
    worker.refresh.step()
    kept = [worker.links.store.get("local", name) for name in "st"]
    assert all(session.segments[3].refreshed and not session.segments[5].refreshed for session in kept)


def test_what_a_stretch_stands_behind_is_written_a_segment_a_piece(worker: Worker):
    worker.link(request(0, 1, 2))
    wrote = list[int]()
    write = worker.engine.write_kv

    def noted(kv: Tensor, slots: Tensor) -> None:
        wrote.append(kv.shape[1])
        write(kv, slots)

    worker.engine.write_kv = noted
    pieces = list[tuple[list[int], int]]()
    while worker.refresh:
        wrote.clear()
        before = worker.engine.computed
        worker.refresh.step()
        if wrote:
            pieces.append((list(wrote), worker.engine.computed - before))
    assert ([7], 0) in pieces
    assert all(len(segments) == 1 and not computed for segments, computed in pieces), "and no forward with it"


def test_a_window_that_loses_two_chunks_takes_what_knows_least_of_them(worker: Worker):
    worker.link(request(0, 1, 2, 3))
    worker.idle()
    points, _ = worker.link(request(2, 3, 4))
    assert points[:4] == ["prefix", "prefix", "prefix", "survived"]
    page = worker.links.store.get("local", "s").segments[3].conditioned
    assert len(page.behind) == 1 + 2 * 2, "page 1 and its action left, page 0 was not there"


def test_kept_survivors_take_what_they_were_computed_as(worker: Worker):
    _, before = worker.link(request(0, 1, 2, survivors=Survivors.KEEP), at=4)
    assert worker.idle() == 0
    before_idle = worker.engine.computed
    points, kv = worker.link(request(1, 2, 3, survivors=Survivors.KEEP), at=17)
    assert worker.engine.computed - before_idle == 6 + 7 + len(TAIL), "what is new"
    assert points == ["prefix", "survived", "survived", "survived", "", "", ""]
    same = kv[:, 4:24] - before[:, 17:37]
    assert float(same.abs().max()) < 1e-6, "it stands at the positions where it was computed"
    exact = worker.exact(request(1, 2, 3), at=17)
    assert apart(kv, exact, PAGE_1) > 1e-2


def test_exact_survivors_equal_a_full_prefill(worker: Worker):
    for pages in ((0, 1, 2), (1, 2, 3), (1, 2, 3, 4), (4, 1, 2, 3)):
        asked = request(*pages, survivors=Survivors.EXACT)
        _, kv = worker.link(asked)
        assert apart(kv, worker.exact(asked), Run(0, len(asked.token_ids))) < 1e-5


def test_a_removal_patch_takes_out_what_left(worker: Worker):
    asked = [request(*range(first, first + 3), survivors=Survivors.REMOVAL) for first in range(3)]
    _, before = worker.link(asked[0], at=5)
    assert worker.idle() == 7 + 6 + 7, "the next window, but for its head"
    segments = worker.links.store.get("local", "s").segments
    assert [bool(one.mended) for one in segments] == [False] * 3 + [True] * 3 + [False]
    assert all(one.mended.key == one.conditioned.key for one in segments[3:6])

    points, kv = worker.link(asked[1], at=2)
    assert points == ["prefix", "survived", "survived", "survived", "", "", ""]
    exact = worker.exact(asked[1], at=2)
    kept = relocate(before[:, 17:37], -16, GQA)  # where it was computed: 13 tokens further on, and positions by 3
    for run in (PAGE_1, ACTION_1, PAGE_2):
        stays = kept[:, run.start - 4 : run.stop - 4]
        assert apart(kv, exact, run) < 0.05 * float((stays - exact[:, run.start : run.stop]).abs().max())

    worker.idle()
    slid = worker.links.store.get("local", "s").segments
    assert slid[3].mended.key == segments[5].conditioned.key, "a patch of what was computed, not of what was patched"
    points, kv = worker.link(asked[2], at=9)
    assert points[:4] == ["prefix", "survived", "survived", "survived"]
    assert apart(kv, worker.exact(asked[2], at=9), PAGE_1) < 0.02


def test_a_removal_patch_is_of_kv_that_was_turned_before_it_was_rounded(library: Library, monkeypatch):
    formed: list[Tensor] = []
    form = PatchForm.form

    def noted(self: PatchForm, delta: Tensor, *arguments: Any) -> Patch:
        formed.append(delta.clone())
        return form(self, delta, *arguments)

    monkeypatch.setattr(PatchForm, "form", noted)
    worker = Worker(library, InBfloat16())
    worker.link(request(0, 1, 2, survivors=Survivors.REMOVAL), at=5)
    worker.idle()
    mended = [one.mended for one in worker.links.store.get("local", "s").segments if one.mended]
    assert len(mended) == len(formed) == 3
    for kept, delta in zip(mended, formed, strict=True):
        exact = library.get_segment(kept.key, "local").kv.float() + delta
        assert float((exact - exact.bfloat16().float()).abs().max()) > 1e-4 * float(exact.abs().max())


def test_a_deleted_content_is_not_computed_anew(worker: Worker):
    worker.link(request(0, 1, 2))
    worker.refresh.step()
    assert worker.refresh.is_running
    worker.refresh.forget("page 0", "another tenant")
    assert len(worker.refresh) == 2
    worker.refresh.forget("page 1", "local")
    assert len(worker.refresh) == 0


def test_a_session_that_is_gone_keeps_nothing(worker: Worker):
    worker.link(request(0, 1, 2))
    worker.refresh.step()
    worker.links.store.delete("local", "s")
    worker.idle()
    assert worker.links.store.get("local", "s") is None
    assert worker.links.store.nbytes == 0


def test_an_action_that_recurs_is_exact_too(worker: Worker):
    def asked(*pages: int) -> LinkRequest:
        tokens, spans = [*HEAD], list[ChunkSpan]()
        for page in pages:
            tokens += [60, 61, 62, 63, 64, 65] if spans else []
            spans.append(ChunkSpan(f"page {page}", TEXT, len(tokens), len(tokens) + 7, len(tokens), 7))
            tokens += [10 + page * 7 + i for i in range(7)]
        return LinkRequest("r", [*tokens, *TAIL], tuple(spans), session=SessionRef("s", survivors=Survivors.REFRESH))

    worker.link(asked(0, 1, 2, 3))
    worker.idle()
    points, _ = worker.link(asked(1, 2, 3, 4))
    assert points[:6] == ["prefix"] * 6


def test_of_a_text_that_recurs_behind_a_page_nothing_is_stored_that_no_manifest_names(worker: Worker, library: Library):
    text = list(range(100, 110))

    def asked(*parts: int | list[int]) -> LinkRequest:
        tokens, spans = [*HEAD], list[ChunkSpan]()
        for part in parts:
            if isinstance(part, int):
                spans.append(ChunkSpan(f"page {part}", TEXT, len(tokens), len(tokens) + 7, len(tokens), 7))
            tokens += [10 + part * 7 + i for i in range(7)] if isinstance(part, int) else part
        return LinkRequest("r", tokens, tuple(spans), session=SessionRef("s", survivors=Survivors.REFRESH))

    worker.link(asked(0, text, 1, TAIL))
    worker.idle()
    worker.link(asked(0, text, 1, text + text, 2, TAIL))
    worker.idle()
    store = worker.links.store
    session = store.get("local", "s")
    assert [one.id for one in session.segments].count(session.segments[2].id) == 3
    store._deleting.submit(lambda: None).result(10)
    library.flush()
    named = {record_path("segment", kv.key, FINGERPRINT, "local") for kv in session.records()}
    assert {entry.key for entry in library.listed("segment")} == named


@pytest.mark.parametrize("pages", [(0, 1, 1, 1, 2), (1, 1, 1, 1, 2), (0, 1, 2, 1, 2, 1, 3)])
def test_a_page_that_recurs_is_exact_wherever_it_stands(worker: Worker, pages: tuple[int, ...]):
    *window, last = pages
    worker.link(request(*window), at=5)
    worker.idle()
    points, kv = worker.link(request(*window[1:], last), at=2)
    assert points[: 2 * len(window) - 2] == ["prefix"] * (2 * len(window) - 2)
    assert apart(kv, worker.exact(request(*window[1:], last), at=2), Run(0, kv.shape[1])) < 1e-5


def test_what_an_old_link_lacks_ends_no_later_ones_refresh(worker: Worker):
    worker.link(request(0, 1, 2))
    worker.refresh.step()
    assert worker.refresh.is_running
    worker.links.store.delete("local", "s")
    worker.links.store._deleting.submit(lambda: None).result(10)
    worker.link(request(5, 6, 7))
    assert worker.idle() > 0
