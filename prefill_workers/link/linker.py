"""The linker: from a request's tokens and chunks to one sequence's finished KV.

| call       | thread          | what it does                                                                         |
|------------|-----------------|--------------------------------------------------------------------------------------|
| `prefetch` | any             | starts loading what a prompt on its way will need                                    |
| `plan`     | any             | starts all look-ups, waits until it is known which chunks miss, not for KV           |
| `match`    | the engine's    | finds the blocks that the prompt begins with, once the link is to have blocks        |
| `advance`  | the engine's    | relocates, patches and writes every chunk whose load has ended (kamera.md eq. 1)     |
| `select`   | the engine's    | cacheblend: chooses which tokens of chunks with stored KV are computed all the same; |
|            |                 | composed patches: weighs their parts                                                 |

What is left are runs, which `PrefillLoop` computes, several requests to a forward, up to the plan's frontier
(see `plan`). Loads so run beside the vision encoder and beside forwards: the slower of the two bounds the time to the
first token, not their sum (mpic.md §3.2). A load that fails leaves its chunk to be computed. What a forward computed
for chunks that had no patch yet is taken up by `harvest`, off the request path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore.forget import ForgetRegistry
from kvstore.library import Library
from kvstore.operator.apply import warm_up
from kvstore.records.patch_form import PatchForm
from prefill_workers.block_index import NO_MATCH, BlockIndex, PrefixMatch
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.link import report_reasons as reasons
from prefill_workers.link.attention_weights import weighed_by_attention
from prefill_workers.link.compose import KnownWeights, measured_weights
from prefill_workers.link.keys import ChunkKeys, Keys, cacheable, contexts
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.link.lookups import Found, Lookup, Lookups, Stored
from prefill_workers.link.place_kv import PlacedChunk, write_chunks
from prefill_workers.link.plan import ChunkPlan, ChunkState, LinkPlan
from prefill_workers.link.prefix_hits import PrefixHits
from prefill_workers.link.session_links import SessionLinks
from prefill_workers.link.settle import ChunkSettler, summed
from prefill_workers.link.token_selection import (
    MEASURED_LAYER,
    deviations,
    measured_deficit,
    selected_by_deviation,
)
from prefill_workers.modes import FreeText, Mode, OperatingPoint, composed_antecedents, looks_up_patch
from prefill_workers.protocol import ChunkOutcome, LinkRequest, PixelsNeeded, PrefetchRequest
from prefill_workers.sequence import LinkSequence, Run, forwards
from prefill_workers.sessions.store import SessionStore
from prefill_workers.settings import COMPOSE_UP_TO, FREE_TEXT, FidelitySettings, SessionSettings, Weighing

_TIMEOUTS = 2  # of the library, until a request's chunks count as not stored: whether KV is there, and embeddings


class _Asked(NamedTuple):
    """Parameters that the chunks of one plan share.

    `positions`: RoPE, of all tokens, in the shifted frame. `embeddings`: freshly encoded, by chunk index. `ruled_out`:
    see `ChunkPlan`. `until`: when look-ups are waited for no longer (`time.monotonic`).
    """

    request: LinkRequest
    positions: Tensor
    embeddings: Mapping[int, Tensor]
    ruled_out: OperatingPoint | None
    until: float


class Linker:
    """Planning and placing of links, for one engine.

    Args:
        form: of the patches that it looks for.
        fidelity: says which operating points are switched off. None: nothing is checked, nothing switched off.
        compose_up_to: antecedents that a chunk may stand behind to be linked by the weighted sum of its pair patches.
            Where patches lack the layers by which they are weighed (see `compose`) none are summed.
        keeps_prefixes: whether prompts begin with the blocks of earlier ones that begin alike.
        weigh_by: what weighs the parts of a sum.
        free_text: longest text that keys no patch (see `keys.contexts`).
        sessions: limits of sessions; None: the defaults.

    Raises:
        ValueError: sums are to be weighed by an attention that the engine does not tell.

    Attributes:
        forgets: the caches of this process that hold tenants' data; the loop adds its own.
        prefixes: blocks that prompts begin with; None: everything is computed.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        library: Library,
        form: PatchForm,
        fidelity: Fidelity | None = None,
        compose_up_to: int = COMPOSE_UP_TO,
        keeps_prefixes: bool = False,
        weigh_by: Weighing = Weighing.KV,
        free_text: FreeText = FREE_TEXT,
        sessions: SessionSettings | None = None,
    ) -> None:
        if weigh_by is Weighing.ATTENTION and not engine.tells_attention:
            raise ValueError(
                f"prefill.weigh_by: attention: {engine.spec.model} does not attend by queries and keys alone (MLA, "
                "windows, sinks, caps, biases, or a quantised KV cache); use kv"
            )
        self.engine = engine
        self.library = library
        self.form = form
        self.fidelity = fidelity or Fidelity(FidelitySettings(share=0))
        self.weigh_by = weigh_by
        self._free_text = free_text
        self.compose_up_to = compose_up_to if form.first_layer(engine.layout.layers) <= MEASURED_LAYER else 0
        self.forgets = ForgetRegistry()
        caches = self.forgets.group()
        self._keys, self._lookups = Keys(engine, form), caches.register(Lookups(library, form.basis))
        self._weights = caches.register(KnownWeights())
        self._settler = ChunkSettler(engine.layout, form.basis, self._weights)
        self.prefixes: PrefixHits | None = None
        if keeps_prefixes:
            index = caches.register(BlockIndex(engine.block_size, relocates=not engine.has_quantised_kv))
            self.prefixes = PrefixHits(engine, index, self.fidelity)
        store = caches.register(SessionStore(library, engine.precision, sessions or SessionSettings()))
        self.sessions = SessionLinks(engine, library, store, self.fidelity.allows, free_text.between)
        self.fidelity.before_allowing(self._before_allowing)
        warm_up(engine.layout, engine.dtype)

    def patches(self) -> bool:
        """True if patches may be served: they are not switched off."""
        return self.fidelity.allows(OperatingPoint.PATCHED)

    def sums(self) -> bool:
        """True if sums of pair patches may be served: neither they nor patches are switched off."""
        return self.patches() and self.fidelity.allows(OperatingPoint.COMPOSED)

    # -- plan ---------------------------------------------------------------------------------------------------------

    def prefetch(self, request: PrefetchRequest, *, load: bool = True) -> dict[str, Future[bool]]:
        """Start loading for a prompt that is still being rendered.

        Args:
            load: False: only say what is lacking.

        Returns: by content id of every image that no session keeps, whether it will have to be encoded; see
            `Lookup.lacks_pixels`.
        """
        antecedents: list[str] = []
        lacking: dict[str, Future[bool]] = {}
        mode = Mode.EXACT if self._ruled_out(request.mode) else request.mode
        kept = self.sessions.contents(request)
        for i, content in enumerate(request.contents):
            text = content in request.documents
            delimiters, contents = () if text else request.delimiters, request.contents[: i + 1]
            summed = self._sums_behind(len(antecedents))
            keys = self._keys.of(
                request.tenant, contents, delimiters, request.prefix, antecedents, embeds=not text, summed=summed
            )
            antecedents.append(keys.canonical)
            if content in kept:  # most likely it is served by its session
                continue
            if load:
                lookup = self._lookups.start_ahead(keys, mode)
            if not text:
                lacking[content] = lookup.lacks_pixels() if load else self._lookups.lacks_pixels(keys, mode)
        return lacking

    def plan(self, request: LinkRequest, embeddings: Mapping[int, Tensor] | None = None) -> LinkPlan:
        """Choose every chunk's operating point. KV that is stored goes on loading behind the plan.

        Args:
            embeddings: freshly encoded embeddings by chunk index, for chunks that were sent with pixels.

        Raises:
            PixelsNeeded: a chunk must be computed and neither `embeddings` nor the library has its embeddings.
        """
        began = time.perf_counter()
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        wanted = self.keys(request)
        ruled_out = self._ruled_out(request.mode)
        mode = Mode.EXACT if ruled_out else request.mode
        positions, lag = self.engine.positions(
            request.token_ids,
            [(c.modality, c.grid, c.first, c.count) for c in request.chunks if c.needs_embeddings],
        )
        positions = positions + lag
        epoch, chain, match = 0, None, NO_MATCH
        if self.prefixes is not None:
            epoch = self.prefixes.epoch
            chain, match = self.prefixes.look_up(request, lag)
        shared = len(match.forms)
        with ExitStack() as pins:
            pins.enter_context(self.library.pin(key for keys in wanted[shared:] for key in keys.all()))
            session = self.sessions.open(request)
            served = set(range(shared)) | (session.served_chunks if session is not None else set())
            lookups = [None if i in served else self._lookups.start(keys, mode) for i, keys in enumerate(wanted)]
            until = time.monotonic() + _TIMEOUTS * self.library.settings.load_timeout_s
            kept: dict[int, ChunkOutcome] = {}
            if session is not None:
                session = self.sessions.place(session, positions, match.hit)
                kept = session.chunk_outcomes()
                late = served - kept.keys() - set(range(shared))  # their KV did not come
                lookups = [self._lookups.start(wanted[i], mode) if i in late else x for i, x in enumerate(lookups)]
            asked = _Asked(request, positions, embeddings or {}, ruled_out, until)
            chunks = [
                self._chunk(asked, i, keys, lookup, kept.get(i))
                for i, (keys, lookup) in enumerate(zip(wanted, lookups, strict=True))
            ]
            sequence = LinkSequence(tokens, positions, blocks=())
            plan = LinkPlan(request, sequence, chunks, chain, lag, epoch, session=session, began=began)
            if missing := plan.begin_with(match):
                for keys, lookup in zip(wanted, lookups, strict=True):  # for the same request, with pixels
                    if lookup is not None:
                        self._lookups.keep(keys, mode, lookup)
                raise PixelsNeeded(missing)
            plan.stages_ms["plan"] = (time.perf_counter() - began) * 1e3
            return plan.pinned_by(pins.pop_all().close)

    def match(self, plan: LinkPlan, *, fits: Callable[[PrefixMatch], bool]) -> PrefixMatch:
        """Blocks that a plan's prompt begins with, as things stand; the plan begins with them.

        Args:
            fits: whether there is room for a link that begins so.

        Raises:
            PixelsNeeded: blocks of a chunk were evicted since it was planned, and its embeddings are not at hand.
        """
        match = NO_MATCH
        if self.prefixes is not None and plan.chain is not None:
            match = self.prefixes.match(plan.request, plan.chain, plan.frame)
        if not fits(match):
            match = replace(NO_MATCH, frame=plan.frame)
        if match != plan.prefix and (missing := plan.begin_with(match)):
            raise PixelsNeeded(missing)
        return match

    def keys(self, request: LinkRequest) -> list[ChunkKeys]:
        """Keys of a request's chunks, each behind those before it."""
        wanted: list[ChunkKeys] = []
        contents = [span.content for span in request.chunks]
        found, kept = contexts(request, self._free_text), cacheable(request, self._free_text)
        for i, (span, context) in enumerate(zip(request.chunks, found, strict=True)):
            before = request.token_ids[span.start : span.first]
            delimiters = (*before, *request.token_ids[span.first + span.count : span.stop])
            antecedents = [keys.canonical for keys in wanted]
            behind, embeds = contents[: i + 1], span.needs_embeddings
            summed = self._sums_behind(len(antecedents)) and context == request.prefix  # parts are without text
            named = (request.tenant, behind, delimiters, context, antecedents)
            wanted.append(self._keys.of(*named, embeds=embeds, summed=summed, is_cacheable=kept[i]))
        return wanted

    def _chunk(
        self, asked: _Asked, index: int, keys: ChunkKeys, lookup: Lookup | None, kept: ChunkOutcome | None
    ) -> ChunkPlan:
        """Plan one chunk; waits for its look-up.

        `lookup`: None where a prefix or the session serves the chunk. `kept`: its outcome where the session does, else
        None.
        """
        request, span = asked.request, asked.request.chunks[index]
        fresh = asked.embeddings.get(index)
        coming = lookup is not None and lookup.is_coming(max(0.0, asked.until - time.monotonic()))
        chunk = ChunkPlan(
            span=span,
            keys=keys,
            start_position=int(asked.positions[..., span.start].flatten()[0]),
            outcome=kept or ChunkOutcome(len(span), reasons.expected(request.mode), index, "stored KV is loading"),
            state=ChunkState.LOADING if kept is None else ChunkState.PLACED,
            lookup=lookup if coming else None,
            embeddings=fresh,
            is_encoded=fresh is not None,
            ruled_out=asked.ruled_out or self._without_sums(request.mode, index),
            weights_epoch=self._weights.epoch,
        )
        if lookup is not None and not coming:
            # the load may have ended only now, too late for the plan: its KV would never be written
            late = replace(lookup.found(), canonical=None) if lookup.done() else Found(is_unsure=True)
            self._settler.settle(chunk, request, late)
        return chunk

    def _ruled_out(self, mode: Mode) -> OperatingPoint | None:
        """Operating point that a mode looks for, if that is switched off: then it computes exactly."""
        point = reasons.expected(mode)
        return None if self.fidelity.allows(point) else point

    def _without_sums(self, mode: Mode, antecedents: int) -> OperatingPoint | None:
        """`composed`, where a chunk's pair patches would be summed if that were not switched off."""
        would = looks_up_patch(mode) and self._composes(antecedents)
        return OperatingPoint.COMPOSED if would and not self.sums() else None

    def _composes(self, antecedents: int) -> bool:
        """True if pair patches behind so many antecedents are summed."""
        return antecedents in composed_antecedents(self.compose_up_to)

    def _sums_behind(self, antecedents: int) -> bool:
        """True if pair patches behind so many antecedents are summed and not switched off."""
        return self.sums() and self._composes(antecedents)

    def quarantine(self, stored: Iterable[Stored]) -> None:
        """Move records aside whose KV gave logits that are not finite. Waits for all tiers."""
        for kind, key, owner in stored:
            self.library.quarantine(kind, key, owner)
        self._lookups.clear()
        self._weights.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def _before_allowing(self, point: OperatingPoint) -> None:
        self._lookups.clear()
        if point in (OperatingPoint.PATCHED, OperatingPoint.COMPOSED):
            self._weights.clear()  # they were measured on patches that may have been wrong, and may themselves be
            if self.prefixes is not None:
                self.prefixes.clear()  # or this

    # -- advance ------------------------------------------------------------------------------------------------------

    def advance(self, plan: LinkPlan) -> int | None:
        """Write the KV of every chunk whose load has ended, or leave the chunk to a forward.

        Returns:
            The first token that must be computed again: what a forward took from an arriving chunk was not sound.

        Raises:
            PixelsNeeded: a load failed, and neither the request nor the library has the chunk's embeddings.
        """
        missing, spoiled = [], None
        placed: list[PlacedChunk] = []
        if self.prefixes is not None:
            self.prefixes.place(plan)
        self._place_kept(plan)
        began = time.perf_counter()
        ended = [(i, chunk) for i, chunk in enumerate(plan.chunks) if chunk.has_ended_load]
        for i, chunk in ended:
            found, stream = chunk.end_load()
            settled = self._settler.settle(chunk, plan.request, found)
            if stream is not None:
                if found.canonical is stream.canonical and found.patch is stream.patch:
                    continue
                spoiled = chunk.span.start if spoiled is None else spoiled
            if chunk.state is ChunkState.PLACED:
                placed.append(self._placed(chunk, settled))
            elif chunk.is_missing_embeddings:
                missing.append(i)
        if missing:
            raise PixelsNeeded(missing)
        if ended:
            plan.embed()
            self._write(plan, "place", placed, began)
        if plan.is_placed:
            plan.fix()
        return spoiled

    def _place_kept(self, plan: LinkPlan) -> None:
        """Relocate and write what a plan's session serves."""
        if plan.session is None or not plan.session.placed:
            return
        began = time.perf_counter()
        self._write(plan, "session", plan.session.left_to_write(plan.prefix_hit.stop), began)

    def _write(self, plan: LinkPlan, stage: str, chunks: Sequence[PlacedChunk], began: float) -> None:
        """Write chunks; a stage took the time since `began`, of which a device's part is told by the device."""
        launched = time.perf_counter()
        spans = write_chunks(self.engine, plan.sequence.blocks, chunks)
        plan.took(stage, (launched if spans else time.perf_counter()) - began, spans)

    def select(self, work: Sequence[tuple[LinkPlan, Sequence[Run]]], budget: int) -> int:
        """Choose tokens or weigh parts of the chunks that are `TO_WEIGH`, and write them.

        Of a cacheblend chunk it chooses the tokens that the plan's forward computes; of a composed one it weighs the
        parts of the patch. For that the links' tokens, chunks with stored KV included, run in context through the
        model's first two layers, or only through the first one's queries and keys (`Weighing.ATTENTION`). The KV that
        this leaves behind is overwritten, here or by the plan's forward.

        Args:
            work: plans, and what no forward has computed of each up to the last chunk that is measured.
            budget: tokens of one partial forward at most.

        Returns:
            How many partial forwards it took.
        """
        began, taken = time.perf_counter(), 0
        attend = self.weigh_by is Weighing.ATTENTION
        by_kv = [(plan.sequence, runs) for plan, runs in work if not (attend and plan.has_parts_to_weigh)]
        for part in forwards(by_kv, budget):
            self.engine.forward_first(part, MEASURED_LAYER + 1)
            taken += 1
        by_attention = [(plan, runs) for plan, runs in work if attend and plan.has_parts_to_weigh]
        weights, attended = weighed_by_attention(self.engine, by_attention, budget)
        shared, whole = time.perf_counter() - began, sum(len(run) for _, runs in work for run in runs)
        for plan, runs in work:
            began = time.perf_counter()
            chosen = [
                self._placed(chunk, self._weighed(plan, chunk, weights.get(chunk)))
                for chunk in plan.chunks
                if chunk.state is ChunkState.TO_WEIGH
            ]
            choosing = time.perf_counter() - began
            plan.took("select", shared + choosing)
            plan.select_ms += (shared * sum(map(len, runs)) / max(whole, 1) + choosing) * 1e3
            self._write(plan, "place", chosen, began + choosing)
            plan.fix()
        return taken + attended

    def _weighed(self, plan: LinkPlan, chunk: ChunkPlan, weights: Tensor | None) -> Found:
        """Choose a chunk's tokens, or weigh its patch's parts, by what a partial forward left.

        Returns the KV and patch to write.

        `weights` of the parts, if attention has told them.
        """
        found = chunk.end_weighing()
        if weights is None:
            mode, span = plan.request.mode, chunk.span
            assert found.canonical is not None
            in_context = self.engine.read_kv(plan.sequence.blocks, span.start, len(span), [MEASURED_LAYER])
            both = in_context, found.canonical.kv[[MEASURED_LAYER]], chunk.start_position, self.engine.layout
            if found.patch is None:
                chunk.selected = selected_by_deviation(mode, deviations(*both), span.start)
                chunk.outcome = replace(chunk.outcome, reason=reasons.selected(mode, chunk))
                return found
            base, *pairs = found.parts
            weights = measured_weights(base, pairs, measured_deficit(*both))
        if chunk.keys.is_cacheable:
            self._weights.put(plan.request.tenant, chunk.keys.own_patch, weights, chunk.weights_epoch)
        return summed(chunk, found, weights)

    def layerwise_loads(self, plan: LinkPlan) -> list[LayerwiseLoad]:
        """Loads of all chunks on their way, for a forward that writes them as they come in.

        None if one of them has no layer yet, or cannot come in by layers.
        """
        loads: list[LayerwiseLoad] = []
        for chunk in plan.chunks:
            if chunk.is_blocking:
                slots = self.engine.slots(plan.sequence.blocks, chunk.span.start, chunk.span.stop)
                load = LayerwiseLoad.of(chunk, slots, self.engine.layout, self.form.basis)
                if load is None:
                    return []
                loads.append(load)
        return loads

    def _placed(self, chunk: ChunkPlan, found: Found) -> PlacedChunk:
        """Stored KV and patch of a chunk, with its place in the sequence."""
        assert found.canonical is not None
        patch = found.patch.patch.bind(self.form.basis) if found.patch else None
        lasts = found.patch is not None and not found.parts and patch is found.patch.patch  # else new
        run = Run(chunk.span.start, chunk.span.stop)
        return PlacedChunk(found.canonical.kv, patch, chunk.start_position, run, kv_lasts=True, patch_lasts=lasts)
