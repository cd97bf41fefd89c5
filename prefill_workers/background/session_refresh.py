"""Refresh of sessions in idle time: exact KV of segments, before older ones leave.

| pass | computed                                                                | served exactly                     |
|------|-------------------------------------------------------------------------|------------------------------------|
| 1    | every chunk, with the text that follows it, behind the head alone       | as the window's oldest, never stale |
| 2    | what will be the second oldest behind the oldest, then the third behind | once the oldest chunk has left     |
|      | both, and so on                                                         |                                    |

With `survivors: removal` neither: the next window is computed as a whole, and what the KV that is kept differs by
becomes a patch of rank 32 (kamera.md §5). It takes the second pass's forwards, and a small part of its bytes.

The head is the text before the first chunk. A survivor still knows what left, the oldest one most: it stood right
behind it. So pass 1, one small forward for every new chunk, comes first; pass 2 goes on while idle time lasts, until
the next window is exact as a whole. Sessions take turns, a chunk each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kvstore.library import Library
from kvstore.operator.apply import deficit_at
from kvstore.operator.patch import PatchKind
from kvstore.records.patch_form import PatchForm
from prefill_workers.background.brought import brought
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.place_kv import PlacedChunk, write_chunks
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.link.session_links import SessionLinks
from prefill_workers.patches.scratch import Pieces, ResumableTask, Scratch, aside
from prefill_workers.protocol import Survivors
from prefill_workers.sequence import Embedded, LinkSequence, Run
from prefill_workers.sessions.manifest import KeptKV, MadeIdle
from prefill_workers.sessions.segments import Segment

logger = logging.getLogger(__name__)

_REMOVAL = PatchForm(rank=32)
_MOST_WAITING = 64  # sessions; each holds its last plan

Name = tuple[str, str]  # tenant, session id


@dataclass(frozen=True)
class _Stretch:
    """Segments to be computed behind others, whose exact KV is stored: `front` has their records.

    `made`: what it becomes.
    """

    front: Sequence[tuple[Segment, KeptKV]]
    lacking: Sequence[Segment]
    made: MadeIdle = "refreshed"

    @property
    def segments(self) -> list[Segment]:
        return [*(segment for segment, _ in self.front), *self.lacking]


class SessionRefresh:
    """Queue of sessions whose segments are computed anew. Belongs to the prefill loop's thread.

    Args:
        scratch: where its sequences lie. Between `step`s of one that `is_running` it is the refresh's own.
    """

    def __init__(self, engine: PrefillEngine, library: Library, links: SessionLinks, scratch: Scratch) -> None:
        self._engine, self._library, self._links, self._scratch = engine, library, links, scratch
        self._waiting: dict[Name, tuple[LinkPlan, Iterator[_Stretch]]] = {}
        self._task: tuple[LinkPlan, ResumableTask[None]] | None = None
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="session-ask")

    def __len__(self) -> int:
        """Sessions that wait, and one that is being computed."""
        return len(self._waiting) + (self._task is not None)

    @property
    def is_running(self) -> bool:
        """True if a refresh uses the scratch blocks."""
        return self._task is not None

    def offer(self, plan: LinkPlan) -> None:
        """Queue the session of a finished link, in place of an earlier link of it."""
        ref = plan.request.session
        if plan.session is None or ref is None or ref.survivors not in (Survivors.REFRESH, Survivors.REMOVAL):
            return
        self._waiting.pop((plan.request.tenant, ref.id), None)
        self._waiting[plan.request.tenant, ref.id] = plan, self._stretches(plan)
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def forget(self, content: str, tenant: str) -> None:
        """Refresh nothing more of links that brought a deleted content."""
        self._waiting = {
            name: waiting for name, waiting in self._waiting.items() if not brought(waiting[0].request, content, tenant)
        }
        if self._task is not None and brought(self._task[0].request, content, tenant):
            self._task = None

    def step(self) -> None:
        """Do the next piece: at most one forward."""
        if self._task is None:
            self._begin()
            return
        plan, task = self._task
        over = True
        try:
            over = task.go_on()
        except Exception:
            self._give_up(plan)
            raise
        finally:
            if over:
                self._task = None

    def _give_up(self, plan: LinkPlan) -> None:
        """Refresh nothing more of a link; of a later one of its session, all the same."""
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting[0] is not plan}

    def _begin(self) -> None:
        """Begin with the next stretch of the session that waits longest, or be done with it."""
        name, (plan, stretches) = next(iter(self._waiting.items()))
        del self._waiting[name]
        if (stretch := next(stretches, None)) is not None:
            self._waiting[name] = plan, stretches  # others first
            self._task = plan, ResumableTask(self._compute(name, plan, stretch))

    def _stretches(self, plan: LinkPlan) -> Iterator[_Stretch]:
        """Segments that lack exact KV, one stretch a chunk: of pass 1, then of pass 2, the oldest chunk's first."""
        assert plan.session is not None
        assert plan.request.session is not None
        heads, groups = _grouped([one.segment for one in plan.session.segments])
        if plan.request.session.survivors is Survivors.REMOVAL:
            if len(groups) > 1:
                yield from self._stretch(plan, heads, list(chain.from_iterable(groups[1:])), "mended")
            return
        for group in groups:
            yield from self._stretch(plan, heads, group)
        for i in range(2, len(groups)):
            front = [*heads, *chain.from_iterable(groups[1:i])]
            yield from self._stretch(plan, front, groups[i], "ahead")

    def _stretch(
        self, plan: LinkPlan, front: Sequence[Segment], group: Sequence[Segment], made: MadeIdle = "refreshed"
    ) -> Iterator[_Stretch]:
        """Segments of a chunk and its text without exact KV behind `front`; none if `front` has none itself.

        To be mended, all of them.
        """
        assert plan.request.session is not None
        session = self._links.store.resident(plan.request.tenant, plan.request.session)
        if session is None:
            return
        kept: dict[str, list[KeptKV]] = {}  # texts may recur
        for one in session.segments:
            kept.setdefault(one.id, []).extend(one.records())
        known = _exact([*front, *(() if made == "mended" else group)], kept)
        lacking = [segment for segment in group[max(0, len(known) - len(front)) :] if segment.id in kept]
        stretch = _Stretch(known, lacking, made)
        if len(known) >= len(front) and lacking and sum(map(len, stretch.segments)) <= self._scratch.tokens:
            yield stretch

    def _compute(self, name: Name, plan: LinkPlan, stretch: _Stretch) -> Pieces[None]:
        """Compute a stretch behind what is stored, and keep it. Gives the session up if something is gone."""
        tenant, id = name
        starts, positions = self._laid_out(plan, stretch.segments)
        for (segment, kv), start in zip(stretch.front, starts[: len(stretch.front)], strict=True):
            record = yield from aside(self._asking, self._library.get_segment, kv.key, tenant)
            if record is None or record.kv.shape[1] != len(segment):
                self._give_up(plan)
                return
            at = int(positions.reshape(-1, positions.shape[-1])[0, start])
            run = Run(start, start + len(segment))
            write_chunks(self._engine, self._scratch.blocks, [PlacedChunk(record.kv, None, at - record.at, run)])
            yield  # a piece each: a window's KV may be gigabytes
        embedded: list[Embedded] = []
        for segment, start in zip(stretch.lacking, starts[len(stretch.front) :], strict=True):
            if segment.chunk is None or not (chunk := plan.chunks[segment.chunk]).span.needs_embeddings:
                continue
            embeddings = yield from self._embeddings(chunk)
            if embeddings is None:
                self._give_up(plan)
                return
            embedded.append(Embedded(start + chunk.span.first - segment.start, embeddings, chunk.span.is_embed))
        tokens = torch.cat([plan.sequence.token_ids[segment.start : segment.stop] for segment in stretch.segments])
        sequence = LinkSequence(tokens, positions, self._scratch.blocks, embedded)
        yield from self._scratch.compute(self._engine, sequence, starts[len(stretch.front)])
        found: list[tuple[str, KeptKV]] = []  # texts may recur: of equal ones the last is taken
        try:
            if stretch.made == "mended":
                yield from self._mend(plan, stretch, starts, positions, found)
            else:
                self._keep(plan, stretch, starts, positions, found)
            self._links.store.add_refreshed(tenant, id, dict(found), stretch.made)
        finally:
            self._links.store.discard(tenant, [kv for _, kv in found])

    def _keep(
        self,
        plan: LinkPlan,
        stretch: _Stretch,
        starts: Sequence[int],
        positions: Tensor,
        found: list[tuple[str, KeptKV]],
    ) -> None:
        """Store the exact KV of a stretch's segments, which is in the scratch blocks."""
        for i, segment in enumerate(stretch.lacking, len(stretch.front)):
            kv = self._links.store_segment(
                plan.request.tenant,
                self._engine.read_kv(self._scratch.blocks, starts[i], len(segment)),
                int(positions.reshape(-1, positions.shape[-1])[0, starts[i]]),
                tuple(one.id for one in stretch.segments[:i]),
                _content(plan, segment),
                [content for one in stretch.segments[:i] if (content := _content(plan, one))],
                0.0,
                is_exact=True,
            )
            found.append((segment.id, kv))

    def _mend(
        self,
        plan: LinkPlan,
        stretch: _Stretch,
        starts: Sequence[int],
        positions: Tensor,
        found: list[tuple[str, KeptKV]],
    ) -> Pieces[None]:
        """Store removal patches of a stretch's segments, whose exact KV is in the scratch blocks."""
        assert plan.request.session is not None
        tenant, layout = plan.request.tenant, self._engine.layout
        session = self._links.store.resident(tenant, plan.request.session)
        kept = {} if session is None else {segment.id: segment.conditioned for segment in session.segments}
        recurring = Counter(segment.id for segment in stretch.segments)
        for i, segment in enumerate(stretch.lacking, len(stretch.front)):
            kv = kept.get(segment.id)
            if kv is None or recurring[segment.id] > 1:  # of equal texts the KV is of one, and does not tell of which
                continue
            record = yield from aside(self._asking, self._library.get_segment, kv.key, tenant)
            if record is None or record.kv.shape[1] != len(segment):
                continue
            at = int(positions.reshape(-1, positions.shape[-1])[0, starts[i]])
            exact = self._engine.read_kv(self._scratch.blocks, starts[i], len(segment))
            delta = deficit_at(exact, record.kv, at - record.at, layout)
            patch = yield from aside(self._asking, _REMOVAL.form, delta, layout, PatchKind.removal, self._engine.dtype)
            front = tuple(one.id for one in stretch.segments[:i])
            found.append((segment.id, self._links.store_removal(kv, front, record, patch)))

    def _laid_out(self, plan: LinkPlan, segments: Sequence[Segment]) -> tuple[list[int], Tensor]:
        """First tokens and positions of segments that stand behind one another.

        They stand as close as they would in a prompt that had nothing between them.
        """
        starts, parts = [0], list[Tensor]()
        whole, after = plan.sequence.positions, int(plan.sequence.positions.min()) if segments else 0
        for segment in segments:
            own = whole[..., segment.start : segment.stop]
            parts.append(own - int(own.reshape(-1, own.shape[-1])[0, 0]) + after)
            after = int(parts[-1].max()) + 1
            starts.append(starts[-1] + len(segment))
        return starts[:-1], torch.cat(parts, -1)

    def _embeddings(self, chunk: ChunkPlan) -> Pieces[Tensor | None]:
        """Embeddings of a chunk; None if they are stored nowhere, or are of another number of tokens."""
        if chunk.embeddings is not None:
            return chunk.embeddings
        key = self._engine.embedding_key(chunk.span.content)
        record = yield from aside(self._asking, self._library.get_embedding, key, chunk.keys.owner)
        return None if record is None or len(record.embeddings) != chunk.span.embedded else record.embeddings


def _grouped(segments: Sequence[Segment]) -> tuple[list[Segment], list[list[Segment]]]:
    """The head, and each chunk with the text behind it; not the text behind the last, which may go on."""
    first = next((i for i, segment in enumerate(segments) if segment.chunk is not None), len(segments))
    groups: list[list[Segment]] = []
    for segment in segments[first:]:
        if segment.chunk is not None:
            groups.append([])
        groups[-1].append(segment)
    if groups:
        groups[-1] = groups[-1][:1]
    return list(segments[:first]), groups


def _exact(segments: Sequence[Segment], kept: Mapping[str, Sequence[KeptKV]]) -> list[tuple[Segment, KeptKV]]:
    """The first segments of which exact KV behind just one another is kept, with it."""
    found: list[tuple[Segment, KeptKV]] = []
    front: tuple[str, ...] = ()
    for segment in segments:
        kv = next((kv for kv in kept.get(segment.id, ()) if kv.is_exact and kv.behind == front), None)
        if kv is None:
            break
        found.append((segment, kv))
        front = (*front, segment.id)
    return found


def _content(plan: LinkPlan, segment: Segment) -> str:
    return "" if segment.chunk is None else plan.request.chunks[segment.chunk].content
