"""What a prefill worker is asked to link, and the plan by which it does: plain values that the roles pass around.

token      0 ........ text ...... | chunk 1 | text | chunk 2 | text ......... n
reused                            |#########|
runs       [====================]           [======================]
frontier   if chunk 2's KV is still loading ........^
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from prefill_workers.link.lookups import Found, Lookup
from prefill_workers.link.prefix_cache import Beginning, Block
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import ChunkOutcome, ChunkSpan, LinkRequest
from prefill_workers.sequence import Embedded, LinkSequence, Run, complement

if TYPE_CHECKING:
    from prefill_workers.link.layerwise_load import LayerwiseLoad


@dataclass(eq=False)
class ChunkPlan:
    """One chunk of a plan: where it stands, what is loading for it, and how it is linked.

    While `loading` is set the chunk's KV is on its way and `outcome` is what is expected. `written` is what a
    forward has written of it meanwhile; whether that was sound is known when the load has ended. `ruled_out` is the
    operating point that the request's mode would have looked for, if it is switched off (see `fidelity`); where that is
    `composed`, stored patches of the whole set serve all the same.

    `selected` are the tokens of a chunk with stored KV that a forward computes all the same. While `unmeasured` is set
    they are still to be found: those whose KV in context is farthest from this canonical KV. Or, where this has
    `parts`, their weights: how much of each makes up the KV in context.

    `unfit`: what is stored of the chunk is of other tokens than it has now; what is computed takes its place.
    """

    span: ChunkSpan
    canonical_key: str
    patch_key: str
    context: tuple[int, ...]  # what its patches are keyed by beside the chunks before it (`keys.contexts`)
    start_position: int  # RoPE position of its first token, in the shifted frame
    outcome: ChunkOutcome
    loading: Lookup | None = None
    embeddings: Tensor | None = None  # [placeholders that carry one, hidden]
    encoded: bool = False  # these were encoded for this request
    written: LayerwiseLoad | None = None
    selected: tuple[Run, ...] = ()
    unmeasured: Found | None = None
    ruled_out: OperatingPoint | None = None
    unfit: bool = False
    weights_epoch: int = 0  # of `composing.KnownWeights`, when it was planned
    teaches: bool = True  # see `keys.ChunkKeys`

    @property
    def barred(self) -> bool:
        """Whether nothing stored of the chunk may be linked."""
        return self.ruled_out not in (None, OperatingPoint.COMPOSED)

    @property
    def waits(self) -> bool:
        """Whether what stands behind the chunk must wait for its load, or for the choice of its tokens."""
        return self.unmeasured is not None or (self.loading is not None and self.written is None)

    @property
    def reuses_kv(self) -> bool:
        """Whether the chunk's stored KV is used."""
        return self.outcome.operating_point.reuses_kv

    @property
    def reused(self) -> list[Run]:
        """The chunk's tokens that need no forward."""
        return complement(self.selected, self.span.stop, self.span.start) if self.reuses_kv else []

    @property
    def lacks_embeddings(self) -> bool:
        """Whether a forward could not compute the chunk, as far as is known."""
        return self.span.needs_embeddings and self.embeddings is None


@dataclass(eq=False)
class LinkPlan:
    """Everything needed to link one request; made by `Linker.plan`.

    `beginning`: how far the prefix cache knows the text before the first chunk; None: it is computed, and not kept.
    `found` is its KV, until that is written. `unpin` lets go of the stored records that the plan uses; it also happens
    when the plan is dropped.
    """

    request: LinkRequest
    sequence: LinkSequence
    chunks: list[ChunkPlan]
    beginning: Beginning | None = None
    found: tuple[Block, ...] = ()
    stages_ms: dict[str, float] = field(default_factory=dict)
    compute_ms: float = 0.0  # of forwards: its share of their tokens, without what they waited for
    select_ms: float = 0.0  # of choosing tokens and weighing parts: the same
    began: float = field(default_factory=time.perf_counter)
    unpin: Callable[[], object] = field(default=lambda: None)
    _runs: list[Run] | None = None  # once they are fixed: they may be many, and are asked for often

    def took(self, stage: str, seconds: float) -> None:
        """Add to what a stage has taken."""
        self.stages_ms[stage] = self.stages_ms.get(stage, 0.0) + seconds * 1e3

    def pinned_by(self, unpin: Callable[[], object]) -> LinkPlan:
        """This plan, which from now on owns the pins that `unpin` undoes."""
        finalizer = weakref.finalize(self, unpin)
        finalizer.atexit = False
        self.unpin = finalizer
        return self

    @property
    def runs(self) -> list[Run]:
        """What a forward computes, if what is loading arrives."""
        if self._runs is not None:
            return self._runs
        return complement([self.known, *(run for c in self.chunks for run in c.reused)], len(self.sequence))

    def fix(self) -> None:
        """The plan is settled: let go of the stored records, and find its runs no more. For the engine's thread."""
        self.unpin()
        if self._runs is None:
            self._runs = self.runs

    @property
    def known(self) -> Run:
        """The first tokens, as far as the prefix cache has them."""
        return Run(0, 0) if self.beginning is None else self.beginning.run

    def runs_between(self, start: int, stop: int) -> list[Run]:
        """The parts of the runs that lie in the tokens `start` up to `stop`."""
        cut = (Run(max(run.start, start), min(run.stop, stop)) for run in self.runs)
        return [run for run in cut if run.start < run.stop]

    @property
    def frontier(self) -> int:
        """The first token that waits for a load or a choice.

        Tokens attend to all before them: none behind it can be computed.
        """
        return next((c.span.start for c in self.chunks if c.waits), len(self.sequence))

    @property
    def loads(self) -> bool:
        """Whether some chunk's KV is still on its way."""
        return any(c.loading is not None for c in self.chunks)

    @property
    def measures(self) -> bool:
        """Whether `Linker.select` must now choose tokens of some chunks, or weigh the parts of their patches."""
        return not self.loads and any(c.unmeasured is not None for c in self.chunks)

    @property
    def composes(self) -> bool:
        """Whether it is parts of patches that `Linker.select` must weigh."""
        return any(c.unmeasured is not None and c.unmeasured.parts for c in self.chunks)

    @property
    def settled(self) -> bool:
        """Whether all stored KV that the link uses has been written: what is left is a forward over `runs`."""
        return not self.loads and not self.measures

    @property
    def has_news(self) -> bool:
        """Whether a load has ended that `Linker.advance` has not seen."""
        return any(c.loading is not None and c.loading.done() for c in self.chunks)

    @property
    def tokens_reused(self) -> int:
        """Prompt tokens whose KV needs no forward."""
        return len(self.sequence) - self.tokens_computed

    @property
    def tokens_computed(self) -> int:
        """Prompt tokens that a forward computes."""
        return sum(len(run) for run in self.runs)

    def embed(self) -> None:
        """Hand the embeddings of the chunks that a forward, be it a partial one, computes to the sequence."""
        self.sequence.embedded = tuple(
            Embedded(c.span.first, c.embeddings, c.span.is_embed)
            for c in self.chunks
            if c.embeddings is not None and (c.outcome.operating_point.computes or c.unmeasured is not None)
        )
