"""Manifest of a session: its last prompt's segments, and the records of their KV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

_KV = ("conditioned", "refreshed", "ahead", "mended")  # fields of a segment
MadeIdle = Literal["refreshed", "ahead", "mended"]  # fields that idle time fills
MOST_LEFT = 256  # segments that left, of which it is remembered that they were there


@dataclass(frozen=True)
class KeptKV:
    """Conditioned KV of one segment, as a record of the library.

    `behind` are the ids of what stood in front when it was computed; `is_exact`: it equals a full prefill behind just
    these. `nbytes` are the KV's. `patch`: the KV is the record's with a removal patch, this other record.
    `points`: approximate operating points at which it, or what stands in front of it, was linked, for requests of that
    mode and text alone (`asked`, see `prefix_hits.asked_by`); `made`: Unix seconds, when that link was opened.
    """

    key: str
    behind: tuple[str, ...]
    is_exact: bool
    nbytes: int
    patch: str = ""
    patch_nbytes: int = 0
    points: tuple[str, ...] = ()
    asked: str = ""
    made: float = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of its records, by their keys."""
        return {self.key: self.nbytes} | ({self.patch: self.patch_nbytes} if self.patch else {})


@dataclass(frozen=True)
class KeptSegment:
    """A segment of a session's last prompt.

    `content`: of its chunk; "": text, whose tokens are `text`. `conditioned` is the KV that it was last linked with,
    None where there was no room for it. Made in idle time: `refreshed`, its KV behind the prompt's head alone, and
    `ahead`, behind what will stand in front of it once the window's oldest chunk has left; `mended`, what it was linked
    with and a patch that takes that chunk out.
    """

    id: str
    tokens: int
    content: str = ""
    text: tuple[int, ...] = ()
    conditioned: KeptKV | None = None
    refreshed: KeptKV | None = None
    ahead: KeptKV | None = None
    mended: KeptKV | None = None

    def records(self) -> Iterator[KeptKV]:
        """KV that is stored of it."""
        yield from (kv for kv in (self.conditioned, self.refreshed, self.ahead, self.mended) if kv is not None)


@dataclass(frozen=True)
class Session:
    """Session of one tenant.

    `left`: ids of segments that have left; `created`, `used`: Unix seconds.
    """

    id: str
    tenant: str
    created: float
    used: float
    segments: tuple[KeptSegment, ...] = ()
    left: tuple[str, ...] = ()
    parent: str | None = None

    @property
    def contents(self) -> tuple[str, ...]:
        """Content ids of its chunks, each once."""
        return tuple(dict.fromkeys(segment.content for segment in self.segments if segment.content))

    @property
    def tokens(self) -> int:
        """Tokens of its last prompt."""
        return sum(segment.tokens for segment in self.segments)

    def records(self) -> Iterator[KeptKV]:
        """KV that is stored of all segments."""
        for segment in self.segments:
            yield from segment.records()

    def moved_on(self, segments: tuple[KeptSegment, ...], now: float) -> Session:
        """The session after its next prompt."""
        ids = {segment.id for segment in segments}
        left = dict.fromkeys((*self.left, *(segment.id for segment in self.segments)))
        remembered = tuple(one for one in left if one not in ids)[-MOST_LEFT:]
        return replace(self, segments=segments, left=remembered, used=now)

    def forked(self, id: str, now: float, *, clean: bool) -> Session:
        """A session of another name that shares all records of this one, or, `clean`, none."""
        if clean:
            left = (*self.left, *(segment.id for segment in self.segments))[-MOST_LEFT:]
            return Session(id, self.tenant, now, now, left=left, parent=self.id)
        return replace(self, id=id, created=now, used=now, parent=self.id)

    def ended(self) -> Session:
        """Remnant of a deleted session, for a sweep: the keys of its records."""
        return replace(self, used=0.0, left=(), segments=tuple(replace(one, text=()) for one in self.segments))

    def refreshed(self, found: Mapping[str, KeptKV], made: MadeIdle = "refreshed") -> Session:
        """The session with KV of its segments, by their ids, that was made in idle time.

        `made`: the field of a segment that it is.
        """

        ids = tuple(segment.id for segment in self.segments)
        chunks = [i for i, segment in enumerate(self.segments) if segment.content]
        oldest, second = chunks[:2] if len(chunks) > 1 else (0, 0)

        def with_kv(i: int, one: KeptSegment) -> KeptSegment:
            kv, front = found.get(one.id), ids[:i]
            if kv is None:
                return one
            if made == "refreshed":
                is_elsewhere = not one.content and kv.behind[-1:] not in ((), front[-1:])  # of an equal text
                return one if is_elsewhere else replace(one, refreshed=kv)
            if kv.behind not in (front, front[:oldest] + front[second:]):  # of an equal segment elsewhere
                return one
            return replace(one, ahead=kv) if made == "ahead" else replace(one, mended=kv)

        return replace(self, segments=tuple(with_kv(i, one) for i, one in enumerate(self.segments)))

    def without(self, content: str) -> Session:
        """The session without a content's segments and without KV computed behind them."""
        gone = {segment.id for segment in self.segments if segment.content == content}

        def clean(kv: KeptKV | None) -> KeptKV | None:
            return None if kv is None or not gone.isdisjoint(kv.behind) else kv

        left = tuple(
            replace(
                segment,
                conditioned=clean(segment.conditioned),
                refreshed=clean(segment.refreshed),
                ahead=clean(segment.ahead),
                mended=clean(segment.mended) if clean(segment.conditioned) is not None else None,
            )
            for segment in self.segments
            if segment.id not in gone
        )
        return replace(self, segments=left)

    def to_json(self) -> bytes:
        """The manifest as a JSON document; ids that segments stand behind are written once."""
        ids = list(dict.fromkeys(id for kv in self.records() for id in kv.behind))
        place = {id: i for i, id in enumerate(ids)}

        def written(kv: KeptKV | None) -> dict[str, object] | None:
            return None if kv is None else {**vars(kv), "behind": [place[id] for id in kv.behind]}

        document = {
            **{name: getattr(self, name) for name in ("id", "tenant", "created", "used", "left", "parent")},
            "ids": ids,
            "segments": [
                {
                    **{name: getattr(segment, name) for name in ("id", "tokens", "content", "text")},
                    **{field: written(getattr(segment, field)) for field in _KV},
                }
                for segment in self.segments
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, manifest: bytes) -> Session:
        """Read a manifest. Raises ValueError, KeyError or TypeError for one of another form."""
        document = json.loads(manifest)
        ids = document.pop("ids")

        def read(kv: dict[str, object] | None) -> KeptKV | None:
            if kv is None:
                return None
            behind = tuple(ids[place] for place in kv["behind"])  # type: ignore[attr-defined]
            points: tuple[str, ...] = tuple(kv.get("points", ()))  # type: ignore[arg-type]
            return KeptKV(**{**kv, "behind": behind, "points": points})  # type: ignore[arg-type]

        segments = tuple(
            KeptSegment(
                **{**segment, "text": tuple(segment["text"]), **{field: read(segment.get(field)) for field in _KV}}
            )
            for segment in document.pop("segments")
        )
        return cls(**{**document, "left": tuple(document["left"]), "segments": segments})
