"""Settings of the prefill role."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvstore.settings import FactorType
from prefill_workers.modes import EXACT_POINTS, FreeText, OperatingPoint, composed_antecedents

COMPOSE_UP_TO = 3  # of a model that was not measured: of the reference models two hold up to 5, two sum nothing
# Tokens (`bench fidelity`, drift): 7 between chunks cost a stored patch little of its worth and 63 much, 63 before them
# cost none of it. A thousand before them change up to 0.075 of the answers.
FREE_TEXT = FreeText(between=8, before=64)
PATCHED_BOUND = 0.5  # nats: sound patches stay below 0.25, broken ones begin at 1.7 (there, rolling KL by situation)
COMPOSED_BOUND = 0.3  # sums by measured weights are at 0.01 to 0.09, those without weights at 0.49 to 0.60 (there)


class Weighing(StrEnum):
    """Source of the weights of pair patches in a sum (see `link.compose`)."""

    KV = "kv"
    ATTENTION = "attention"


class PatchFormSettings(BaseModel):
    """Form of patches: the part of a deficit that they keep.

    Prefill workers and patch compilers must agree on it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int | None = Field(32, ge=1, description="Rank of patches per layer for keys and for values; None: full.")
    factors: FactorType = Field(
        FactorType.int8, description="int8: a byte per number of a patch and a scale per direction; model: its dtype."
    )
    spread: bool = Field(
        True,
        description="Give each layer, and keys and values, as much rank as its deficit is worth: `rank` on average, at "
        "most twice as much. False, and with a shared basis: the same everywhere.",
    )
    energy: float | None = Field(
        None, gt=0, le=1, description="Keep as few ranks, up to `rank`, as hold this share of the norm. None: `rank`."
    )
    depth: float = Field(
        1.0, gt=0, le=1, description="Share of the layers that patches cover, deepest first; 0.5: deep-only patches."
    )
    basis: str | None = Field(
        None, description="Version of the shared basis that patches are coefficients of. None: directions of their own."
    )
    pool_basis: int = Field(
        0, ge=0, description="Pool so many patches into a shared basis, store it and log its version. 0: never."
    )


class FidelitySettings(BaseModel):
    """Online fidelity: checks against exact prefill, and bounds that disable an operating point."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        0.01, ge=0, le=1, description="Share of the requests reusing KV that are computed again exactly, when idle."
    )
    tokens: int = Field(
        8, ge=1, description="Last prompt tokens compared, as far as they stand behind the last chunk; 1: the last."
    )
    window: int = Field(64, ge=1, description="Checks of an operating point over which its KL is averaged.")
    minimum: int = Field(8, ge=1, description="Checks in the window before an operating point is judged.")
    bounds: dict[OperatingPoint, float] = Field(
        default_factory=lambda: {OperatingPoint.PATCHED: PATCHED_BOUND, OperatingPoint.COMPOSED: COMPOSED_BOUND},
        description="Mean KL in nats beyond which an operating point is switched off until an operator allows it. "
        "Points without a bound are measured only; that of `patched` holds for `composed` where this has none.",
    )

    @field_validator("bounds")
    @classmethod
    def _of_approximate_points(cls, bounds: dict[OperatingPoint, float]) -> dict[OperatingPoint, float]:
        for point, bound in bounds.items():
            if point in EXACT_POINTS:
                raise ValueError(f"{point} is exact: it has no bound")
            if not bound > 0:
                raise ValueError(f"the bound of {point} must be positive, not {bound}")
        if OperatingPoint.PATCHED in bounds:
            return {OperatingPoint.COMPOSED: bounds[OperatingPoint.PATCHED], **bounds}
        return bounds

    @model_validator(mode="after")
    def _can_be_judged(self) -> FidelitySettings:
        if self.minimum > self.window:
            raise ValueError(f"minimum ({self.minimum}) checks never lie in a window of {self.window}")
        return self


class SessionSettings(BaseModel):
    """Limits of sessions: KV that is kept of conversations that ask for it (`orbit.session`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    idle_s: float = Field(3600.0, gt=0, description="Seconds that a session is kept after its last request.")
    max_bytes: int = Field(
        8 << 30,
        ge=1,
        description="KV of all sessions of one worker, in whatever tier of the library. Beyond it, sessions of the "
        "tenant that holds most go, the longest idle first; of a session with more than half, what idle time made, "
        "then its oldest segments.",
    )


@dataclass(frozen=True)
class CompileLimits:
    """Limits of compiling ahead.

    Attributes:
        orbit_chunks: largest set of chunks whose orders are all run; 0: none.
        subset_forwards: forwards over prefix subsets of a larger set; 0: none.
        pair_forwards: pairs that are compiled of a set; 0: none.
        compose_up_to: antecedents whose pair patches are summed.
        share: of the worker's time that forwards for all of this may take; 0: nothing is compiled.
        busy_share: of the time of a worker that has links to compute, for keeping what earlier ones computed.
    """

    orbit_chunks: int = 3
    subset_forwards: int = 0
    pair_forwards: int = 0
    compose_up_to: int = COMPOSE_UP_TO
    share: float = 1.0
    busy_share: float = 0.1

    def without_sums(self) -> CompileLimits:
        """The same where no pair patches are summed: none is worth a forward for that."""
        return replace(self, pair_forwards=0, compose_up_to=0)

    def of_session(self, chunks: int) -> CompileLimits:
        """The same for a session's prompt of so many chunks.

        What stays there keeps its order and is relocated. Only what comes back needs a patch, behind all of the window:
        one of pairs, if so many are summed.
        """
        pairs = self.pair_forwards if chunks - 1 <= self.compose_up_to else 0
        return replace(self, orbit_chunks=0, subset_forwards=0, pair_forwards=pairs)


@dataclass(frozen=True)
class LoopLimits:
    """Limits of a prefill loop.

    Attributes:
        budget: tokens of one forward at most.
        max_queue: links that may wait; more are refused with `Overloaded`.
        lease_seconds: how long linked KV waits for a decode engine to read it.
        learns: whether computed chunks are kept (canonical KV, patches) in the background.
        compiles: how much is compiled in the background ahead of requests.
        patience_seconds: how long background work gives way to hand-offs of links that have finished, and to requests
            that are on their way.
        host_bytes: host memory for blocks that prompts may begin with, behind the pool.
        keeps_answers: whether the KV of answers is kept, where prompts' blocks are; `reads_answers`: whether it may be
            read from decode engines.
    """

    budget: int
    max_queue: int
    lease_seconds: float
    learns: bool = True
    compiles: CompileLimits = field(default_factory=CompileLimits)
    patience_seconds: float = 0.5
    host_bytes: int = 0
    keeps_answers: bool = True
    reads_answers: bool = True


class PrefillSettings(BaseModel):
    """The prefill worker: engine, linker and the loop that drives them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="KV pool in GiB. None: 1 on a CPU; on a GPU what gpu_memory_utilization leaves beside the weights.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory that vLLM may take.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks over which one replica's model is split.")
    block_size: int | None = Field(
        None, description="Tokens per KV block, the same on decode workers. None: 64 on a GPU, on a CPU vLLM's choice."
    )
    max_batch_tokens: int = Field(4096, ge=64, description="Tokens of one forward; longer runs go on in the next one.")
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Lengths in tokens, such as [64, 128, 256, 512], to which forwards that end prompts are padded. "
        "On a GPU they are captured as CUDA graphs at start, which none has run yet; longer ones are computed eagerly.",
    )
    max_queue: int = Field(256, ge=1, description="Links that may wait; further ones are answered 429.")
    loaded_bytes: int = Field(
        8 << 30,
        ge=1,
        description="Memory for the stored KV of links that have not ended, by all of their chunks' tokens: further "
        "links load when these have ended. One that has more goes by itself.",
    )
    lease_seconds: float = Field(60.0, ge=5, description="How long linked KV waits for a decode engine to read it.")
    max_patch_queue: int = Field(64, ge=1, description="Deficits waiting to be compiled; further ones are dropped.")
    max_patch_queue_bytes: int = Field(
        1 << 30, ge=1, description="Memory of deficits waiting to be compiled; one may wait, however large."
    )
    prefix_cache: bool = Field(
        True,
        description="Let prompts that begin like earlier ones, text and images, share these KV blocks: nothing of that "
        "is computed again. They stay until the pool needs them.",
    )
    prefix_cache_bytes: int = Field(
        0,
        ge=0,
        description="Host memory for blocks of `prefix_cache` that the pool has no room for. They come back by copy "
        "when a prompt begins with them. For GPUs: on a CPU the pool itself lies there. 0: none.",
    )
    keep_answers: bool = Field(
        True,
        description="Keep the KV of answers behind their prompts' blocks, so that the next turn of a "
        "chat, which brings the answer back, computes what is new alone. Not without `prefix_cache`.",
    )
    pull_answers: bool = Field(
        True,
        description="Read an answer's KV from the decode worker that generated it, once it has ended, instead of "
        "computing it in idle time: over NIXL, as the prompt's went there. What cannot be read is computed. Where "
        "`keep_answers` is.",
    )
    first_token: bool = Field(
        True,
        description="Let the worker that links a prompt draw the answer's first token, so that the client has it "
        "before the hand-off. Requests that only a decode engine can serve from the start (log-probabilities, stop "
        "strings, constraints, presence and frequency penalties, n) are left to it. False: all are.",
    )
    form_patches: bool = Field(True, description="Keep what requests computed: canonical KV, embeddings and patches.")
    orbit_chunks: int = Field(
        3,
        ge=0,
        le=16,
        description="Run the orders of up to this many chunks when idle, so that any order links: all orders of 5 "
        "chunks or fewer, 24 times as many forwards as chunks beyond. Where sums of pairs serve a set, only if it is "
        "expected again. 0: never.",
    )
    subset_forwards: int = Field(
        2,
        ge=0,
        description="Forwards, when idle, over subsets of a set of more chunks than that: those that later requests "
        "most likely bring, in the order served. 0: never.",
    )
    pair_forwards: int = Field(
        12,
        ge=0,
        description="Pairs of a set's chunks that are compiled when idle, for patches behind one chunk alone, where "
        "these are summed (`compose_up_to`): 4 chunks have 12 pairs. And as many of any set's chunks with others that "
        "the tenant asked for more than once. 0: never.",
    )
    compile_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the time, over two minutes, that forwards for orders, subsets and pairs may take; those "
        "expected to save most come first. What requests computed is kept in any case. 0: nothing else is compiled.",
    )
    busy_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of a busy time that keeping what requests computed may take, of images that were asked for "
        "before. Otherwise that waits until no request has come for a while, the longer the fewer images come again.",
    )
    fidelity: FidelitySettings = FidelitySettings()
    sessions: SessionSettings = SessionSettings()
    compose_up_to: int | None = Field(
        None,
        ge=0,
        description="Link a chunk behind up to so many others by the weighted sum of its patches behind each of them, "
        "where no patch of their set is stored. 0: never. None: as far as was measured for the model (orbitserve.json "
        f"beside its weights), or {COMPOSE_UP_TO}.",
    )
    weigh_by: Weighing | None = Field(
        None,
        description="What weighs the patches of such a sum in an order that is new. kv: a forward through the first "
        "layer and to the second's KV. attention: the first layer's queries and keys alone, which no layer runs for; "
        "not for latent attention (MLA). None: what was measured to hold for the model (orbitserve.json), or kv.",
    )
    free_text: int = Field(
        FREE_TEXT.between,
        ge=0,
        description="Text between chunks up to so many tokens does not key patches; where there is more, all text "
        "between the chunks up to the patched one does. A request's `orbit.text` may say otherwise.",
    )
    free_text_before: int = Field(
        FREE_TEXT.before,
        ge=0,
        description="Likewise of the conversation's text before its first chunk, without system prompt and tools.",
    )
    self_check: bool = Field(
        True, description="Compare with vLLM's own prefill at start and refuse to serve otherwise."
    )

    @property
    def may_pull_answers(self) -> bool:
        """True if workers read answers' KV from decode workers."""
        return self.prefix_cache and self.keep_answers and self.pull_answers

    @property
    def free(self) -> FreeText:
        """Text that keys no patch."""
        return FreeText(self.free_text, self.free_text_before)

    def compile_limits(self, compose_up_to: int) -> CompileLimits:
        """Limits of compiling ahead, where pair patches behind so many antecedents are summed."""
        limits = CompileLimits(
            orbit_chunks=self.orbit_chunks,
            subset_forwards=self.subset_forwards,
            pair_forwards=self.pair_forwards,
            compose_up_to=compose_up_to,
            share=self.compile_share,
            busy_share=self.busy_share,
        )
        return limits if composed_antecedents(compose_up_to) else limits.without_sums()

    def loop_limits(self, compose_up_to: int, *, reads_answers: bool) -> LoopLimits:
        """Limits of the loop.

        Args:
            compose_up_to: pair patches behind so many antecedents are summed.
            reads_answers: whether every rank of a decode engine can be told that it was read.
        """
        return LoopLimits(
            budget=self.max_batch_tokens,
            max_queue=self.max_queue,
            lease_seconds=self.lease_seconds,
            learns=self.form_patches,
            compiles=self.compile_limits(compose_up_to),
            host_bytes=self.prefix_cache_bytes,
            keeps_answers=self.keep_answers,
            reads_answers=self.may_pull_answers and reads_answers,
        )
