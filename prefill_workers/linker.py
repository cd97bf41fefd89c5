"""The linker: from a request's tokens and chunks to one sequence's finished KV.

`Linker.plan` looks every chunk up in the library and chooses its operating point; it runs beside the engine, on any
thread. `Linker.place` relocates, patches and writes what is reused into the sequence's blocks; what is left are runs,
which `worker.PrefillLoop` computes, several requests to a forward. `Linker.harvest` takes what the forward computed for
chunks that had no patch yet and turns it into canonical KV and deficits, off the request path.

    token      0 ........ text ...... | chunk 1 | text | chunk 2 | text ......... n
    reused                            |#########|
    runs       [====================]           [======================]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from kvstore.chunk import antecedent_key, canonical_key, embedding_key
from kvstore.format import CanonicalRecord, EmbeddingRecord, PatchRecord, RecordKind
from kvstore.library import Library
from kvstore.patch import PatchKind, apply, deficit, relocate
from kvstore.patch_form import PatchForm
from prefill_workers import policies
from prefill_workers.engine import PrefillEngine
from prefill_workers.orbit import OrbitChunk, OrbitForming, arrange, set_kind
from prefill_workers.patch_compiler import PatchJob
from prefill_workers.policies import Mode, OperatingPoint
from prefill_workers.sequence import Embedded, LinkSequence, Run, complement

TEXT = "text"  # the modality of a document: its tokens are its content


@dataclass(frozen=True)
class ChunkSpan:
    """One chunk of a prompt, as plain values.

    The chunk is the tokens `start` up to `stop`, delimiters included; its placeholders are `first` up to
    `first + count`. `grid` carries the processed fields that fix the positions (vLLM's item without pixels). In a text
    chunk every token counts as a placeholder: its content id alone names it.
    """

    content: str
    modality: str
    start: int
    stop: int
    first: int
    count: int
    grid: Any = None
    is_embed: Tensor | None = None

    @property
    def needs_embeddings(self) -> bool:
        """Whether computing the chunk takes embeddings that its token ids do not give."""
        return self.modality != TEXT


@dataclass(frozen=True)
class LinkRequest:
    """What a prefill worker is asked to link.

    `prefix` are the token ids of the fixed prefix (system prompt and tools) that patches are keyed by; `readers` is how
    many decode sequences will pull the KV (`n` of the request).
    """

    request_id: str
    token_ids: Sequence[int]
    chunks: tuple[ChunkSpan, ...] = ()
    mode: Mode = Mode.AUTO
    tenant: str = "local"
    prefix: tuple[int, ...] = ()
    readers: int = 1


@dataclass(frozen=True)
class ChunkOutcome:
    """How one chunk was linked, for the request's report."""

    tokens: int
    operating_point: OperatingPoint
    antecedents: int
    reason: str
    rank: int | None = None


class PixelsNeeded(Exception):
    """Chunks must be computed whose embeddings are stored nowhere: send their pixels (indices into `chunks`)."""

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(f"pixels needed for chunks {list(chunks)}")
        self.chunks = tuple(chunks)

    def __reduce__(self) -> tuple[type[PixelsNeeded], tuple[tuple[int, ...]]]:
        return PixelsNeeded, (self.chunks,)


@dataclass(eq=False)
class ChunkPlan:
    """One chunk of a plan: where it stands, what is stored for it, and how it will be linked."""

    span: ChunkSpan
    canonical_key: str
    patch_key: str
    antecedents: tuple[str, ...]
    start_position: int  # RoPE position of its first token, in the shifted frame
    outcome: ChunkOutcome
    canonical: CanonicalRecord | None = None
    patch: PatchRecord | None = None
    embeddings: Tensor | None = None  # [placeholders that carry one, hidden]


@dataclass(eq=False)
class LinkPlan:
    """Everything needed to link one request; made by `Linker.plan`."""

    request: LinkRequest
    sequence: LinkSequence
    chunks: list[ChunkPlan]
    runs: list[Run]
    stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_reused(self) -> int:
        """Prompt tokens whose KV needs no forward."""
        return len(self.sequence) - self.tokens_computed

    @property
    def tokens_computed(self) -> int:
        """Prompt tokens that a forward computes."""
        return sum(len(run) for run in self.runs)


class Linker:
    """Plans and places links for one engine.

    Args:
        form: of the patches that it looks for and asks for.
        submit_patch: takes a deficit off the request path and stores its patch (see `patch_compiler`).
    """

    def __init__(
        self, engine: PrefillEngine, library: Library, form: PatchForm, submit_patch: Callable[[PatchJob], object]
    ) -> None:
        self.engine = engine
        self.library = library
        self.form = form
        self._submit_patch = submit_patch
        self._dtype = str(engine.dtype).removeprefix("torch.")

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, request: LinkRequest, embeddings: Mapping[int, Tensor] | None = None) -> LinkPlan:
        """Choose every chunk's operating point and the runs that remain.

        Args:
            embeddings: freshly encoded embeddings by chunk index, for chunks that were sent with pixels.

        Raises:
            PixelsNeeded: a chunk must be computed and neither `embeddings` nor the library has its embeddings.
        """
        began = time.perf_counter()
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        positions, lag = self.engine.positions(
            request.token_ids,
            [(c.modality, c.grid, c.first, c.count) for c in request.chunks if c.needs_embeddings],
        )
        positions = positions + lag
        chunks: list[ChunkPlan] = []
        missing: list[int] = []
        antecedents: list[str] = []
        for i, span in enumerate(request.chunks):
            start = int(positions[..., span.start].flatten()[0])
            chunk = self._look_up(request, span, tuple(antecedents), start, (embeddings or {}).get(i))
            computed = not chunk.outcome.operating_point.reuses_kv
            if computed and span.needs_embeddings and chunk.embeddings is None:
                missing.append(i)
            chunks.append(chunk)
            antecedents.append(chunk.canonical_key)
        if missing:
            raise PixelsNeeded(missing)
        sequence = LinkSequence(
            tokens,
            positions,
            blocks=(),
            embedded=tuple(
                Embedded(c.span.first, c.embeddings, c.span.is_embed)
                for c in chunks
                if c.embeddings is not None and not c.outcome.operating_point.reuses_kv
            ),
        )
        reused = [Run(c.span.start, c.span.stop) for c in chunks if c.outcome.operating_point.reuses_kv]
        plan = LinkPlan(request, sequence, chunks, complement(reused, len(tokens)))
        plan.stages_ms["plan"] = (time.perf_counter() - began) * 1e3
        return plan

    def _look_up(
        self,
        request: LinkRequest,
        span: ChunkSpan,
        antecedents: tuple[str, ...],
        start: int,
        fresh: Tensor | None,
    ) -> ChunkPlan:
        fingerprint, tenant, mode = self.engine.fingerprint, request.tenant, request.mode
        canonical_id = self._canonical_key(request, span)
        own = self._patch_key(PatchKind.own, canonical_id, request.prefix, antecedents)
        patch = None
        if policies.looks_up_patch(mode):
            patch = self.library.get_patch(own, tenant)
            if patch is None:
                orbit = self._patch_key(set_kind(len(antecedents)), canonical_id, request.prefix, antecedents)
                patch = self.library.get_patch(orbit, tenant)
        canonical = None
        if patch is not None or mode is Mode.FULL_REUSE:
            canonical = self.library.get_canonical(canonical_id, tenant)
        stored = fresh
        reusable = canonical is not None and (patch is not None or mode is Mode.FULL_REUSE)
        if span.needs_embeddings and stored is None and mode is not Mode.OFF and not reusable:
            record = self.library.get_embedding(embedding_key(fingerprint, span.content), tenant)
            stored = record.embeddings if record else None
        point = policies.operating_point(
            mode,
            canonical=canonical is not None,
            patch=patch is not None,
            embeddings=stored is not None or not span.needs_embeddings,
        )
        if not point.reuses_kv:
            encoded = fresh is not None or (span.needs_embeddings and point is OperatingPoint.ENCODED)
            point = OperatingPoint.ENCODED if encoded else OperatingPoint.RECOMPUTED
        outcome = ChunkOutcome(
            tokens=span.stop - span.start,
            operating_point=point,
            antecedents=len(antecedents),
            reason=_reason(mode, point, canonical is not None, patch),
            rank=patch.patch.rank if patch is not None and point is OperatingPoint.PATCHED else None,
        )
        return ChunkPlan(span, canonical_id, own, antecedents, start, outcome, canonical, patch, stored)

    def wanted(self, request: LinkRequest, patches: PatchKind | None) -> list[tuple[RecordKind, str]]:
        """Kinds and keys of the records with which a link of these chunks is pure: nothing encoded, none computed.

        Args:
            patches: own: in this order; orbit: in any order; None: no patches, only what they are formed from.
        """
        keys = [self._canonical_key(request, span) for span in request.chunks]
        names: list[tuple[RecordKind, str]] = [("canonical", key) for key in keys]
        names += [
            ("embedding", embedding_key(self.engine.fingerprint, span.content))
            for span in request.chunks
            if span.needs_embeddings
        ]
        for i, key in enumerate(keys):
            others = keys[:i] + keys[i + 1 :]
            if patches is PatchKind.own:
                names.append(("patch", self._patch_key(PatchKind.own, key, request.prefix, keys[:i])))
            elif patches is PatchKind.orbit:
                sets = chain.from_iterable(combinations(others, size) for size in range(len(keys)))
                names += [
                    ("patch", self._patch_key(set_kind(len(before)), key, request.prefix, before)) for before in sets
                ]
        return list(dict.fromkeys(names))

    def _canonical_key(self, request: LinkRequest, span: ChunkSpan) -> str:
        tokens = request.token_ids
        outside = [*tokens[span.start : span.first], *tokens[span.first + span.count : span.stop]]
        return canonical_key(self.engine.fingerprint, span.content, outside, self.engine.precision)

    def _patch_key(self, kind: PatchKind, canonical: str, prefix: Sequence[int], antecedents: Sequence[str]) -> str:
        """Key of an own patch behind this list of antecedents, or of an orbit or pair patch behind this set."""
        behind = antecedent_key(prefix, antecedents, ordered=kind is PatchKind.own)
        return self.form.key(canonical, behind, kind)

    # -- place --------------------------------------------------------------------------------------------------------

    def place(self, plan: LinkPlan) -> None:
        """Relocate, patch and write every reused chunk into the sequence's blocks (kamera.md eq. 1)."""
        for chunk in plan.chunks:
            if not chunk.outcome.operating_point.reuses_kv:
                continue
            assert chunk.canonical is not None
            patch = None
            if chunk.patch and chunk.outcome.operating_point is OperatingPoint.PATCHED:
                patch = chunk.patch.patch.bind(self.form.basis)
            kv = apply(chunk.canonical.kv, patch, chunk.start_position, self.engine.layout)
            self.engine.write_kv(kv, self.engine.slots(plan.sequence.blocks, chunk.span.start, chunk.span.stop))

    # -- harvest ------------------------------------------------------------------------------------------------------

    def harvestable(self, plan: LinkPlan) -> list[ChunkPlan]:
        """Chunks of a finished plan whose computed KV may be worth keeping."""
        if not policies.forms_patches(plan.request.mode):
            return []
        return [c for c in plan.chunks if not c.outcome.operating_point.reuses_kv]

    def is_kept(self, plan: LinkPlan, chunk: ChunkPlan) -> bool:
        """Whether a computed chunk has taught the library all it can: the patch for its antecedents is stored."""
        return self.library.has("patch", chunk.patch_key, plan.request.tenant)

    def conditioned(self, plan: LinkPlan, chunk: ChunkPlan) -> Tensor:
        """KV(B|A) of a computed chunk, moved to the canonical frame: [layers, tokens, features]."""
        kv = self.engine.read_kv(plan.sequence.blocks, chunk.span.start, chunk.span.stop - chunk.span.start)
        return relocate(kv, -chunk.start_position, self.engine.layout)

    def canonical(self, plan: LinkPlan, chunk: ChunkPlan, scratch: Sequence[int]) -> CanonicalRecord:
        """KV(B|∅) of a chunk: from the library, or computed alone in the blocks `scratch` and stored."""
        stored = self.library.get_canonical(chunk.canonical_key, plan.request.tenant)
        if stored is not None:
            return stored
        lone = self.lone(plan, chunk, scratch)
        began = time.perf_counter()
        self.engine.forward([(lone, [Run(0, len(lone))])])
        kv = self.engine.read_kv(scratch, 0, len(lone))
        return self.keep_canonical(plan, chunk, kv, time.perf_counter() - began)

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
            tenant=plan.request.tenant,
            layout=self.engine.layout,
            kv=kv,
            content=chunk.span.content,
            recompute_seconds=seconds,
            meta={"modality": chunk.span.modality},
        )
        self.library.put_canonical(record)
        return record

    def keep_embeddings(self, plan: LinkPlan, chunk: ChunkPlan) -> None:
        """Store a freshly encoded chunk's embeddings, so that nobody encodes these pixels again."""
        if chunk.outcome.operating_point is not OperatingPoint.ENCODED or chunk.embeddings is None:
            return
        fingerprint = self.engine.fingerprint
        self.library.put_embedding(
            EmbeddingRecord(
                key=embedding_key(fingerprint, chunk.span.content),
                fingerprint=fingerprint,
                tenant=plan.request.tenant,
                embeddings=chunk.embeddings,
                content=chunk.span.content,
                meta={"modality": chunk.span.modality},
            )
        )

    def harvest(self, plan: LinkPlan, chunk: ChunkPlan, conditioned: Tensor, scratch: Sequence[int]) -> None:
        """Store a computed chunk's canonical KV and send its deficit (kamera.md eq. 2) to the patch compiler."""
        canonical = self.canonical(plan, chunk, scratch)
        before = plan.chunks[: plan.chunks.index(chunk)]
        tokens = chunk.span.stop - chunk.span.start
        self._submit(
            kind=PatchKind.own,
            delta=deficit(conditioned, canonical.kv),
            canonical=chunk.canonical_key,
            content=chunk.span.content,
            behind=[(c.canonical_key, c.span.content) for c in before],
            prefix=plan.request.prefix,
            tenant=plan.request.tenant,
            seconds=plan.stages_ms.get("forward", 0.0) * 1e-3 * tokens / max(plan.tokens_computed, 1),
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
        self._submit_patch(
            PatchJob(
                key=self.form.key(canonical, antecedent, kind),
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
                recompute_seconds=seconds,
            )
        )

    # -- orbit --------------------------------------------------------------------------------------------------------

    def orbit(self, plan: LinkPlan) -> OrbitForming | None:
        """The orbit patches that a finished plan's chunks still lack; None when there is nothing to form."""
        request = plan.request
        keys = [chunk.canonical_key for chunk in plan.chunks]
        if len(keys) < 2 or len(set(keys)) < len(keys):
            return None
        last = plan.chunks[-1]
        whole_set = self._patch_key(set_kind(len(keys) - 1), last.canonical_key, request.prefix, keys[:-1])
        if self.library.get_patch(whole_set, request.tenant) is not None:
            return None
        return self.forming(plan)

    def forming(self, plan: LinkPlan) -> OrbitForming | None:
        """All orders of a plan's chunks, which must be different ones; None when embeddings are missing."""
        request = plan.request
        chunks = []
        for chunk in plan.chunks:
            embeddings = chunk.embeddings
            if embeddings is None and chunk.span.needs_embeddings:
                key = embedding_key(self.engine.fingerprint, chunk.span.content)
                stored = self.library.get_embedding(key, request.tenant)
                if stored is None:
                    return None
                embeddings = stored.embeddings
            span, whole = chunk.span, plan.sequence
            chunks.append(
                OrbitChunk(
                    key=chunk.canonical_key,
                    content=span.content,
                    token_ids=whole.token_ids[span.start : span.stop],
                    positions=whole.positions[..., span.start : span.stop] - chunk.start_position,
                    embeddings=embeddings,
                    first=span.first - span.start,
                    mask=span.is_embed,
                )
            )
        return OrbitForming(request.prefix, tuple(chunks), request.tenant)

    def orbit_step(self, forming: OrbitForming, scratch: Sequence[int]) -> bool:
        """Run the next order of a forming set and send off the patches that it completes; False when all have run."""
        order = next(forming.orders, None)
        if order is None:
            return False
        sequence, placed = arrange(forming.prefix, order, scratch)
        self.engine.forward([(sequence, [Run(0, len(sequence))])])
        for i, place in enumerate(placed):
            before = [(other.chunk.key, other.chunk.content) for other in placed[:i]]
            if not forming.wants(place.chunk.key, [key for key, _ in before]):
                continue
            canonical = self.library.get_canonical(place.chunk.key, forming.tenant)
            if canonical is None:  # evicted meanwhile: nothing to measure the deficit against
                return False
            kv = self.engine.read_kv(scratch, place.start, len(place.chunk.token_ids))
            conditioned = relocate(kv, -place.position, self.engine.layout)
            delta = deficit(conditioned, canonical.kv)
            mean = forming.add(place.chunk.key, [key for key, _ in before], delta)
            if mean is not None:
                self._submit(
                    kind=set_kind(len(before)),
                    delta=mean,
                    canonical=place.chunk.key,
                    content=place.chunk.content,
                    behind=sorted(before),
                    prefix=forming.prefix,
                    tenant=forming.tenant,
                )
        return True


def _reason(mode: Mode, point: OperatingPoint, canonical: bool, patch: PatchRecord | None) -> str:
    if point is OperatingPoint.PATCHED and patch is not None:
        return f"stored {patch.patch.kind} patch for these antecedents"
    if point is OperatingPoint.RELOCATED:
        return "mode full-reuse: canonical KV, no patch"
    if mode in (Mode.EXACT, Mode.OFF):
        return f"mode {mode}: computed in context"
    if patch and not canonical:
        return "a patch but no canonical KV is stored"
    return "no patch stored for these antecedents" if mode is Mode.AUTO else "no canonical KV stored"
