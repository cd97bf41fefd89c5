"""The `orbit` object: what a request may ask for and what a response reports."""

from __future__ import annotations

import time
from asyncio import Future, Semaphore
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from infra.kv_window import dropped, window_of
from infra.vllm_env import BLOCK_SIZE
from prefill_workers.modes import Mode, OperatingPoint, Text, uses_session
from prefill_workers.protocol import Compaction, CompactionPolicy, SessionRef, Survivors
from serving.frontend.documents import Document
from serving.frontend.errors import InvalidRequest
from serving.frontend.video_options import VideoOptions

if TYPE_CHECKING:
    from serving.frontend.rounds import ToolRounds

LOAD_BEARING = "/v1/orbit/load_bearing"  # where answers' measurements are read
SESSION_ID = r"^[A-Za-z0-9._:@=+-]{1,128}$"
LEAST_BUDGET = 0.05  # of KV entries per token: with fewer no model that was measured answers
PROMPTS_AT_ONCE = 32  # of one request: the others wait for a place, not in a worker's queue


class SessionOptions(BaseModel):
    """`orbit.session` in a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        pattern=SESSION_ID, description="The tenant's name for the session: letters, digits and ._:@=+-, at most 128."
    )
    parent: str | None = Field(
        None,
        alias="from",
        pattern=SESSION_ID,
        description="Begin the session, where it is new, as a fork of this one: what that keeps is shared.",
    )
    clean: bool = Field(False, description="Begin a fork without KV that knows what stood before it.")
    survivors: Survivors = Field(
        Survivors.REFRESH,
        description="What stays of the window while something before it leaves. refresh: its KV is relocated; the "
        "oldest, and those behind it, take exact KV, as far as idle time has made it. keep: all is relocated as it is. "
        "removal: all is relocated, with patches that idle time has formed to take out what left. "
        "exact: it is computed; only KV that a full prefill would give is taken.",
    )

    cascade_tokens: int | None = Field(
        None,
        ge=1,
        description="Of what stays behind something that was not there before, such as a screenshot that came back, so "
        "many tokens are computed, the first segments of it; then KV is relocated that does not know it. null: all "
        "of it is computed.",
    )

    @model_validator(mode="after")
    def _is_a_fork(self) -> SessionOptions:
        if self.clean and self.parent is None:
            raise ValueError("clean belongs to a fork: say `from`")
        return self

    @property
    def ref(self) -> SessionRef:
        """The session as a link names it."""
        return SessionRef(self.id, self.parent, self.clean, self.survivors, self.cascade_tokens)


class ElasticOptions(BaseModel):
    """`orbit.elastic` in a request: how KV is reduced for decode."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: CompactionPolicy | None = Field(
        None,
        description="What `kv_budget` leaves. evict: first and last tokens, and those that the prompt's last words "
        "attend to most. cover: the same, but of each image or document an equal share: tokens that differ most from "
        "one another. merge: all text, and means within each image. paper: means around the most important tokens of "
        "the whole prompt. null: the service's.",
    )
    window: int | None = Field(
        None, ge=1, description="Generated tokens whose KV decode keeps at least, beside the prompt's; null: all."
    )


class OrbitOptions(BaseModel):
    """`orbit` in a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str = Field(
        "auto",
        description="auto: stored patches where they fit, exact otherwise. exact: every chunk computed in context. "
        "full-reuse: canonical KV without patches (blind baseline). off: nothing looked up, nothing stored. "
        "mpic-K (K from 0 to 4096): as full-reuse, but the first K tokens of every chunk are computed in context. "
        "cacheblend-R (R from 0 to 100): as full-reuse, but those R per cent of every chunk's tokens are computed in "
        "context whose KV deviates most from what is stored.",
    )
    order: Literal["fixed", "free"] = Field(
        "fixed",
        description="fixed: chunks keep the order in which they were sent. free: images and documents that follow one "
        "another with no words between them are put in the order that stored patches fit, unless the request's text "
        "names them by their place.",
    )
    explain: bool = Field(False, description="Report what every chunk costs, and the best order that was rejected.")
    text: Text = Field(
        Text.AUTO,
        description="Whether text is part of what patches are keyed by, beside the system prompt. auto: text between "
        "chunks is, where some of it is longer than `prefill.free_text` tokens, and so is that before the first chunk "
        "beyond `prefill.free_text_before`. strict: all text before a chunk is. free: none is.",
    )

    session: SessionOptions | None = Field(
        None,
        description="Keep this conversation's KV, so that its window can slide without a forward over what stays. What "
        "stays still knows what has left. Modes auto and exact, order fixed.",
    )
    pages: str | None = Field(
        None,
        max_length=1024,
        description="Pages of the request's PDFs that become chunks, in this order, such as 1-3,7. None: all.",
    )
    video: VideoOptions = VideoOptions()
    retrieve: dict[str, Any] | None = Field(
        None,
        description="Search vector stores, and put what is found before the last user message: vector_store_ids, query "
        "(else that message's text), max_num_results (4), filters, ranking_options. With order: free the pages found "
        "are put in the order that stored patches fit.",
    )
    kv_budget: float | None = Field(
        None,
        ge=LEAST_BUDGET,
        le=1,
        description="KV entries that decode is given per prompt token; 1: all, null: as the service is set.",
    )
    elastic: ElasticOptions = ElasticOptions()
    load_bearing: bool = Field(
        False,
        description="Measure, once the answer is under way, what its first token loses without each chunk and without "
        "its conditioning. The report names the path to read it from.",
    )

    def compaction(self, default: Compaction) -> Compaction:
        """Compaction as asked for, and else as by default."""
        elastic = self.elastic
        return Compaction(
            default.budget if self.kv_budget is None else self.kv_budget,
            elastic.policy or default.policy,
            elastic.window if "window" in elastic.model_fields_set else default.window,
        )

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, mode: str) -> str:
        return str(Mode.parse(mode))

    @field_validator("session")
    @classmethod
    def _goes_with_mode(cls, session: SessionOptions | None, info: ValidationInfo) -> SessionOptions | None:
        mode, order = info.data.get("mode"), info.data.get("order")
        if session is not None and mode is not None and not uses_session(Mode.parse(mode)):
            raise ValueError(f"a session needs mode auto or exact, not {mode}")
        if session is not None and order == "free":
            raise ValueError("a session needs order fixed: its chunks stay where they are")
        return session


def parse_options(value: Any) -> OrbitOptions:
    """Validate a request's `orbit` object; None means all defaults.

    Raises:
        InvalidRequest: naming the field.
    """
    if value is None:
        return OrbitOptions()
    try:
        return OrbitOptions.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["orbit", *map(str, first["loc"])])
        raise InvalidRequest(f"{where}: {first['msg']}", parameter=where) from error


class Alternative(BaseModel):
    """The best rejected order's chunk in a place. Costs are expected milliseconds.

    Where no other chunk may stand it is the same chunk, computed instead of patched; a chunk that is computed there has
    no alternative.
    """

    chunk: int  # as it was sent
    operating_point: Literal["patched", "composed", "computed"]
    cost_ms: float  # of the chunk there
    order_ms: float  # of all chunks in that order


class ChunkReport(BaseModel):
    """Link of one chunk of the prompt; `index` is its place in the prompt."""

    index: int
    tokens: int
    operating_point: str
    antecedents: int
    reason: str
    rank: int | None = None
    cost_ms: float | None = None  # expected, if explained; None where tokens are selected, or the beginning is known
    alternative: Alternative | None = None


class OrderReport(BaseModel):
    """Order of a request's chunks.

    `chunks[i]` is the chunk, as sent, that stands in the i-th place.

    Costs are expected milliseconds of linking all chunks, where an explanation was asked for and patches are used.
    """

    chunks: list[int]
    reason: str
    cost_ms: float | None = None
    arrival_ms: float | None = None  # in the order in which they were sent
    plan_ms: float | None = None  # spent choosing


SURVIVORS_KNOW = "survived: their KV was computed behind what has left, so the model still knows something of that"


class SessionReport(BaseModel):
    """Segments of a prompt (chunks, and texts between them) by how its session served them.

    See `prefill_workers.protocol.SessionOutcome`. `note`: what survivors know, where there are any.
    """

    id: str
    prefix: int
    survived: int
    refreshed: int
    recalled: int
    computed: int
    new: int
    tokens_reused: int
    note: str | None = None


class FoundReport(BaseModel):
    """One part that was found and linked; `chunk`: its place among the request's chunks as sent."""

    chunk: int
    file_id: str
    filename: str
    score: float
    page: int | None = None
    box: list[float] | None = None


class RoundReport(BaseModel):
    """A search that the model called for in mid-answer, and the link that went on behind it.

    `results`: how many were linked for the first time. `pause_ms`: from the call's last token to the next token.
    """

    query: str
    results: int
    stages_ms: dict[str, float]
    pause_ms: float | None = None
    prompt_tokens: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    vision_tokens_encoded: int = 0
    error: str | None = None  # why nothing was searched


class RetrievalReport(BaseModel):
    """Searches of `orbit.retrieve` and of the tool `file_search`.

    `degraded`: lexical where no vectors were compared. `results`: of all searches, in the order in which answers cite
    them: [1] is the first.
    """

    query: str
    results: list[FoundReport]
    stages_ms: dict[str, float]
    degraded: str | None = None
    rounds: list[RoundReport] = []


class KVReport(BaseModel):
    """KV that decode was given of a prompt, and what it dropped of the answer's.

    `first_token_saw` is the prompt's KV that the first token was drawn from: a decode engine draws it from what was
    kept. `dropped`: entries of all choices together, at their ends.
    """

    tokens: int
    kept: int
    bytes_handed_off: int
    dropped: int = 0
    policy: CompactionPolicy | None = None  # None: all was kept
    window: int | None = None
    first_token_saw: Literal["all", "kept"] | None = None


class OrbitReport(BaseModel):
    """`orbit` in a response. Times are milliseconds."""

    mode: str
    retrieval: RetrievalReport | None = None
    order: OrderReport | None = None
    chunks: list[ChunkReport] = []
    session: SessionReport | None = None
    prompt_tokens: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    prefix_tokens_reused: int = 0  # of those reused: what earlier prompts began with as well
    vision_tokens_encoded: int = 0
    ttft_ms: float | None = None  # None: a decode engine gave the whole answer at once
    first_token: Literal["prefill", "decode"] | None = None  # the role that gave it
    kv: KVReport | None = None
    load_bearing: str | None = None  # path of what is measured of the chunks
    stages_ms: dict[str, float] = {}
    notices: list[str] = []  # what of the request was left out


class ChunkCosts(NamedTuple):
    """Expected costs of a chunk's place in the order, in milliseconds."""

    placed_ms: float
    summed_ms: float
    computed_ms: float
    alternative: Alternative | None

    def of(self, report: ChunkReport) -> ChunkReport:
        """A chunk's report with what it cost."""
        point = OperatingPoint(report.operating_point)
        if point in (OperatingPoint.SELECTED, OperatingPoint.PREFIX):
            return report
        placed = self.summed_ms if point is OperatingPoint.COMPOSED else self.placed_ms
        cost = placed if point.is_reuse else self.computed_ms
        return report.model_copy(update={"cost_ms": round(cost, 3), "alternative": self.alternative})


@dataclass
class RequestTrace:
    """One request on its way: what it asked for, whose it is, and its report in the making."""

    options: OrbitOptions = field(default_factory=OrbitOptions)
    tenant: str = "local"
    prefix_tokens: tuple[int, ...] = ()
    opening_tokens: tuple[int, ...] = ()  # of an empty conversation behind the same fixed prefix
    documents: list[Document] = field(default_factory=list)  # text chunks of the prompt, in order
    found: list[str] = field(default_factory=list)  # content ids of what a search found, in the report's order
    groups: list[int | None] = field(default_factory=list)  # runs of chunks that could trade places, if any could
    tool: ToolRounds | None = None  # that the service answers in mid-answer
    on_first_token: Callable[[], None] | None = None
    costs: list[ChunkCosts] = field(default_factory=list)  # of the prompt's chunks, where an explanation is wanted
    lacking: Future[Collection[str]] | None = None  # images of which nothing is stored, once a prefill worker says
    received: float = field(default_factory=time.perf_counter)
    places: Semaphore = field(default_factory=lambda: Semaphore(PROMPTS_AT_ONCE))  # of a request with several prompts
    report: OrbitReport = field(init=False)
    _taken: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.report = OrbitReport(mode=self.options.mode)

    def of_prompt(self) -> RequestTrace:
        """Trace of the request's next prompt.

        Itself, then others like it: a completion may have many prompts.
        """
        if self._taken:
            return RequestTrace(self.options, self.tenant, received=self.received, places=self.places)
        self._taken = True
        return self

    def of_round(self) -> RequestTrace:
        """Trace of another prompt of the same answer, received now."""
        return replace(
            self,
            documents=list(self.documents),
            groups=[],
            costs=[],
            lacking=None,
            on_first_token=None,
            received=time.perf_counter(),
        )

    @property
    def session(self) -> SessionRef | None:
        """The request's session, if it has one."""
        return None if self.options.session is None else self.options.session.ref

    def mark(self, stage: str) -> None:
        """Record the time since the request was received as `stage`."""
        self.report.stages_ms[stage] = (time.perf_counter() - self.received) * 1e3

    def first_token(self, by: Literal["prefill", "decode"], alone: bool = True) -> None:
        """Record the first token's arrival, and the role that gave it.

        Not `alone`: with the rest of an answer that is not streamed. When the first token was there, nobody knows then.
        """
        if alone:
            self.report.ttft_ms = (time.perf_counter() - self.received) * 1e3
        self.report.first_token = by
        if self.on_first_token is not None:
            self.on_first_token()
        if (kv := self.report.kv) is not None:
            kv.first_token_saw = "kept" if by == "decode" and kv.kept < kv.tokens else "all"

    def dropped(self, transfer: Mapping[str, Any], prompt: int, generated: Iterable[int]) -> None:
        """Record the entries dropped by now, of choices of so many tokens behind a prompt."""
        window = window_of(transfer)
        if window is not None and self.report.kv is not None:
            size = transfer[BLOCK_SIZE]
            self.report.kv.dropped = sum(dropped(prompt, tokens, window, size) for tokens in generated)

    def decoding(self, ms: float) -> None:
        """Record the time of hand-off and first decode step.

        Of an answer that is not streamed, of all steps.
        """
        self.report.stages_ms["decode"] = ms

    def document(self) -> dict[str, Any]:
        """The report as a response carries it; times rounded to a microsecond."""
        report = self.report.model_dump(exclude_none=True)
        report["stages_ms"] = {stage: round(ms, 3) for stage, ms in report["stages_ms"].items()}
        if "ttft_ms" in report:
            report["ttft_ms"] = round(report["ttft_ms"], 3)
        return report


_trace: ContextVar[RequestTrace | None] = ContextVar("orbit_trace", default=None)


def current_trace() -> RequestTrace:
    """The trace of the request that is being handled; a default one for requests without chunks."""
    return _trace.get() or RequestTrace()


def set_trace(trace: RequestTrace) -> None:
    """Make `trace` the current one of this task."""
    _trace.set(trace)
