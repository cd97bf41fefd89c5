"""Choice of the kept KV that serves a prompt's segments. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefill_workers.sessions.alignment import Match, apart
from prefill_workers.sessions.manifest import KeptKV, KeptSegment
from prefill_workers.sessions.segments import Segment


def choose(
    segments: Sequence[Segment],
    matches: Sequence[Match],
    kept: Sequence[KeptSegment],
    *,
    exact: bool,
    refreshed: bool,
    mended: bool = False,
    free_text: int,
    cascade_tokens: int | None = None,
) -> list[KeptKV | None]:
    """Per segment, the kept KV that serves it; None: it is linked in another way, or computed.

    1. KV that is exact behind just what stands in front of it now.
    2. Unless `exact`: KV with nothing unseen in front, of two the one with less gone. Text up to `free_text` tokens
       counts as seen, as it does for patches: an agent may write a few words where a page was.
    3. Unless `exact`: behind something unseen, such as a recalled segment, the first are computed, until these have
       `cascade_tokens` or more; then what was kept serves, of two the one with less unseen.

    Args:
        refreshed: whether KV that was computed in idle time may serve.
        mended: whether removal patches may serve.
        cascade_tokens: None: all of them are computed.
    """
    ids = tuple(segment.id for segment in segments)
    texts = {segment.id: len(segment) for segment in segments if segment.chunk is None}
    chosen: list[KeptKV | None] = []
    cascaded = 0
    for i, match in enumerate(matches):
        if match.old is None:
            chosen.append(None)
            continue
        found, front = kept[match.old], ids[:i]
        made = (found.refreshed, found.ahead) if refreshed else ()
        patched = (found.mended,) if mended else ()
        candidates = [kv for kv in (*made, *patched, found.conditioned) if kv is not None]
        fitting = next((kv for kv in candidates if kv.is_exact and kv.behind == front), None)
        if fitting is None and not exact:
            able = [(gone, kv) for kv in candidates if (gone := _gone(kv, front, texts, free_text)) is not None]
            fitting = min(able, key=lambda pair: pair[0], default=(0, None))[1]
            if fitting is None and cascade_tokens is not None and cascaded >= cascade_tokens:
                fitting = min(candidates, key=lambda kv: unseen(kv, front), default=None)
            elif fitting is None:
                cascaded += len(segments[i])
        chosen.append(fitting)
    return chosen


def unseen(kv: KeptKV, front: tuple[str, ...]) -> int:
    """Number of segments in front that were not there when KV was computed."""
    return apart(kv.behind, front)[1].total()


def _gone(kv: KeptKV, front: tuple[str, ...], texts: Mapping[str, int], free_text: int) -> int | None:
    """Segments that were in front when KV was computed, and are not now; None if some of the front was never seen."""
    if kv.behind == front:
        return 0
    gone, unseen = apart(kv.behind, front)
    words = 0
    for id, count in unseen.items():
        if id not in texts:
            return None
        words += texts[str(id)] * count
    return None if words > free_text else gone.total()
