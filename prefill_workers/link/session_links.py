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
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvstore.errors import StoreError
from kvstore.library import Library
from kvstore.operator.patch import Patch
from kvstore.records.record import SegmentPatchRecord, SegmentRecord
from kvstore.tiers.loading import Loading
from prefill_workers.compaction.plan import observed
from prefill_workers.link.lookups import Stored
from prefill_workers.link.place_kv import PlacedChunk
from prefill_workers.modes import EXACT_POINTS, ModeKind, OperatingPoint, uses_session
from prefill_workers.protocol import ChunkOutcome, LinkRequest, PrefetchRequest, SessionOutcome, Survivors
from prefill_workers.sequence import Run
from prefill_workers.sessions.alignment import Match, MatchKind, align
from prefill_workers.sessions.manifest import KeptKV, KeptSegment, Session
from prefill_workers.sessions.segments import Segment, segments
from prefill_workers.sessions.store import Opened, SessionStore
from prefill_workers.sessions.survivors import choose, unseen

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.link.plan import LinkPlan

logger = logging.getLogger(__name__)

_MOST_SEGMENTS = 1024  # of a session; what stands behind them is computed


@dataclass(eq=False)
class SessionPlan:
    """Part of a link that its session serves.

    Per segment: its match and its RoPE position; if kept KV serves it, that, the loads of it and of its patch, and its
    operating point. `placed` is that KV with its place, until it is written; `runs` are the tokens that it covers.
    """

    session: Session
    segments: Sequence[Segment]
    matches: Sequence[Match]
    served: Sequence[KeptKV | None]
    loads: Sequence[Loading | None]
    patch_loads: Sequence[Loading | None] = ()
    positions: Sequence[int] = ()
    points: Sequence[OperatingPoint | None] = ()
    placed: Sequence[PlacedChunk] = ()
    runs: Sequence[Run] = ()
    limit: int = 0  # first token that the link's own forward computes whatever is kept
    rotated_from: int = 0  # first token whose kept KV stands at another position than where it was computed
    knows: Sequence[Sequence[str]] = ()  # by segment, contents that its kept KV was computed behind
    opened: Opened | None = None  # holds its records
    opened_at: float = field(default_factory=time.time)  # Unix seconds

    def __post_init__(self) -> None:
        ids = tuple(segment.id for segment in self.segments)
        self.points = [
            None
            if kv is None
            else OperatingPoint.PREFIX
            if kv.is_exact and kv.behind == ids[:i]
            else OperatingPoint.SURVIVED
            for i, kv in enumerate(self.served)
        ]

    @property
    def stored(self) -> list[Stored]:
        """Records that serve."""
        return [("segment", key, self.session.tenant) for kv in self.served if kv is not None for key in kv.sizes]

    def front(self, i: int) -> tuple[str, ...]:
        """Ids of the segments in front of one."""
        return tuple(segment.id for segment in self.segments[:i])

    @property
    def served_chunks(self) -> set[int]:
        """Chunks that kept KV serves, by index."""
        pairs = zip(self.segments, self.served, strict=True)
        return {segment.chunk for segment, kv in pairs if kv is not None and segment.chunk is not None}

    def chunk_outcomes(self) -> dict[int, ChunkOutcome]:
        """Outcomes of chunks that kept KV serves, by index."""
        return {
            segment.chunk: ChunkOutcome(len(segment), point, segment.chunk, self._reason(i))
            for i, (segment, point) in enumerate(zip(self.segments, self.points, strict=True))
            if point is not None and segment.chunk is not None
        }

    @property
    def exact_tokens(self) -> int:
        """First tokens of the prompt among which no kept KV is approximate."""
        pairs = zip(self.segments, self.points, strict=True)
        survivors = (segment.start for segment, point in pairs if point is OperatingPoint.SURVIVED)
        return min(survivors, default=self.segments[-1].stop if self.segments else 0)

    @property
    def shareable_tokens(self) -> int:
        """First tokens whose blocks other prompts may begin with.

        No KV among them is approximate, or was rotated: it would be rotated once more in another frame.
        """
        return min(self.exact_tokens, self.rotated_from)

    def left_to_write(self, known: int) -> list[PlacedChunk]:
        """Take the kept KV that is to be written, with its place.

        Not that of the first `known` tokens, whose blocks others may read.
        """
        placed, self.placed = self.placed, ()
        left: list[PlacedChunk] = []
        for one in placed:
            start = max(known, one.run.start)
            if start == one.run.start:
                left.append(one)
            elif start < one.run.stop:
                skipped = start - one.run.start
                patch = None if one.patch is None else one.patch.of_tokens(skipped, len(one.run))
                run = Run(start, one.run.stop)
                left.append(one._replace(kv=one.kv[:, skipped:], patch=patch, run=run, kv_lasts=False))
        return left

    def outcome(self) -> SessionOutcome:
        """Counts for the request's report."""
        counts = Counter[str]()
        for i, (match, point) in enumerate(zip(self.matches, self.points, strict=True)):
            if point is not None:
                counts[str(point)] += 1
                counts["refreshed"] += self._is_refreshed(i)
            else:
                counts["computed" if match.old is not None else str(match.kind)] += 1
        return SessionOutcome(**counts, tokens_reused=sum(map(len, self.runs)))

    def _is_refreshed(self, i: int) -> bool:
        old = self.matches[i].old
        kept, kv = None if old is None else self.session.segments[old], self.served[i]
        if kept is None or kv is None:
            return False
        return any(kv is one for one in (kept.refreshed, kept.ahead, kept.mended))

    def _reason(self, i: int) -> str:
        kv = self.served[i]
        if kv is not None and kv.patch:
            return "kept by the session, with a patch that takes out what has left"
        if self._is_refreshed(i):
            return "kept by the session: computed anew in idle time behind what stands in front of it"
        if self.points[i] is OperatingPoint.PREFIX:
            return "kept by the session: computed behind just what stands in front of it"
        if kv is not None and (new := unseen(kv, self.front(i))):
            return f"kept by the session as it was computed; segments that are new in front of it since: {new}"
        return "kept by the session: computed behind what stands in front of it and what has left"


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
            [self._allowed(kept) for kept in session.segments],
            exact=request.mode.kind is ModeKind.EXACT or not self._allows(OperatingPoint.SURVIVED),
            refreshed=ref.survivors is not Survivors.KEEP,
            mended=ref.survivors is Survivors.REMOVAL,
            free_text=self._free_text,
            cascade_tokens=ref.cascade_tokens,
        )
        load = partial(self._library.load, "segment", tenant=request.tenant)
        loads = [None if kv is None else load(kv.key) for kv in served]
        patches = [load(kv.patch) if kv is not None and kv.patch else None for kv in served]
        limit = len(request.token_ids) - observed(request)
        return SessionPlan(session, found, matches, served, loads, patches, limit=limit, opened=opened)

    def _allowed(self, segment: KeptSegment) -> KeptSegment:
        """The segment without KV of operating points that are switched off, or were since it was made.

        What idle time computes is exact.
        """

        def allowed(kv: KeptKV | None) -> KeptKV | None:
            serves = kv is not None and all(self._allows(OperatingPoint(point), kv.made) for point in kv.points)
            return kv if serves else None

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
        starts = first[torch.tensor([segment.start for segment in plan.segments])].tolist()
        until = time.monotonic() + self._library.settings.load_timeout_s
        served: list[KeptKV | None] = []
        knows: list[Sequence[str]] = [()] * len(plan.served)
        placed: list[PlacedChunk] = []
        loads = zip(plan.loads, plan.patch_loads, strict=True)
        for segment, kv, (load, patch_load), position in zip(plan.segments, plan.served, loads, starts, strict=True):
            record = None if load is None else self._library.wait(load, until)
            mend = None if patch_load is None else self._library.wait(patch_load, until)
            if not isinstance(record, SegmentRecord) or not self._fits(record, len(segment), position):
                served.append(None)
                continue
            whole, patch = record.kv, None
            if patch_load is not None:
                if not isinstance(mend, SegmentPatchRecord) or mend.layout != record.layout:
                    served.append(None)
                    continue
                patch = mend.patch
            knows[len(served)] = record.antecedents
            served.append(kv)
            run = Run(max(segment.start, known.stop), min(segment.stop, plan.limit))
            if run.start < run.stop:
                if len(run) < len(segment):
                    begin, stop = run.start - segment.start, run.stop - segment.start
                    whole = whole[:, begin:stop]
                    patch = None if patch is None else patch.of_tokens(begin, stop)
                placed.append(PlacedChunk(whole, patch, position - record.at, run, kv_lasts=whole is record.kv))
        runs = [one.run for one in placed]
        rotated = min((one.run.start for one in placed if one.position), default=positions.shape[-1])
        ended = replace(plan, served=served, loads=(), patch_loads=())
        return replace(ended, positions=starts, placed=placed, runs=runs, rotated_from=rotated, knows=knows)

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
            if session.opened is not None:
                self.store.let_go(session.opened)
            self.store.discard(session.session.tenant, stored)

    def _kept(self, plan: LinkPlan, session: SessionPlan, stored: list[KeptKV]) -> tuple[KeptSegment, ...]:
        """Segments of a finished link; `stored` takes their KV that is new."""
        kept: list[KeptSegment] = []
        is_exact, points = True, dict[str, None]()  # approximate ones up to here
        for i, segment in enumerate(session.segments[:_MOST_SEGMENTS]):
            kv, old = session.served[i], session.matches[i].old
            before = None if old is None else session.session.segments[old]
            chunk = None if segment.chunk is None else plan.chunks[segment.chunk]
            is_exact = is_exact and (chunk is None or chunk.made_at in EXACT_POINTS)
            if chunk is not None and chunk.made_at not in (*EXACT_POINTS, OperatingPoint.SURVIVED):
                points[str(chunk.made_at)] = None
            if kv is not None:
                assert before is not None
                is_exact = is_exact and session.points[i] is OperatingPoint.PREFIX
                points |= dict.fromkeys(kv.points)
                idle = (before.refreshed, before.ahead, before.mended)
                refreshed, ahead, mended = (None if one is kv else one for one in idle)
                kept.append(replace(before, conditioned=kv, refreshed=refreshed, ahead=ahead, mended=mended))
                continue
            content = "" if chunk is None else chunk.span.content
            text = () if content else tuple(map(int, plan.request.token_ids[segment.start : segment.stop]))
            conditioned = self._read(plan, session, i, content, is_exact=is_exact, points=tuple(points))
            stored.append(conditioned)
            refreshed = None if before is None else before.refreshed
            kept.append(KeptSegment(segment.id, len(segment), content, text, conditioned, refreshed))
        return tuple(kept)

    def _read(
        self, plan: LinkPlan, session: SessionPlan, i: int, content: str, *, is_exact: bool, points: tuple[str, ...]
    ) -> KeptKV:
        """Read a segment's KV out of a link's blocks, and store it."""
        segment, request = session.segments[i], plan.request
        kv = self._engine.read_kv(plan.sequence.blocks, segment.start, len(segment))
        seconds = plan.compute_ms * 1e-3 * len(segment) / max(plan.tokens_computed, 1)
        behind = [span.content for span in request.chunks if span.stop <= segment.start]
        behind += chain.from_iterable(session.knows[:i])  # what it learnt of these from survivors in front of it
        at, front = session.positions[i], session.front(i)
        kept = self.store_segment(request.tenant, kv, at, front, content, behind, seconds, is_exact=is_exact)
        return replace(kept, points=points, made=session.opened_at)

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
