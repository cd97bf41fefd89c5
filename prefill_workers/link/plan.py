"""Link plans: how one request's KV is put together, chunk by chunk.

token      0 ........ text ...... | chunk 1 | text | chunk 2 | text ......... n
prefix     |#########|
reused                            |#########|
runs                 [==========]           [======================]
frontier   if chunk 2's KV is still loading ........^
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

from prefill_workers.block_index import NO_MATCH, ChunkForm, PrefixMatch
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.link.lookups import Found, Lookup, Stored
from prefill_workers.modes import OperatingPoint
from prefill_workers.prefix_digests import PrefixChain
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest
from prefill_workers.sequence import Embedded, LinkSequence, Run, complement, union

if TYPE_CHECKING:
    from prefill_workers.engine.device_timer import DeviceSpan
    from prefill_workers.link.layerwise_load import LayerwiseLoad
    from prefill_workers.link.session_plan import SessionPlan


class ChunkState(Enum):
    """Progress of a chunk's KV into its link.

    SHARED until the link has blocks, if the prompt's beginning is cached:

        LOADING ──── load ended ───┬──▶ TO_WEIGH ── weighed ──▶ PLACED
          ▲ │ stream               ├──▶ PLACED
    late  │ ▼                      │
       STREAMING ─── load ended ───┴──▶ TO_COMPUTE
    """

    LOADING = auto()  # stored KV is on its way
    STREAMING = auto()  # on its way, and written layer by layer by a forward meanwhile
    TO_WEIGH = auto()  # loaded; which tokens are computed, or the weights of its patch's parts, is still to be found
    PLACED = auto()  # stored KV is in the link's blocks, or about to be written there
    TO_COMPUTE = auto()  # a forward computes it
    SHARED = auto()  # in blocks of an earlier prompt that begins alike


@dataclass(eq=False)
class ChunkPlan:
    """Plan of one chunk: where it stands, and how it is linked.

    While its KV is on its way, `outcome` is what is expected, and `lookup` tells when the load has ended. `stream` is
    what a forward writes of a `STREAMING` chunk; whether that was sound is known when the load has ended. `ruled_out`
    is the operating point that the request's mode would have looked for, if it is switched off (`fidelity.monitor`);
    where that is `composed`, stored patches of the whole set serve all the same.

    `selected` are the tokens of a chunk with stored KV that a forward computes all the same. `to_weigh` is what was
    found for a chunk in the state `TO_WEIGH`: tokens are selected whose KV in context is farthest from this canonical
    KV. Or, where this has `parts`, their weights are sought: how much of each makes up the KV in context.

    `is_unfit`: what is stored of the chunk is of other tokens than it has now; what is computed takes its place.
    """

    span: ChunkSpan
    keys: ChunkKeys
    start_position: int  # RoPE position of its first token, in the shifted frame
    outcome: ChunkOutcome
    state: ChunkState = ChunkState.LOADING
    lookup: Lookup | None = None  # of a chunk on its way
    stream: LayerwiseLoad | None = None
    selected: tuple[Run, ...] = ()
    to_weigh: Found | None = None
    embeddings: Tensor | None = None  # [placeholders that carry one, hidden]
    is_encoded: bool = False  # these were encoded for this request
    ruled_out: OperatingPoint | None = None
    is_unfit: bool = False
    stored: tuple[Stored, ...] = ()  # records that it was linked or computed from, once its load has ended
    weights_epoch: int = 0  # of `compose.KnownWeights`, when it was planned
    form: ChunkForm | None = None  # in which a `SHARED` chunk was made

    # -- transitions --------------------------------------------------------------------------------------------------

    def share(self, form: ChunkForm) -> None:
        """Take the chunk's KV from the blocks that the prompt begins with."""
        if self.state is ChunkState.SHARED and self.form == form:
            return
        self.state, self.form, self.lookup = ChunkState.SHARED, form, None
        self.outcome = ChunkOutcome(
            len(self.span),
            OperatingPoint.PREFIX,
            self.outcome.antecedents,
            f"an earlier prompt began alike; its KV: {form.point}",
        )

    def unshare(self) -> None:
        """Compute a chunk that was to be shared: its blocks were evicted before the link had them."""
        assert self.state is ChunkState.SHARED
        self.state, self.form = ChunkState.TO_COMPUTE, None
        self.outcome = ChunkOutcome(
            len(self.span),
            OperatingPoint.ENCODED if self.is_encoded else OperatingPoint.RECOMPUTED,
            self.outcome.antecedents,
            "the earlier prompt's KV was evicted meanwhile",
        )

    def begin_stream(self, stream: LayerwiseLoad) -> None:
        """Let the next forward write the chunk while it comes in."""
        assert self.state is ChunkState.LOADING
        self.state, self.stream = ChunkState.STREAMING, stream

    def drop_stream(self) -> None:
        """Wait for the whole chunk after all: a layer came too late for the forward."""
        assert self.state is ChunkState.STREAMING
        self.state, self.stream = ChunkState.LOADING, None

    def end_load(self) -> tuple[Found, LayerwiseLoad | None]:
        """Take the outcome of the load, which has ended, and what streamed of it; then `settle`."""
        assert self.lookup is not None
        found, stream = self.lookup.found(), self.stream
        self.lookup = self.stream = None
        return found, stream

    def settle(self, point: OperatingPoint, to_weigh: Found | None = None) -> None:
        """Fix the operating point of a chunk whose load has ended.

        With `to_weigh` it is placed once that is weighed.
        """
        assert self.is_loading
        if to_weigh is not None:
            self.state, self.to_weigh = ChunkState.TO_WEIGH, to_weigh
        else:
            self.state = ChunkState.PLACED if point.is_reuse else ChunkState.TO_COMPUTE

    def end_weighing(self) -> Found:
        """Place the chunk after its tokens are chosen or its parts are weighed.

        Returns what was found for it.
        """
        assert self.state is ChunkState.TO_WEIGH
        assert self.to_weigh is not None
        found, self.to_weigh = self.to_weigh, None
        self.state = ChunkState.PLACED
        return found

    # -- queries ------------------------------------------------------------------------------------------------------

    @property
    def made_at(self) -> OperatingPoint:
        """Operating point at which the chunk's KV was made, if need be by an earlier prompt."""
        return self.outcome.operating_point if self.form is None else self.form.point

    @property
    def is_loading(self) -> bool:
        """True while stored KV is on its way."""
        return self.state in (ChunkState.LOADING, ChunkState.STREAMING)

    @property
    def is_blocking(self) -> bool:
        """True while later tokens are blocked: KV still loading, or tokens to recompute not chosen."""
        return self.state in (ChunkState.LOADING, ChunkState.TO_WEIGH)

    @property
    def has_ended_load(self) -> bool:
        """True once a load has ended that `Linker.advance` has not seen."""
        return self.is_loading and self.lookup is not None and self.lookup.done()

    @property
    def is_reused(self) -> bool:
        """True unless a forward computes all of the chunk, as far as is known."""
        return self.state is not ChunkState.TO_COMPUTE

    @property
    def is_barred(self) -> bool:
        """True if nothing stored of the chunk may be linked."""
        return self.ruled_out not in (None, OperatingPoint.COMPOSED)

    @property
    def reused(self) -> list[Run]:
        """Tokens of the chunk that need no forward, unless the prompt's beginning covers them."""
        if self.state in (ChunkState.TO_COMPUTE, ChunkState.SHARED):
            return []
        return complement(self.selected, self.span.stop, self.span.start)

    @property
    def is_missing_embeddings(self) -> bool:
        """True if a forward could not compute the chunk, as far as is known."""
        return self.span.needs_embeddings and self.embeddings is None


@dataclass(eq=False)
class LinkPlan:
    """Plan of one request's link; made by `Linker.plan`.

    `chain` names the prompt's beginnings; None: none is looked for, and none kept. `prefix` is the one that is known,
    and `epoch` that of the index at that time. `session`: what the request's session serves. `unpin` lets go of the
    stored records that the plan uses; it also happens when the plan is dropped.
    """

    request: LinkRequest
    sequence: LinkSequence
    chunks: list[ChunkPlan]
    chain: PrefixChain | None = None
    frame: int = 0  # position of the first token
    epoch: int = 0
    prefix: PrefixMatch = NO_MATCH
    is_prefix_placed: bool = False
    session: SessionPlan | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    compute_ms: float = 0.0  # of forwards: its share of their tokens, without what they waited for
    select_ms: float = 0.0  # of choosing tokens and weighing parts: the same
    began: float = field(default_factory=time.perf_counter)
    unpin: Callable[[], object] = field(default=lambda: None)
    _runs: list[Run] | None = None  # once they are fixed: they may be many, and are asked for often
    _spans: list[tuple[str, DeviceSpan]] = field(default_factory=list)

    def took(self, stage: str, seconds: float, spans: Iterable[DeviceSpan] = ()) -> None:
        """Add seconds to a stage's time, and what a device goes on to compute for it."""
        self.stages_ms[stage] = self.stages_ms.get(stage, 0.0) + seconds * 1e3
        self._spans += [(stage, span) for span in spans]

    def end_stages(self) -> dict[str, float]:
        """Milliseconds by stage, once the device has computed all of the link."""
        spans, self._spans = self._spans, []
        for stage, span in spans:
            self.took(stage, span.seconds or 0.0)
        return self.stages_ms

    def pinned_by(self, unpin: Callable[[], object]) -> LinkPlan:
        """Own the pins that `unpin` undoes from now on; returns the plan itself."""
        finalizer = weakref.finalize(self, unpin)
        finalizer.atexit = False
        self.unpin = finalizer
        return self

    @property
    def runs(self) -> list[Run]:
        """Tokens that a forward computes, if what is loading arrives."""
        if self._runs is not None:
            return self._runs
        return complement(union([*self.written, *(run for c in self.chunks for run in c.reused)]), len(self.sequence))

    @property
    def written(self) -> list[Run]:
        """Runs whose KV is known from the start: of earlier prompts' blocks, and of the session."""
        return [self.prefix_hit, *(self.session.runs if self.session else ())]

    def fix(self) -> None:
        """Let go of the stored records and keep the runs; once all is placed."""
        self.unpin()
        if self._runs is None:
            self._runs = self.runs

    @property
    def prefix_hit(self) -> Run:
        """First tokens of the prompt whose KV is in blocks of earlier prompts."""
        return self.prefix.hit

    def begin_with(self, match: PrefixMatch) -> list[int]:
        """Begin with these blocks, before the link has any.

        Returns: the chunks that must be computed and lack embeddings, by index.
        """
        self.prefix, self._runs = match, None
        for i, chunk in enumerate(self.chunks):
            if chunk.span.stop <= match.tokens:
                chunk.share(match.forms[i])
            elif chunk.state is ChunkState.SHARED:
                chunk.unshare()
        self.embed()
        return [i for i, c in enumerate(self.chunks) if c.state is ChunkState.TO_COMPUTE and c.is_missing_embeddings]

    def before(self, chunk: ChunkPlan) -> list[ChunkPlan]:
        """Chunks that stand before one of the plan's."""
        return self.chunks[: self.chunks.index(chunk)]

    def runs_between(self, start: int, stop: int) -> list[Run]:
        """Parts of the runs that lie in the tokens `start` up to `stop`."""
        cut = (Run(max(run.start, start), min(run.stop, stop)) for run in self.runs)
        return [run for run in cut if run.start < run.stop]

    @property
    def frontier(self) -> int:
        """First token that waits for a load or a choice.

        Tokens attend to all before them: none behind it can be computed.
        """
        return next((c.span.start for c in self.chunks if c.is_blocking), len(self.sequence))

    @property
    def is_loading(self) -> bool:
        """True while any chunk's KV is on its way."""
        return any(c.is_loading for c in self.chunks)

    @property
    def needs_weighing(self) -> bool:
        """True once `Linker.select` must choose tokens, or weigh the parts of patches."""
        return not self.is_loading and any(c.state is ChunkState.TO_WEIGH for c in self.chunks)

    @property
    def has_parts_to_weigh(self) -> bool:
        """True if it is parts of patches that `Linker.select` must weigh."""
        return any(c.to_weigh is not None and c.to_weigh.parts for c in self.chunks)

    @property
    def is_placed(self) -> bool:
        """True once all stored KV of the link is written.

        What is left is a forward over `runs`.
        """
        settled = (ChunkState.PLACED, ChunkState.TO_COMPUTE, ChunkState.SHARED)
        return all(c.state in settled for c in self.chunks)

    @property
    def has_ended_loads(self) -> bool:
        """True once a load has ended that `Linker.advance` has not seen."""
        return any(c.has_ended_load for c in self.chunks)

    @property
    def tokens_reused(self) -> int:
        """Prompt tokens whose KV needs no forward."""
        return len(self.sequence) - self.tokens_computed

    @property
    def tokens_computed(self) -> int:
        """Prompt tokens that a forward computes."""
        return sum(len(run) for run in self.runs)

    @property
    def stored(self) -> list[Stored]:
        """Records that the link's KV was made from."""
        kept = self.session.stored if self.session else []
        return [*kept, *(record for chunk in self.chunks for record in chunk.stored)]

    def embed(self) -> None:
        """Hand the embeddings of chunks that a forward computes, if only in part, to the sequence."""
        self.sequence.embedded = tuple(
            Embedded(c.span.first, c.embeddings, c.span.is_embed)
            for c in self.chunks
            if c.embeddings is not None and (c.outcome.operating_point.needs_forward or c.state is ChunkState.TO_WEIGH)
        )
