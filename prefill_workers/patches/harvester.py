"""Harvest of forwards: canonical KV and deficits of links, off the request path.

The prefill loop calls it when no link waits (see `background`); every method that computes runs on the engine's thread,
and goes on in pieces (see `scratch`). The library is asked by other threads meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kvstore.catalog.index import prefix_key
from kvstore.library import Library
from kvstore.operator.apply import deficit_at
from kvstore.operator.patch import PatchKind
from kvstore.records.keys import antecedent_key, owner_of
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import CanonicalRecord, EmbeddingRecord, PatchRecord, RecordKind
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import EXACT_POINTS, uses_library
from prefill_workers.patches.patch_compiler import PatchJob
from prefill_workers.patches.scratch import Pieces, Scratch, aside
from prefill_workers.protocol import ChunkSpan
from prefill_workers.sequence import Embedded, LinkSequence

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
        if not uses_library(plan.request.mode):
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
        return chunk.keys.is_cacheable and all(c.made_at in EXACT_POINTS for c in plan.before(chunk))

    def is_kept(self, plan: LinkPlan, chunk: ChunkPlan) -> Pieces[bool]:
        """True if a computed chunk's canonical KV and patch are stored already."""
        if chunk.is_unfit:
            return False
        keys, tenant = chunk.keys, plan.request.tenant
        if self.forms_patch(plan, chunk) and not (yield from self.has("patch", keys.own_patch, tenant)):
            return False
        return (yield from self.has("canonical", keys.canonical, keys.owner))

    def is_resident(self, plan: LinkPlan, chunk: ChunkPlan) -> bool:
        """True if a computed chunk `is_kept` according to memory; asks no tier."""
        if chunk.is_unfit:
            return False
        keys, tenant = chunk.keys, plan.request.tenant
        known = not self.forms_patch(plan, chunk) or self.library.is_resident("patch", keys.own_patch, tenant)
        return known and self.library.is_resident("canonical", keys.canonical, keys.owner)

    def conditioned(self, plan: LinkPlan, chunk: ChunkPlan) -> Tensor:
        """KV(B|A) of a computed chunk where it stands in the prompt: [layers, tokens, features]."""
        return self.engine.read_kv(plan.sequence.blocks, chunk.span.start, len(chunk.span))

    def canonical(self, plan: LinkPlan, chunk: ChunkPlan, scratch: Scratch) -> Pieces[CanonicalRecord]:
        """KV(B|∅) of a chunk: loaded if it is of the same tokens, or computed alone and stored."""
        stored = yield from self.stored_canonical(chunk.keys.canonical, chunk.keys.owner)
        if stored is not None and stored.kv.shape[1] == len(chunk.span):
            return stored
        lone = self.lone(plan, chunk, scratch.blocks)
        seconds = yield from self.compute(lone, scratch)
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
            key=chunk.keys.canonical,
            fingerprint=self.engine.fingerprint,
            tenant=chunk.keys.owner,
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
                tenant=chunk.keys.owner,
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
        keys = chunk.keys
        is_keyed = keys.is_cacheable and not chunk.is_unfit and keys.context != request.prefix
        if self.forms_patch(plan, chunk) or not is_keyed or stop > scratch.tokens:
            return
        if (yield from self.has_or_sent(keys.own_patch, request.tenant)):
            return
        canonical = yield from self.stored_canonical(keys.canonical, keys.owner)
        if canonical is None:
            return
        embedded: list[Embedded] = []
        for one in (*plan.before(chunk), chunk):
            embeddings = one.embeddings
            if embeddings is None and one.span.needs_embeddings:
                embeddings = yield from self.stored_embeddings(one.span.content, request.tenant)
                if embeddings is None:
                    return
            if embeddings is not None:
                embedded.append(Embedded(one.span.first, embeddings, one.span.is_embed))
        whole = plan.sequence
        front = LinkSequence(whole.token_ids[:stop], whole.positions[..., :stop], scratch.blocks, tuple(embedded))
        seconds = yield from self.compute(front, scratch)
        kv = self.engine.read_kv(scratch.blocks, chunk.span.start, len(chunk.span))
        self._submit_own(plan, chunk, kv, canonical, seconds * len(chunk.span) / stop)

    def _submit_own(
        self, plan: LinkPlan, chunk: ChunkPlan, conditioned: Tensor, canonical: CanonicalRecord, seconds: float
    ) -> None:
        self.submit(
            kind=PatchKind.own,
            delta=deficit_at(conditioned, canonical.kv, chunk.start_position, self.engine.layout),
            canonical=chunk.keys.canonical,
            content=chunk.span.content,
            behind=[(c.keys.canonical, c.span.content) for c in plan.before(chunk)],
            prefix=chunk.keys.context,
            tenant=plan.request.tenant,
            seconds=seconds,
        )

    def submit(
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

    # -- library and engine --------------------------------------------------------------------------------------------

    def stored_embeddings(self, content: str, tenant: str) -> Pieces[Tensor | None]:
        """Embeddings of a content that a tenant may read; None: they are not stored."""
        key, owner = self.engine.embedding_key(content), owner_of(tenant, content)
        stored = yield from aside(self._asking, self.library.get_embedding, key, owner)
        return None if stored is None else stored.embeddings

    def has_or_sent(self, key: str, owner: str) -> Pieces[bool]:
        """True if a patch is stored, or sent to the compiler.

        What a request computed must not be overwritten by what was read without its text.
        """
        return self.was_sent(key, owner) or (yield from self.has("patch", key, owner))

    def was_sent(self, key: str, owner: str) -> bool:
        """True if a patch went to the compiler a short while ago."""
        return self._sent.get((key, owner), -math.inf) > time.monotonic() - _SENT_SECONDS

    def has(self, kind: RecordKind, key: str, owner: str) -> Pieces[bool]:
        """True if a record is stored."""
        return (yield from aside(self._asking, self.library.has, kind, key, owner))

    def stored_canonical(self, key: str, owner: str) -> Pieces[CanonicalRecord | None]:
        """Canonical KV of a chunk; None: it is not stored."""
        return (yield from aside(self._asking, self.library.get_canonical, key, owner))

    def stored_patch(self, key: str, owner: str) -> Pieces[PatchRecord | None]:
        """Patch of this key; None: it is not stored."""
        return (yield from aside(self._asking, self.library.get_patch, key, owner))

    def compute(self, sequence: LinkSequence, scratch: Scratch, start: int = 0) -> Pieces[float]:
        """See `Scratch.compute`."""
        return scratch.compute(self.engine, sequence, start)
