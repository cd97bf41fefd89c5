"""Harvest of forwards: canonical KV, deficits and orbit patches, off the request path.

The prefill loop calls it when no link waits (see `background`); every method that computes runs on the engine's thread,
and goes on in pieces (see `scratch`). The library is asked by other threads meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from kvstore.catalog.index import prefix_key
from kvstore.library import Library
from kvstore.operator.apply import deficit_at
from kvstore.operator.patch import PatchKind, set_kind
from kvstore.records.keys import antecedent_key, owner_of
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import CanonicalRecord, EmbeddingRecord, RecordKind
from prefill_workers import modes as policies
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming, Placed, arrange
from prefill_workers.patches.patch_compiler import PatchJob
from prefill_workers.patches.scratch import Pieces, Scratch, aside
from prefill_workers.protocol import ChunkSpan
from prefill_workers.sequence import Embedded, LinkSequence, complement

_ASKING_THREADS = 2  # work that was given up may still keep one of them waiting
_SENT_SECONDS = 60.0  # after which a patch that is not stored has been dropped, or deleted


class Harvester:
    """Keeps what links of one engine have computed.

    Args:
        form: of the patches that it asks for.
        submit_patch: takes a deficit off the request path and stores its patch (see `patch_compiler`). False: it did
            not, too many wait.
    """

    def __init__(
        self, engine: PrefillEngine, library: Library, form: PatchForm, submit_patch: Callable[[PatchJob], object]
    ) -> None:
        self.engine = engine
        self.library = library
        self.form = form
        self._submit_patch = submit_patch
        self._asking = ThreadPoolExecutor(_ASKING_THREADS, thread_name_prefix="harvest-ask")
        self._dtype = str(engine.dtype).removeprefix("torch.")
        self._sent: OrderedDict[tuple[str, str], float] = OrderedDict()  # when, by key and owner of the patch

    def harvestable(self, plan: LinkPlan) -> list[ChunkPlan]:
        """Chunks of a finished plan whose KV was computed whole and may be worth keeping."""
        if not policies.uses_library(plan.request.mode):
            return []
        return [c for c in plan.chunks if not c.is_reused]

    def forms_patch(self, plan: LinkPlan, chunk: ChunkPlan) -> bool:
        """True if a computed chunk's KV is KV(B|A), which its patch is keyed by.

        Not if any of A was linked from stored KV: what a patch or a sum of patches leaves out would go on into patches
        behind it, and outlive the point's being switched off. Nor behind KV of a session that knows what has left, or
        if text stands there that the key says nothing of.
        """
        if plan.session is not None and chunk.span.start > plan.session.exact_tokens:
            return False
        before = plan.chunks[: plan.chunks.index(chunk)]
        return chunk.is_cacheable and all(c.made_at in policies.EXACT_POINTS for c in before)

    def is_kept(self, plan: LinkPlan, chunk: ChunkPlan) -> Pieces[bool]:
        """True if a computed chunk's canonical KV and patch are stored already."""
        if chunk.is_unfit:
            return False
        tenant, owner = plan.request.tenant, owner_of(plan.request.tenant, chunk.span.content)
        if self.forms_patch(plan, chunk) and not (yield from self._has("patch", chunk.patch_key, tenant)):
            return False
        return (yield from self._has("canonical", chunk.canonical_key, owner))

    def is_resident(self, plan: LinkPlan, chunk: ChunkPlan) -> bool:
        """True if a computed chunk `is_kept` according to memory; asks no tier."""
        if chunk.is_unfit:
            return False
        tenant, owner = plan.request.tenant, owner_of(plan.request.tenant, chunk.span.content)
        known = not self.forms_patch(plan, chunk) or self.library.is_resident("patch", chunk.patch_key, tenant)
        return known and self.library.is_resident("canonical", chunk.canonical_key, owner)

    def conditioned(self, plan: LinkPlan, chunk: ChunkPlan) -> Tensor:
        """KV(B|A) of a computed chunk where it stands in the prompt: [layers, tokens, features]."""
        return self.engine.read_kv(plan.sequence.blocks, chunk.span.start, len(chunk.span))

    def canonical(self, plan: LinkPlan, chunk: ChunkPlan, scratch: Scratch) -> Pieces[CanonicalRecord]:
        """KV(B|∅) of a chunk: loaded if it is of the same tokens, or computed alone and stored."""
        tenant = owner_of(plan.request.tenant, chunk.span.content)
        stored = yield from self._canonical(chunk.canonical_key, tenant)
        if stored is not None and stored.kv.shape[1] == len(chunk.span):
            return stored
        lone = self.lone(plan, chunk, scratch.blocks)
        seconds = yield from self._compute(lone, scratch)
        kv = self.engine.read_kv(scratch.blocks, 0, len(lone))
        return self.keep_canonical(plan, chunk, kv, seconds)

    def lone(self, plan: LinkPlan, chunk: ChunkPlan, blocks: Sequence[int]) -> LinkSequence:
        """The chunk as a sequence of its own, from position 0: its KV is KV(B|∅)."""
        span, whole = chunk.span, plan.sequence
        return LinkSequence(
            token_ids=whole.token_ids[span.start : span.stop],
            positions=whole.positions[..., span.start : span.stop] - chunk.start_position,
            blocks=blocks,
            embedded=()
            if chunk.embeddings is None
            else (Embedded(span.first - span.start, chunk.embeddings, span.is_embed),),
        )

    def keep_canonical(self, plan: LinkPlan, chunk: ChunkPlan, kv: Tensor, seconds: float) -> CanonicalRecord:
        """Store KV(B|∅) [layers, tokens, features] of a chunk, which took `seconds` to compute."""
        record = CanonicalRecord(
            key=chunk.canonical_key,
            fingerprint=self.engine.fingerprint,
            tenant=owner_of(plan.request.tenant, chunk.span.content),
            layout=self.engine.layout,
            kv=kv,
            content=chunk.span.content,
            token_ids=self._text(plan, chunk.span),
            recompute_seconds=seconds,
            meta={"modality": chunk.span.modality},
        )
        self.library.put(record)
        return record

    def _text(self, plan: LinkPlan, span: ChunkSpan) -> tuple[int, ...] | None:
        """A text chunk's tokens, the counterpart of embeddings, for computing it again."""
        whole = plan.request.token_ids
        return None if span.needs_embeddings else tuple(map(int, whole[span.start : span.stop]))

    def keep_embeddings(self, plan: LinkPlan, chunk: ChunkPlan) -> None:
        """Store a freshly encoded chunk's embeddings, so that these pixels are not encoded again."""
        if not chunk.is_encoded or chunk.embeddings is None:
            return
        self.library.put(
            EmbeddingRecord(
                key=self.engine.embedding_key(chunk.span.content),
                fingerprint=self.engine.fingerprint,
                tenant=owner_of(plan.request.tenant, chunk.span.content),
                embeddings=chunk.embeddings,
                content=chunk.span.content,
                meta={"modality": chunk.span.modality},
            )
        )

    def harvest(self, plan: LinkPlan, chunk: ChunkPlan, conditioned: Tensor, scratch: Scratch) -> Pieces[None]:
        """Store a computed chunk's canonical KV; send its deficit (eq. 2) to the patch compiler.

        `conditioned`: see the method of that name.
        """
        canonical = yield from self.canonical(plan, chunk, scratch)
        if self.forms_patch(plan, chunk):
            seconds = plan.compute_ms * 1e-3 * len(chunk.span) / max(plan.tokens_computed, 1)
            self._submit_own(plan, chunk, conditioned, canonical, seconds)

    def form_anew(self, plan: LinkPlan, chunk: ChunkPlan, scratch: Scratch) -> Pieces[None]:
        """Send the own patch of a chunk that was computed behind stored KV.

        It takes an exact forward up to the chunk's end. For chunks that text keys: patches of others are compiled ahead
        (see `background.compile_queue`). Not where the patch is stored, canonical KV or embeddings are gone, or the
        prompt's beginning does not fit the scratch blocks.
        """
        request, stop = plan.request, chunk.span.stop
        is_keyed = chunk.is_cacheable and not chunk.is_unfit and chunk.context != request.prefix
        if self.forms_patch(plan, chunk) or not is_keyed or stop > scratch.tokens:
            return
        if (yield from self._has_or_sent(chunk.patch_key, request.tenant)):
            return
        canonical = yield from self._canonical(chunk.canonical_key, owner_of(request.tenant, chunk.span.content))
        if canonical is None:
            return
        embedded: list[Embedded] = []
        for one in plan.chunks[: plan.chunks.index(chunk) + 1]:
            embeddings = one.embeddings
            if embeddings is None and one.span.needs_embeddings:
                embeddings = yield from self._stored_embeddings(one.span.content, request.tenant)
                if embeddings is None:
                    return
            if embeddings is not None:
                embedded.append(Embedded(one.span.first, embeddings, one.span.is_embed))
        whole = plan.sequence
        front = LinkSequence(whole.token_ids[:stop], whole.positions[..., :stop], scratch.blocks, tuple(embedded))
        seconds = yield from self._compute(front, scratch)
        kv = self.engine.read_kv(scratch.blocks, chunk.span.start, len(chunk.span))
        self._submit_own(plan, chunk, kv, canonical, seconds * len(chunk.span) / stop)

    def _submit_own(
        self, plan: LinkPlan, chunk: ChunkPlan, conditioned: Tensor, canonical: CanonicalRecord, seconds: float
    ) -> None:
        before = plan.chunks[: plan.chunks.index(chunk)]
        self._submit(
            kind=PatchKind.own,
            delta=deficit_at(conditioned, canonical.kv, chunk.start_position, self.engine.layout),
            canonical=chunk.canonical_key,
            content=chunk.span.content,
            behind=[(c.canonical_key, c.span.content) for c in before],
            prefix=chunk.context,
            tenant=plan.request.tenant,
            seconds=seconds,
        )

    def _submit(
        self,
        *,
        kind: PatchKind,
        delta: Tensor,
        canonical: str,
        content: str,
        behind: Sequence[tuple[str, str]],
        prefix: Sequence[int],
        tenant: str,
        seconds: float = 0.0,
    ) -> None:
        """Hand a deficit over; `behind` are the antecedents' (canonical key, content id)."""
        antecedent = antecedent_key(prefix, [key for key, _ in behind], ordered=kind is PatchKind.own)
        key = self.form.key(canonical, antecedent, kind)
        taken = self._submit_patch(
            PatchJob(
                key=key,
                kind=kind,
                delta=delta,
                layout=self.engine.layout,
                fingerprint=self.engine.fingerprint,
                dtype=self._dtype,
                tenant=tenant,
                canonical=canonical,
                antecedent=antecedent,
                content=content,
                antecedents=tuple(name for _, name in behind),
                prefix=prefix_key(prefix),
                recompute_seconds=seconds,
            )
        )
        if taken is False:
            return
        now = self._sent[key, tenant] = time.monotonic()
        self._sent.move_to_end((key, tenant))
        while next(iter(self._sent.values())) < now - _SENT_SECONDS:
            self._sent.popitem(last=False)

    # -- orbit ---------------------------------------------------------------------------------------------------------

    def unready(self, plan: LinkPlan) -> OrbitForming:
        """Orders of a plan's distinct chunks, with the embeddings that the plan has."""
        request, whole = plan.request, plan.sequence
        chunks = tuple(
            OrbitChunk(
                key=chunk.canonical_key,
                content=chunk.span.content,
                token_ids=whole.token_ids[chunk.span.start : chunk.span.stop],
                positions=whole.positions[..., chunk.span.start : chunk.span.stop] - chunk.start_position,
                embeddings=chunk.embeddings,
                first=chunk.span.first - chunk.span.start,
                mask=chunk.span.is_embed,
                needs_embeddings=chunk.span.needs_embeddings,
            )
            for chunk in plan.chunks
        )
        return OrbitForming(request.prefix, chunks, request.tenant, request.opening)

    def ready(self, forming: OrbitForming) -> Pieces[OrbitForming | None]:
        """The same with all embeddings; None when some are missing."""
        found: list[OrbitChunk] = []
        for chunk in forming.chunks:
            embedded = yield from self._embedded(chunk, forming.tenant)
            if embedded is None:
                return None
            found.append(embedded)
        return OrbitForming(forming.prefix, tuple(found), forming.tenant, forming.opening)

    def _embedded(self, chunk: OrbitChunk, tenant: str) -> Pieces[OrbitChunk | None]:
        """The chunk with its embeddings, if it needs any; None when they are missing."""
        if not chunk.needs_embeddings or chunk.embeddings is not None:
            return chunk
        embeddings = yield from self._stored_embeddings(chunk.content, tenant)
        return None if embeddings is None else replace(chunk, embeddings=embeddings)

    def _stored_embeddings(self, content: str, tenant: str) -> Pieces[Tensor | None]:
        key, owner = self.engine.embedding_key(content), owner_of(tenant, content)
        stored = yield from aside(self._asking, self.library.get_embedding, key, owner)
        return None if stored is None else stored.embeddings

    def forming(self, plan: LinkPlan) -> Pieces[OrbitForming | None]:
        """Orders of a plan's distinct chunks; None when embeddings are missing."""
        return self.ready(self.unready(plan))

    def lacking(self, forming: OrbitForming) -> Pieces[OrbitForming | None]:
        """The set's orders, `ready` to be run.

        None if the patch behind all of it is stored, or on its way, or if embeddings are not stored.
        """
        keys = [chunk.key for chunk in forming.chunks]
        if len(keys) < 2 or len(set(keys)) < len(keys):
            return None
        behind = antecedent_key(forming.prefix, keys[:-1], ordered=False)
        whole_set = self.form.key(keys[-1], behind, set_kind(len(keys) - 1))
        owner = _set_owner(forming.tenant, forming.prefix, *(chunk.content for chunk in forming.chunks))
        if self._was_sent(whole_set, owner):
            return None
        stored = yield from aside(self._asking, self.library.get_patch, whole_set, owner)
        return (yield from self.ready(forming)) if stored is None else None

    def orbit_step(self, forming: OrbitForming, scratch: Scratch) -> Pieces[bool]:
        """Run the next order of a forming set, send the patches it completes; False after the last."""
        order = next(forming.orders, None)
        if order is None:
            return False
        placed, seconds = yield from self._forward(forming.opening, order, scratch)
        for i, place in enumerate(placed):
            before = [(other.chunk.key, other.chunk.content) for other in placed[:i]]
            if not forming.wants(place.chunk.key, [key for key, _ in before]):
                continue
            owner = owner_of(forming.tenant, place.chunk.content)
            canonical = yield from self._canonical(place.chunk.key, owner)
            if canonical is None:  # evicted meanwhile: nothing to measure the deficit against
                return False
            delta = self._deficit(place, canonical, scratch.blocks)
            mean = forming.add(place.chunk.key, [key for key, _ in before], delta)
            if mean is not None:
                self._submit(
                    kind=set_kind(len(before)),
                    delta=mean,
                    canonical=place.chunk.key,
                    content=place.chunk.content,
                    behind=sorted(before),
                    prefix=forming.prefix,
                    tenant=_set_owner(forming.tenant, forming.prefix, place.chunk.content, *(c for _, c in before)),
                    seconds=seconds * len(place.chunk.token_ids),
                )
        return True

    # -- prefix subsets and pairs --------------------------------------------------------------------------------------

    def prefix_subset_step(self, forming: OrbitForming, subset: Sequence[int], scratch: Scratch) -> Pieces[bool]:
        """Run some chunks of a set, in this order, and send off own patches not yet stored.

        Returns whether that took a forward: not if the last chunk's patch is stored, as the others' then are, and not
        if canonical KV or embeddings are gone.
        """
        order, tenant = [forming.chunks[i] for i in subset], forming.tenant
        keys = []
        for i, chunk in enumerate(order):
            behind = antecedent_key(forming.prefix, [other.key for other in order[:i]], ordered=True)
            keys.append(self.form.key(chunk.key, behind, PatchKind.own))
        if (yield from self._has_or_sent(keys[-1], tenant)):
            return False
        for chunk in order:
            if not (yield from self._may_condition(chunk, tenant)):
                return False
        ready = yield from self.ready(OrbitForming(forming.prefix, tuple(order), tenant, forming.opening))
        if ready is None:
            return False
        placed, seconds = yield from self._forward(forming.opening, ready.chunks, scratch)
        for i, key in enumerate(keys, 1):
            if not (yield from self._has_or_sent(key, tenant)):
                yield from self._keep_if_known(
                    placed[:i], PatchKind.own, forming.prefix, tenant, tenant, scratch.blocks, seconds
                )
        return True

    def pairs_step(
        self, forming: OrbitForming, batch: Sequence[int], limit: int, scratch: Scratch
    ) -> Pieces[tuple[int, int]]:
        """Run each chunk alone behind the first; send pair patches, and the first's behind nothing.

        The first one is computed once for all of them: their KV takes turns behind its own. Left out are those whose
        pair patch is stored, or whose canonical KV or embeddings are gone. If that leaves none, the first one is run
        alone where its patch behind nothing is not stored: no sum does without it. Returns how many were run, `limit`
        at most, and the tokens that this took.
        """
        prefix, opening, tenant = forming.prefix, forming.opening, forming.tenant
        first, *others = (forming.chunks[i] for i in batch)

        def lacks(*chunks: OrbitChunk) -> Pieces[bool]:
            kind = set_kind(len(chunks) - 1)
            key = antecedent_key(prefix, [chunk.key for chunk in chunks[:-1]], ordered=False)
            owner = _set_owner(tenant, prefix, *(chunk.content for chunk in chunks))
            return not (yield from self._has_or_sent(self.form.key(chunks[-1].key, key, kind), owner))

        leading: OrbitChunk | None = None
        ran = tokens = 0
        for chunk in others:
            if ran == limit or not (yield from lacks(first, chunk)):
                continue
            if not (yield from self._may_condition(first, tenant)):
                continue
            if not (yield from self._may_condition(chunk, tenant)):
                continue
            if ran:
                yield
            leading = leading or (yield from self._embedded(first, tenant))
            second = yield from self._embedded(chunk, tenant)
            if leading is None or second is None:
                continue
            sequence, placed = arrange(opening, (leading, second), scratch.blocks)
            start = placed[1].start if ran else 0
            seconds = yield from self._compute(sequence, scratch, start)
            alone = not ran and (yield from lacks(first))
            for ends in [placed[:1], placed] if alone else [placed]:
                owner = _set_owner(tenant, prefix, *(place.chunk.content for place in ends))
                seconds_per_token = seconds / (len(sequence) - start)
                yield from self._keep_if_known(
                    ends, set_kind(len(ends) - 1), prefix, tenant, owner, scratch.blocks, seconds_per_token
                )
            ran, tokens = ran + 1, tokens + len(sequence) - start
        if not ran and (yield from lacks(first)) and (yield from self._may_condition(first, tenant)):
            leading = yield from self._embedded(first, tenant)
            if leading is not None:
                placed, seconds_per_token = yield from self._forward(opening, [leading], scratch)
                owner, length = _set_owner(tenant, prefix, first.content), len(opening) + len(first.token_ids)
                yield from self._keep_if_known(
                    placed, set_kind(0), prefix, tenant, owner, scratch.blocks, seconds_per_token
                )
                ran, tokens = 1, length
        return ran, tokens

    def _may_condition(self, chunk: OrbitChunk, tenant: str) -> Pieces[bool]:
        """True if a chunk and its successors may be read: canonical KV neither evicted nor deleted."""
        return (yield from self._has("canonical", chunk.key, owner_of(tenant, chunk.content)))

    def _keep_if_known(
        self,
        placed: Sequence[Placed],
        kind: PatchKind,
        prefix: Sequence[int],
        tenant: str,
        owner: str,
        blocks: Sequence[int],
        seconds_per_token: float,
    ) -> Pieces[None]:
        """`keep_last`, unless the canonical KV is gone meanwhile; `owner`: the patch's."""
        chunk = placed[-1].chunk
        canonical = yield from self._canonical(chunk.key, owner_of(tenant, chunk.content))
        if canonical is not None:
            self.keep_last(placed, canonical, kind, prefix, owner, blocks, seconds_per_token * len(chunk.token_ids))

    def _has_or_sent(self, key: str, owner: str) -> Pieces[bool]:
        """True if a patch is stored, or sent to the compiler.

        What a request computed must not be overwritten by what was read without its text.
        """
        return self._was_sent(key, owner) or (yield from self._has("patch", key, owner))

    def _was_sent(self, key: str, owner: str) -> bool:
        """True if a patch went to the compiler a short while ago."""
        return self._sent.get((key, owner), -math.inf) > time.monotonic() - _SENT_SECONDS

    # -- all of them ---------------------------------------------------------------------------------------------------

    def _has(self, kind: RecordKind, key: str, owner: str) -> Pieces[bool]:
        return (yield from aside(self._asking, self.library.has, kind, key, owner))

    def _canonical(self, key: str, owner: str) -> Pieces[CanonicalRecord | None]:
        return (yield from aside(self._asking, self.library.get_canonical, key, owner))

    def keep_last(
        self,
        placed: Sequence[Placed],
        canonical: CanonicalRecord,
        kind: PatchKind,
        prefix: Sequence[int],
        tenant: str,
        blocks: Sequence[int],
        seconds: float = 0.0,
    ) -> None:
        """Send the patch of the last chunk that a forward has just run in `blocks`.

        `seconds`: what computing that chunk takes.
        """
        *before, last = placed
        behind = [(other.chunk.key, other.chunk.content) for other in before]
        self._submit(
            kind=kind,
            delta=self._deficit(last, canonical, blocks),
            canonical=last.chunk.key,
            content=last.chunk.content,
            behind=behind if kind is PatchKind.own else sorted(behind),
            prefix=prefix,
            tenant=tenant,
            seconds=seconds,
        )

    def _forward(
        self, opening: Sequence[int], order: Sequence[OrbitChunk], scratch: Scratch
    ) -> Pieces[tuple[list[Placed], float]]:
        """Run chunks behind one another; where each of them stands, and seconds per token."""
        sequence, placed = arrange(opening, order, scratch.blocks)
        seconds = yield from self._compute(sequence, scratch)
        return placed, seconds / len(sequence)

    def _compute(self, sequence: LinkSequence, scratch: Scratch, start: int = 0) -> Pieces[float]:
        """Compute a sequence's KV from a token on; returns the seconds of its forwards."""
        seconds, left = 0.0, complement([], len(sequence), start)
        while left:
            runs, left = scratch.split(left)
            began = time.perf_counter()
            self.engine.forward([(sequence, runs)])
            seconds += time.perf_counter() - began
            if left:
                yield
        return seconds

    def _deficit(self, place: Placed, canonical: CanonicalRecord, blocks: Sequence[int]) -> Tensor:
        """Deficit of a chunk in the last forward [layers, tokens, features], position-free."""
        kv = self.engine.read_kv(blocks, place.start, len(place.chunk.token_ids))
        return deficit_at(kv, canonical.kv, place.position, self.engine.layout)


def _set_owner(tenant: str, prefix: Sequence[int], *contents: str) -> str:
    """Owner of a patch behind a set.

    It has seen the prefix, with what the chat template writes around it, and these chunks, nothing else of the request;
    the prefix is the tenant's. (An own patch has also seen the tenant's text before the chunk: it is always the
    tenant's.)
    """
    return tenant if prefix else owner_of(tenant, *contents)
