"""Links of a session's requests: the kept KV that serves, and what a link leaves behind.

| call    | thread       | what it does                                                                      |
|---------|--------------|-----------------------------------------------------------------------------------|
| `open`  | any          | aligns the prompt with the session's last one, starts loading the KV that serves it |
| `place` | any          | waits for that KV, and says where it goes                                         |
| `keep`  | the engine's | reads what the session has not got out of a finished link's blocks, and stores it |
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvstore.errors import StoreError
from kvstore.library import Library
from kvstore.operator.patch import Patch
from kvstore.records.record import SegmentPatchRecord, SegmentRecord
from prefill_workers.compaction.plan import observed
from prefill_workers.link.place_kv import PlacedChunk
from prefill_workers.link.prefix_hits import asked_by
from prefill_workers.link.session_plan import SegmentPlan, SessionPlan
from prefill_workers.modes import EXACT_POINTS, ModeKind, OperatingPoint, uses_session
from prefill_workers.protocol import LinkRequest, PrefetchRequest, Survivors
from prefill_workers.sequence import Run
from prefill_workers.sessions.alignment import Match, MatchKind, align
from prefill_workers.sessions.manifest import KeptKV, KeptSegment
from prefill_workers.sessions.segments import segments
from prefill_workers.sessions.store import SessionStore
from prefill_workers.sessions.survivors import choose

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.link.plan import LinkPlan

logger = logging.getLogger(__name__)

_MOST_SEGMENTS = 1024  # of a session; what stands behind them is computed


class _Allows(Protocol):
    """See `fidelity.monitor.Fidelity.allows`."""

    def __call__(self, point: OperatingPoint, made: float = ...) -> bool: ...


class SessionLinks:
    """Sessions of one engine's links.

    Args:
        allows: whether requests may be served at an operating point, and with KV made when.
        free_text: see `prefill_workers.link.keys.contexts`.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        library: Library,
        store: SessionStore,
        allows: _Allows,
        free_text: int,
    ) -> None:
        self._engine, self._library, self.store = engine, library, store
        self._allows, self._free_text = allows, free_text

    def open(self, request: LinkRequest) -> SessionPlan | None:
        """Align a request with its session, and start loading what serves; None: it has no session.

        May wait for a tier, for the session's manifest.
        """
        ref = request.session
        if ref is None or not uses_session(request.mode):
            return None
        opened = self.store.open(request.tenant, ref)
        session = opened.session
        found = segments(request, (kept.text for kept in session.segments if kept.text))
        matches = align([kept.id for kept in session.segments], [one.id for one in found], session.left)
        if found and found[-1].chunk is not None:
            matches[-1] = Match(MatchKind.NEW)  # a forward ends every prompt, and may need the chunk's embeddings
        served = choose(
            found,
            matches,
            [self._allowed(kept, asked_by(request)) for kept in session.segments],
            exact=request.mode.kind is ModeKind.EXACT or not self._allows(OperatingPoint.SURVIVED),
            refreshed=ref.survivors is not Survivors.KEEP,
            mended=ref.survivors is Survivors.REMOVAL,
            free_text=self._free_text,
            cascade_tokens=ref.cascade_tokens,
        )
        limit = len(request.token_ids) - observed(request)
        ids = tuple(segment.id for segment in found)
        load = partial(self._library.load, "segment", tenant=request.tenant)
        plans = [
            SegmentPlan(
                segment,
                match,
                before=None if match.old is None else session.segments[match.old],
                front=ids[:i],
                kv=kv,
                load=None if kv is None else load(kv.key),
                patch_load=load(kv.patch) if kv is not None and kv.patch else None,
            )
            for i, (segment, match, kv) in enumerate(zip(found, matches, served, strict=True))
        ]
        return SessionPlan(session, plans, limit, opened)

    def _allowed(self, segment: KeptSegment, asked: str) -> KeptSegment:
        """The segment without KV that was linked for others, or at a point that is off, or was since.

        What idle time computes is exact.
        """

        def allowed(kv: KeptKV | None) -> KeptKV | None:
            if kv is None or (kv.points and kv.asked != asked):
                return None
            return kv if all(self._allows(OperatingPoint(point), kv.made) for point in kv.points) else None

        return replace(segment, conditioned=allowed(segment.conditioned), mended=allowed(segment.mended))

    def contents(self, request: PrefetchRequest) -> Collection[str]:
        """Contents of which the session of a prompt on its way keeps KV, as far as memory knows."""
        ref = request.session
        if ref is None or not uses_session(request.mode):
            return ()
        session = self.store.resident(request.tenant, ref)
        return () if session is None else [one.content for one in session.segments if one.content and one.conditioned]

    def place(self, plan: SessionPlan, positions: Tensor, known: Run) -> SessionPlan:
        """Place the KV that serves a request, as far as it comes in time and fits.

        Waits for the library, as long as for one load.

        Args:
            positions: of all tokens, in the shifted frame.
            known: first tokens of the prompt that are placed in another way.
        """
        first = positions.reshape(-1, positions.shape[-1])[0]
        starts = first[torch.tensor([one.segment.start for one in plan.segments])].tolist()
        until = time.monotonic() + self._library.settings.load_timeout_s
        segments: list[SegmentPlan] = []
        placed: list[PlacedChunk] = []
        for one, position in zip(plan.segments, starts, strict=True):
            here = replace(one, position=position, load=None, patch_load=None)
            if (come := self._come(one, position, until)) is None:
                segments.append(replace(here, kv=None))
                continue
            record, patch = come
            segments.append(replace(here, knows=record.antecedents))
            whole = PlacedChunk(record.kv, patch, position - record.at, one.segment.run, kv_lasts=True)
            if (part := whole.within(known.stop, plan.limit)) is not None:
                placed.append(part)
        runs = [one.run for one in placed]
        rotated = min((one.run.start for one in placed if one.position), default=positions.shape[-1])
        return replace(plan, segments=segments, placed=placed, runs=runs, rotated_from=rotated)

    def _come(self, one: SegmentPlan, position: int, until: float) -> tuple[SegmentRecord, Patch | None] | None:
        """Wait for the kept KV of a segment and its removal patch.

        None: nothing serves it at that position, or it does not come in time.
        """
        record = None if one.load is None else self._library.wait(one.load, until)
        mend = None if one.patch_load is None else self._library.wait(one.patch_load, until)
        if not isinstance(record, SegmentRecord) or not self._fits(record, len(one.segment), position):
            return None
        if one.patch_load is None:
            return record, None
        if not isinstance(mend, SegmentPatchRecord) or mend.layout != record.layout:
            return None
        return record, mend.patch

    def _fits(self, record: SegmentRecord, tokens: int, position: int) -> bool:
        """True if a record is of so many tokens and may stand there: pages of few bits would quantise it once more."""
        fits = record.layout == self._engine.layout and record.kv.shape[1] == tokens
        return fits and (record.at == position or not self._engine.has_quantised_kv)

    def keep(self, plan: LinkPlan) -> None:
        """Keep the KV of a finished link's segments that its session has not got.

        What cannot be read or stored is not kept.
        """
        session = plan.session
        if session is None:
            return
        stored: list[KeptKV] = []
        try:
            kept = self._kept(plan, session, stored)
            self.store.put(session.session.moved_on(kept, time.time()), opened=session.opened)
        except (RuntimeError, StoreError):  # memory, most likely: the link itself has ended well
            logger.exception("session %.32r keeps nothing of its last request", session.session.id)
            self.store.let_go(session.opened)
            self.store.discard(session.session.tenant, stored)

    def _kept(self, plan: LinkPlan, session: SessionPlan, stored: list[KeptKV]) -> tuple[KeptSegment, ...]:
        """Segments of a finished link; `stored` takes their KV that is new."""
        kept: list[KeptSegment] = []
        is_exact, points = True, dict[str, None]()  # approximate ones up to here
        for i, one in enumerate(session.segments[:_MOST_SEGMENTS]):
            segment, kv, before = one.segment, one.kv, one.before
            chunk = None if segment.chunk is None else plan.chunks[segment.chunk]
            is_exact = is_exact and (chunk is None or chunk.made_at in EXACT_POINTS)
            if chunk is not None and chunk.made_at not in (*EXACT_POINTS, OperatingPoint.SURVIVED):
                points[str(chunk.made_at)] = None
            if kv is not None:
                assert before is not None
                is_exact = is_exact and one.point is OperatingPoint.PREFIX
                points |= dict.fromkeys(kv.points)
                if one.point is OperatingPoint.SURVIVED:
                    points[str(one.point)] = None
                idle = (before.refreshed, before.ahead, before.mended)
                refreshed, ahead, mended = (None if made is kv else made for made in idle)
                kept.append(replace(before, conditioned=kv, refreshed=refreshed, ahead=ahead, mended=mended))
                continue
            content = "" if chunk is None else chunk.span.content
            text = () if content else tuple(map(int, plan.request.token_ids[segment.start : segment.stop]))
            conditioned = None
            if not plan.prefix.is_turned(segment.run, self._engine.block_size):  # else it would be turned twice
                conditioned = self._read(plan, session, i, content, is_exact=is_exact, points=tuple(points))
                stored.append(conditioned)
            refreshed = None if before is None else before.refreshed
            kept.append(KeptSegment(segment.id, len(segment), content, text, conditioned, refreshed))
        return tuple(kept)

    def _read(
        self, plan: LinkPlan, session: SessionPlan, i: int, content: str, *, is_exact: bool, points: tuple[str, ...]
    ) -> KeptKV:
        """Read a segment's KV out of a link's blocks, and store it."""
        one, request = session.segments[i], plan.request
        segment = one.segment
        kv = self._engine.read_kv(plan.sequence.blocks, segment.start, len(segment))
        seconds = plan.compute_ms * 1e-3 * len(segment) / max(plan.tokens_computed, 1)
        behind = [span.content for span in request.chunks if span.stop <= segment.start]
        for front in session.segments[:i]:
            behind += front.knows  # what it learnt of these from survivors in front of it
        at, tenant = one.position, request.tenant
        kept = self.store_segment(tenant, kv, at, one.front, content, behind, seconds, is_exact=is_exact)
        return replace(kept, points=points, asked=asked_by(request) if points else "", made=session.opened_at)

    def store_segment(
        self,
        tenant: str,
        kv: Tensor,
        at: int,
        front: tuple[str, ...],
        content: str,
        behind: Sequence[str],
        seconds: float,
        *,
        is_exact: bool,
    ) -> KeptKV:
        """Store KV [layers, tokens, features] of a segment.

        Args:
            at: RoPE position of its first token.
            front: ids of the segments that it was computed behind; `behind`: contents of the chunks among these.
            seconds: what computing it took.
        """
        record = SegmentRecord(
            key=secrets.token_hex(32),
            fingerprint=self._engine.fingerprint,
            tenant=tenant,
            content=content,
            antecedents=tuple(dict.fromkeys(behind)),
            recompute_seconds=seconds,
            layout=self._engine.layout,
            kv=kv,
            at=at,
        )
        self._library.put(record)
        return KeptKV(record.key, front, is_exact, kv.nbytes)

    def store_removal(self, kept: KeptKV, front: tuple[str, ...], record: SegmentRecord, patch: Patch) -> KeptKV:
        """Store a removal patch of kept KV, whose `record` it is.

        Args:
            front: ids of the segments that the KV stands behind with the patch.
        """
        mend = SegmentPatchRecord(
            key=secrets.token_hex(32),
            fingerprint=self._engine.fingerprint,
            tenant=record.tenant,
            content=record.content,
            antecedents=record.antecedents,
            recompute_seconds=record.recompute_seconds,
            layout=record.layout,
            patch=patch,
        )
        self._library.put(mend)
        return replace(kept, behind=front, is_exact=False, patch=mend.key, patch_nbytes=patch.nbytes)
