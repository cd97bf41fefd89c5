"""Plan of a link's session: the kept KV that serves, its place, and its part of the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.tiers.loading import Loading
from prefill_workers.link.lookups import Stored
from prefill_workers.link.place_kv import PlacedChunk
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import ChunkOutcome, SessionOutcome
from prefill_workers.sequence import Run
from prefill_workers.sessions.alignment import Match
from prefill_workers.sessions.manifest import KeptKV, KeptSegment, Session
from prefill_workers.sessions.segments import Segment
from prefill_workers.sessions.store import Opened
from prefill_workers.sessions.survivors import unseen


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """A segment of a prompt, and the kept KV that serves it.

    Attributes:
        before: what the session had of it.
        front: ids of the segments in front of it.
        kv: what serves it, if anything does; `load` and `patch_load` bring it and its removal patch.
        position: RoPE position of its first token.
        knows: contents that `kv` was computed behind.
    """

    segment: Segment
    match: Match
    before: KeptSegment | None
    front: tuple[str, ...]
    kv: KeptKV | None = None
    load: Loading | None = None
    patch_load: Loading | None = None
    position: int = 0
    knows: Sequence[str] = ()

    @property
    def point(self) -> OperatingPoint | None:
        """Operating point of what serves it."""
        if self.kv is None:
            return None
        is_exact = self.kv.is_exact and self.kv.behind == self.front
        return OperatingPoint.PREFIX if is_exact else OperatingPoint.SURVIVED

    @property
    def is_refreshed(self) -> bool:
        """True if what serves it was computed, or mended, in idle time."""
        if self.kv is None or self.before is None:
            return False
        return any(self.kv is one for one in (self.before.refreshed, self.before.ahead, self.before.mended))

    @property
    def reason(self) -> str:
        """Reason of its operating point, for people."""
        if self.kv is not None and self.kv.patch:
            return "kept by the session, with a patch that takes out what has left"
        if self.is_refreshed:
            return "kept by the session: computed anew in idle time behind what stands in front of it"
        if self.point is OperatingPoint.PREFIX:
            return "kept by the session: computed behind just what stands in front of it"
        if self.kv is not None and (points := [one for one in self.kv.points if one != OperatingPoint.SURVIVED]):
            return f"kept by the session as it was linked, with KV that was {' and '.join(points)}"
        if self.kv is not None and (new := unseen(self.kv, self.front)):
            return f"kept by the session as it was computed; segments that are new in front of it since: {new}"
        return "kept by the session: computed behind what stands in front of it and what has left"


@dataclass(eq=False)
class SessionPlan:
    """Part of a link that its session serves.

    Attributes:
        placed: the KV that serves, with its place, until it is written; `runs` are the tokens that it covers.
        limit: first token that the link's own forward computes, whatever is kept.
        rotated_from: first token whose kept KV stands at another position than where it was computed.
        opened: holds the session's records.
        opened_at: Unix seconds.
    """

    session: Session
    segments: Sequence[SegmentPlan]
    limit: int
    opened: Opened
    placed: Sequence[PlacedChunk] = ()
    runs: Sequence[Run] = ()
    rotated_from: int = 0
    opened_at: float = field(default_factory=time.time)

    @property
    def stored(self) -> list[Stored]:
        """Records that serve."""
        served = (one.kv for one in self.segments if one.kv is not None)
        return [("segment", key, self.session.tenant) for kv in served for key in kv.sizes]

    @property
    def points(self) -> list[OperatingPoint | None]:
        """Operating points, by segment."""
        return [one.point for one in self.segments]

    @property
    def approximate(self) -> set[OperatingPoint]:
        """Approximate operating points at which the KV that serves was linked."""
        return {OperatingPoint(point) for one in self.segments if one.kv is not None for point in one.kv.points}

    @property
    def served_chunks(self) -> set[int]:
        """Chunks that kept KV serves, by index."""
        return {one.segment.chunk for one in self.segments if one.kv is not None and one.segment.chunk is not None}

    def chunk_outcomes(self) -> dict[int, ChunkOutcome]:
        """Outcomes of chunks that kept KV serves, by index."""
        return {
            chunk: ChunkOutcome(len(one.segment), one.point, chunk, one.reason)
            for one in self.segments
            if one.point is not None and (chunk := one.segment.chunk) is not None
        }

    @property
    def exact_tokens(self) -> int:
        """First tokens of the prompt among which no kept KV is approximate."""
        survivors = (one.segment.start for one in self.segments if one.point is OperatingPoint.SURVIVED)
        return min(survivors, default=self.segments[-1].segment.stop if self.segments else 0)

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
        return [left for one in placed if (left := one.within(known, one.run.stop)) is not None]

    def outcome(self) -> SessionOutcome:
        """Counts for the request's report."""
        counts = Counter[str]()
        for one in self.segments:
            if one.point is not None:
                counts[str(one.point)] += 1
                counts["refreshed"] += one.is_refreshed
            else:
                counts["computed" if one.before is not None else str(one.match.kind)] += 1
        return SessionOutcome(**counts, tokens_reused=sum(map(len, self.runs)))
