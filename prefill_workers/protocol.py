"""Messages between the ingress and prefill workers: plain values, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from prefill_workers.modes import Mode, OperatingPoint, Text

if TYPE_CHECKING:
    from torch import Tensor

    from kvstore.operator.patch import PatchKind
    from kvstore.records.record import RecordKind


TEXT = "text"  # the modality of a document: its tokens are its content
TINY_PROMPT = list(range(1, 9))  # token ids of a prompt by which engines shake hands


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
        """True if computing the chunk takes embeddings that its token ids do not give."""
        return self.modality != TEXT

    @property
    def embedded(self) -> int:
        """Placeholders that carry an embedding."""
        return self.count if self.is_embed is None else int(self.is_embed.sum())

    def __len__(self) -> int:
        return self.stop - self.start


class Survivors(StrEnum):
    """Treatment of segments that stay while something before them leaves."""

    KEEP = "keep"  # the KV that they have, relocated
    REFRESH = "refresh"  # the same; the oldest and those behind it take exact KV, as far as idle time has made it
    REMOVAL = "removal"  # relocated, with a patch of rank 32 that idle time formed to take out what left (kamera.md §5)
    EXACT = "exact"  # computed: only KV that a full prefill would give is taken from a session


@dataclass(frozen=True)
class SessionRef:
    """Session of a request, by its tenant's name for it.

    `parent` names the session that a new one begins as a fork of; `clean`: without its conditioned KV.
    `cascade_tokens`: see `sessions.survivors.choose`.
    """

    id: str
    parent: str | None = None
    clean: bool = False
    survivors: Survivors = Survivors.REFRESH
    cascade_tokens: int | None = None


@dataclass(frozen=True)
class SessionInfo:
    """Description of a session. Times are Unix seconds; `nbytes`: its KV's, in whatever tier."""

    id: str
    created: float
    used: float
    expires: float
    segments: int
    chunks: int
    tokens: int
    nbytes: int
    parent: str | None = None


@dataclass(frozen=True)
class SessionStats:
    """Numbers of sessions that a worker has served and keeps, and of their bytes."""

    sessions: int
    nbytes: int


class LoadBearingState(StrEnum):
    """Progress of a measurement that idle time makes."""

    QUEUED = "queued"
    MEASURED = "measured"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Loss:
    """Effect of a change to a prompt's KV on its next token.

    `kl`: KL(as linked ‖ changed) of the next-token distributions [nats]; `changes_token`: the most likely token is
    another one.
    """

    kl: float
    changes_token: bool


@dataclass(frozen=True)
class ChunkLoss:
    """Next-token loss of a prompt without one of its chunks, and without its conditioning.

    `patch_off`: its canonical KV stands in its place; None: that is not stored, and cannot be computed. `left_out`: it
    is not there, and what stands behind it has moved up.
    """

    tokens: int
    operating_point: OperatingPoint
    patch_off: Loss | None
    left_out: Loss


@dataclass(frozen=True)
class LoadBearing:
    """Load-bearing chunks of a request's prompt (kamera.md App. E), as far as measured.

    `reason`: why it was skipped. `chunks`: in the prompt's order.
    """

    request_id: str
    state: LoadBearingState = LoadBearingState.QUEUED
    reason: str = ""
    chunks: tuple[ChunkLoss, ...] = ()


class CompactionPolicy(StrEnum):
    """Reduction of a prompt's KV entries to those of the budget (see `compaction.plan`)."""

    EVICT = "evict"
    COVER = "cover"
    MERGE = "merge"
    PAPER = "paper"


@dataclass(frozen=True)
class Compaction:
    """KV that decode is given of a prompt and keeps of an answer (elastic_cache.md 3.3).

    Attributes:
        budget: entries handed off per prompt token; 1: all of them, untouched.
        least: entries at least, whatever the budget.
        window: generated tokens that decode keeps at least; None: all.
    """

    budget: float = 1.0
    policy: CompactionPolicy = CompactionPolicy.EVICT
    window: int | None = None
    least: int = 0


@dataclass(frozen=True)
class HandedOff:
    """KV entries of a prompt that a decode engine pulls: `kept` of `tokens`, in so many bytes."""

    tokens: int
    kept: int
    bytes: int


class CompactionRefused(ValueError):
    """This model's KV cannot be reduced; the message says why."""


def _linked_in(mode: Mode, session: SessionRef | None) -> Mode:
    """Mode of a request, given its session.

    `auto` would link chunks approximately that the session has not got.
    """
    is_exact = session is not None and session.survivors is Survivors.EXACT
    return Mode.EXACT if is_exact and mode == Mode.AUTO else mode


@dataclass(frozen=True)
class LinkRequest:
    """Request for one prompt's KV, to a prefill worker.

    `prefix` are the token ids of the fixed prefix (system prompt and tools) that patches are keyed by, and `text` says
    whether other text is, too. The prompt's first `head` tokens are what the chat template makes of that prefix, up to
    the first word of the conversation; 0: not known. `readers` is how many decode sequences will pull the KV (`n` of
    the request). With `sampling` the answer's first token is wanted too. `patched` says of each chunk whether its
    sender knows of a patch for it where it stands, () where that does not matter or is not known: the choice of a
    worker minds it, no worker does. `session`: whose kept KV serves, and which keeps what is linked; where its
    survivors are exact, `mode` is `exact` in place of `auto`.

    Raises:
        ValueError: chunks overlap, or are not in the prompt's order, or the head reaches into one.
    """

    request_id: str
    token_ids: Sequence[int]
    chunks: tuple[ChunkSpan, ...] = ()
    mode: Mode = Mode.AUTO
    tenant: str = "local"
    prefix: tuple[int, ...] = ()
    text: Text = Text.AUTO
    readers: int = 1
    sampling: Sampling | None = None
    patched: tuple[bool, ...] = ()
    head: int = 0
    session: SessionRef | None = None
    compaction: Compaction = Compaction()
    load_bearing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _linked_in(self.mode, self.session))
        stop = 0
        if self.chunks and self.head > self.chunks[0].start:
            raise ValueError(f"a head of {self.head} tokens overlaps chunk 1, which begins at {self.chunks[0].start}")
        for i, span in enumerate(self.chunks):
            if not stop <= span.start <= span.stop:
                raise ValueError(f"chunk {i + 1}, tokens {span.start} to {span.stop}, overlaps the one before it")
            stop = span.stop

    @property
    def opening(self) -> tuple[int, ...]:
        """Token ids before the conversation; the fixed prefix's own where the head is not known."""
        return tuple(self.token_ids[: self.head]) if self.head else self.prefix

    @property
    def words_before(self) -> int:
        """Tokens between the opening and the first chunk; 0 without chunks."""
        return max(0, self.chunks[0].start - (self.head or len(self.prefix))) if self.chunks else 0


@dataclass(frozen=True)
class PrefetchRequest:
    """Announcement of a prompt's chunks while it is still being rendered.

    `contents` are content ids in the prompt's order, `documents` those of them that are text chunks; `delimiters` are
    the token ids around the placeholders of the others, which are images. `mode`, `prefix` and `session` are as in
    `LinkRequest`.
    """

    contents: tuple[str, ...]
    delimiters: tuple[int, ...] = ()
    documents: frozenset[str] = frozenset()
    mode: Mode = Mode.AUTO
    tenant: str = "local"
    prefix: tuple[int, ...] = ()
    session: SessionRef | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _linked_in(self.mode, self.session))


@dataclass(frozen=True)
class ChunkOutcome:
    """Outcome of one chunk, for the request's report.

    `rank` and `kind` are those of the patch, if one was used; `missed` says that one was looked for and none is stored,
    `sums_off` that none was put together from parts, because sums are switched off.
    """

    tokens: int
    operating_point: OperatingPoint
    antecedents: int
    reason: str
    rank: int | None = None
    kind: PatchKind | None = None
    missed: bool = False
    sums_off: bool = False


@dataclass(frozen=True)
class SessionOutcome:
    """Segments of a prompt by how its session served them, and the tokens that it gave.

    `prefix`: KV that is exact there. `survived`: relocated, something before it has left. `refreshed`: of these two, KV
    made in idle time. `recalled`: seen before, linked as any chunk. `computed`: still there, but behind something that
    was not there before, or its KV was not to be had. `new`: the rest.
    """

    prefix: int = 0
    survived: int = 0
    refreshed: int = 0
    computed: int = 0
    recalled: int = 0
    new: int = 0
    tokens_reused: int = 0


class PixelsNeeded(Exception):
    """Pixels are missing of chunks that must be computed (indices into `chunks`).

    Their embeddings are stored nowhere.
    """

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(f"pixels needed for chunks {list(chunks)}")
        self.chunks = tuple(chunks)

    def __reduce__(self) -> tuple[type[PixelsNeeded], tuple[tuple[int, ...]]]:
        return PixelsNeeded, (self.chunks,)


@dataclass(frozen=True)
class LinkResult:
    """A linked sequence, ready to be pulled by a decode engine."""

    lease: str
    transfer: dict[str, Any]  # vLLM's kv_transfer_params
    chunks: tuple[ChunkOutcome, ...]
    tokens_reused: int
    tokens_computed: int
    stages_ms: dict[str, float]
    prefix_tokens_reused: int = 0  # of those reused: what earlier prompts began with as well
    first_token: int | None = None  # of the answer, if the request asked for it
    compute_ms: float = 0.0  # of forwards that others may have shared: its part
    select_ms: float = 0.0  # of choosing tokens and weighing parts, which others may have shared: its part
    session: SessionOutcome | None = None  # of a request with a session
    kv: HandedOff | None = None
    reads_answer: bool = False  # from the decode engine, once it has ended

    @property
    def chunk_tokens_reused(self) -> int:
        """Reused tokens of chunks behind the prefix."""
        return self.tokens_reused - self.prefix_tokens_reused


class NonFiniteLogits(RuntimeError):
    """NaN or infinite logits behind a prompt: its KV is not what the model would have computed.

    `stored`: the records that were linked, as `Library.quarantine` takes them. `is_prefix_hit`: KV of earlier prompts
    was used.
    """

    def __init__(self, stored: Sequence[tuple[RecordKind, str, str]] = (), *, is_prefix_hit: bool = False) -> None:
        super().__init__("the model gave logits that are not finite")
        self.stored, self.is_prefix_hit = tuple(stored), is_prefix_hit

    def __reduce__(self) -> tuple[Any, ...]:
        return _non_finite, (self.stored, self.is_prefix_hit)


def _non_finite(stored: Sequence[tuple[RecordKind, str, str]], is_prefix_hit: bool) -> NonFiniteLogits:
    return NonFiniteLogits(stored, is_prefix_hit=is_prefix_hit)


class Overloaded(RuntimeError):
    """The queue of waiting links is full."""


class PromptTooLarge(ValueError):
    """The prompt needs more KV blocks than the whole pool has."""


@dataclass(frozen=True)
class Refusal:
    """A refusal as the answer of a call to another process.

    Ray Serve logs whatever a replica raises as an error, with a traceback: only faults are raised there.
    """

    error: Exception


def lease_owner(process: int, replica: str) -> str:
    """Prefix of the lease ids of a prefill replica, unique among its processes."""
    return f"prefill-{process}-{replica}"


def replica_of(lease: str) -> str:
    """Replica that holds a lease's blocks; of ids by `lease_owner`."""
    return lease.split("-", 2)[2].rpartition("-")[0]


class LeaseState(StrEnum):
    """State of a lease's blocks, as far as a worker knows."""

    HELD = "held"  # they are nobody else's, and will not be just now
    READ = "read"  # they were, until all had pulled them that were to
    UNKNOWN = "unknown"  # it is another worker's lease, has expired, or is about to


@dataclass(frozen=True)
class Sampling:
    """Parameters by which a token is drawn from its logits.

    Names and meaning are those of vLLM's `SamplingParams`. `temperature` 0 takes the likeliest; `top_k` 0 and no
    `allowed_token_ids` allow all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
