"""Which replica should serve a request: what replicas report, and what follows from it.

Nothing here knows Ray: `ray_router` asks these policies inside Ray Serve.

    replica ── report, every period ──▶ Ledger ◀── sent, completed ── router
                                          │
    request ──▶ ask ──▶ rank: replicas by cost, the lowest first

| policy  | the cost of a replica                                                                         |
|---------|-----------------------------------------------------------------------------------------------|
| prefill | seconds: queued tokens + tokens to compute at its pace, + bytes to load from tiers, and to a GPU |
| decode  | share of its KV blocks, or of its sequences if that is more, in use with the request there     |

Reports are about a period old. What this process has sent meanwhile it knows by itself, and adds: else all requests
of a period would go to the replica that was the least busy at its beginning.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from blake3 import blake3
from prometheus_client import CollectorRegistry, Counter, Gauge

from autoscale.curves import USUAL, ForwardCost
from decode_workers.admission import blocks_needed
from infra.kv_window import held_tokens, window_of
from prefill_workers.modes import looks_up_patch, uses_canonical_alone, uses_library
from prefill_workers.prefix_digests import MARK_BYTES, marked_beginnings
from serving.routing.ledger import NOTHING, Ledger, Load

if TYPE_CHECKING:
    from prefill_workers.protocol import LinkRequest, SessionRef

# MARK_BYTES is of a chunk's mark as well: among 10^5 chunks some two are taken for each other once in 10^9 deployments
_CHUNK_TOKENS = 256  # what a chunk is taken for before it is rendered
_REMEMBERED = 1 << 16  # chunks known to be stored
_BYTES_PER_SECOND = float(1 << 30)  # of a replica that has not measured its loads: a disk whose pages are cached
_TO_DEVICE_BYTES_PER_SECOND = 25e9  # from host memory to a GPU: PCIe 4.0 with 16 lanes

REGISTRY = CollectorRegistry()  # of this process, which is one replica of the ingress
KV_USE = Gauge(
    "vllm:kv_cache_usage_perc",
    "Share of a decode worker's KV blocks that are reserved, also by answers which wait for room.",
    ("worker",),
    registry=REGISTRY,
)
CHOICES = Counter(
    "orbitserve_routing_choices",
    "Replicas chosen, by role and reason: hot (holds most of the chunks in memory), spread (another holds more, but is "
    "busier), least_loaded (nobody holds any), least_pressure (KV is free), waits (it is not), only (there is one), "
    "stale (no replica reported lately: power of two choices).",
    ("role", "reason"),
    registry=REGISTRY,
)


def mark_of(content: str) -> bytes:
    """Mark of a content id in reports."""
    return blake3(content.encode()).digest(MARK_BYTES)


def session_mark(tenant: str, session: str) -> bytes:
    """Mark of a tenant's session in reports."""
    return mark_of(f"session\0{tenant}\0{session}")


# -- reports ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillReport:
    """Report of a prefill worker.

    `hot` are marks of chunks in its memory, most recently used first, and of sessions that it has served; `begun` of
    the beginnings of prompts in its blocks, the latest first; `on_device` of the hot chunks that a GPU has copies of,
    None without a GPU.
    """

    queued_tokens: int
    requests: int
    fixed_tokens: float  # see `autoscale.curves.ForwardCost`
    seconds_per_token: float | None  # the same
    bytes_per_second: float | None  # of loads from its tiers; None: not measured yet
    bytes_per_token: int  # of canonical KV
    hot: bytes
    hot_version: int  # changes with `hot`
    begun: bytes = b""
    begun_version: int = 0  # changes with `begun`
    on_device: bytes | None = None
    device_version: int = 0  # changes with `on_device`

    @property
    def forward_cost(self) -> ForwardCost:
        """The replica's cost of a forward, or the usual one as far as it was not measured."""
        return ForwardCost(self.fixed_tokens, self.seconds_per_token or USUAL.seconds_per_token)


@dataclass(frozen=True)
class DecodeReport:
    """Report of a decode worker.

    Blocks of requests that wait for room count as those that have it.
    """

    blocks: int
    blocks_total: int
    sequences: int
    max_sequences: int
    block_size: int
    max_model_len: int


Report = TypeVar("Report", PrefillReport, DecodeReport)


def parsed(kind: type[Report], stats: Mapping[str, Any]) -> Report | None:
    """A report from what Ray Serve brought; None if it is none, or another version's."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: stats[name] for name in names}) if names <= stats.keys() else None


# -- policies ---------------------------------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """A replica that could serve a request: cost, reason, and tokens in its memory for it."""

    replica: str
    cost: float
    reason: str
    held: int = 0


class Policy(ABC, Generic[Report]):
    """Ranking of the replicas of one role. Belongs to one thread."""

    role: str
    kind: type[Report]
    resolution: float  # costs that differ by less count as equal

    def __init__(self, period_s: float, **clock: Callable[[], float]) -> None:
        self.ledger: Ledger[Report] = Ledger(period_s, **clock)

    def reported(self, replica: str, stats: Mapping[str, Any]) -> None:
        """Take up what Ray Serve brought of a replica."""
        report = parsed(self.kind, stats)
        if report is not None and self.ledger.is_news(replica, stats["sequence"]):
            self.learn(replica, report, stats["sequence"])

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all other replicas."""
        self.ledger.keep(replicas)

    @abstractmethod
    def learn(self, replica: str, report: Report, sequence: int) -> None:
        """A new report."""

    @abstractmethod
    def ask(self, method: str, arguments: Sequence[Any]) -> Any:
        """Demand of a call on a replica; None for calls that any replica answers as well."""

    def rank(
        self, ask: Any, replicas: Collection[str], distance: Callable[[str], int] = lambda replica: 0
    ) -> list[Ranked] | None:
        """Replicas by cost, the lowest first; None: no report is fresh.

        Equal ones by what they hold, then by distance, else at random.
        """
        if len(replicas) > 1 and not any(self.ledger.fresh(replica) for replica in replicas):
            return None
        ranked = self.score(ask, replicas)
        if len(ranked) == 1:
            return [ranked[0]._replace(reason="only")]

        def order(one: Ranked) -> tuple[bool, int, int, int, float]:
            lost, cost = self.ledger.is_lost(one.replica), round(one.cost / self.resolution)
            return lost, cost, -one.held, distance(one.replica), random.random()

        return sorted(ranked, key=order)

    @abstractmethod
    def score(self, ask: Any, replicas: Collection[str]) -> list[Ranked]:
        """The cost of every replica, in any order."""

    @abstractmethod
    def sent(self, replica: str, call: str, ask: Any) -> None:
        """Note that a call was sent; `call` names it until it is completed."""

    def completed(self, replica: str, call: str) -> None:
        """Note that a call has ended, well or not."""
        self.ledger.completed(replica, call)


# -- prefill ----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk of a prompt, as far as routing minds.

    `computed` tokens need a forward even where its KV is stored, all of them where no patch makes that fit (`patched`).
    `session`: own mark of the session whose kept KV this is; `mark` is its parent's while it begins as a fork.
    """

    mark: bytes
    tokens: int
    computed: int
    patched: bool = True
    session: bytes = b""

    @property
    def kept_as(self) -> bytes:
        """Mark under which a worker has it afterwards."""
        return self.session or self.mark


class Beginning(NamedTuple):
    """First tokens of a prompt: the whole chunks among them, and the tokens outside of chunks."""

    mark: bytes = b""
    tokens: int = 0
    chunks: int = 0
    text: int = 0


@dataclass(frozen=True)
class PrefillAsk:
    """Work of linking a prompt.

    Its chunks are in the worker's memory afterwards, and its beginnings in blocks.
    """

    text: int  # tokens outside of chunks
    chunks: tuple[Chunk, ...]
    links: bool = True  # False: only loads
    beginnings: tuple[Beginning, ...] = ()  # ascending

    @property
    def is_counted(self) -> bool:
        """True if the choice of its replica is counted."""
        return self.links


@dataclass(frozen=True)
class PrefillView:
    """Knowledge of a prefill replica at the moment."""

    queued_tokens: float
    hot: Collection[bytes] = ()  # marks of what its memory and its blocks had, as it reported
    expected: Collection[bytes] = ()  # and of what it should have by now
    forward_cost: ForwardCost = USUAL
    bytes_per_second: float = _BYTES_PER_SECOND
    bytes_per_token: int = 0
    on_device: Collection[bytes] | None = None  # marks of what its GPU had; None: it computes where its memory is

    def has(self, chunk: Chunk) -> bool:
        """True if it has a chunk in memory."""
        return chunk.mark in self.hot or chunk.mark in self.expected

    def must_bring(self, chunk: Chunk) -> bool:
        """True if a chunk that it has in memory must be copied to its GPU.

        Reports do not say what GPUs have of sessions: they count as there, on all workers alike.
        """
        if self.on_device is None or chunk.session:
            return False
        return chunk.mark not in self.on_device and chunk.mark not in self.expected


@dataclass(frozen=True)
class Estimate:
    """Cost of a request on a replica."""

    queued: float  # tokens
    computed: int  # tokens
    loaded: int  # bytes
    brought: int  # bytes from its memory to its GPU
    held: int  # tokens whose KV is in the replica's memory, but those that the mode computes all the same
    seconds: float


def estimate(ask: PrefillAsk, view: PrefillView, stored: Collection[bytes]) -> Estimate:
    """Queued tokens + tokens to compute + bytes to load and to bring to a GPU, in seconds.

    Args:
        stored: marks of chunks that some tier is known to have. Others must be computed, whoever does it.

    What the replica's blocks have of the prompt's beginning costs nothing. A chunk that no patch fits counts as held
    all the same: by the next time one is formed, and then fits here.
    """
    known = next((b for b in reversed(ask.beginnings) if b.mark in view.hot or b.mark in view.expected), Beginning())
    computed, loaded, brought, held = ask.text - known.text, 0, 0, known.tokens
    for chunk in ask.chunks[known.chunks :]:
        here, reused = view.has(chunk), chunk.tokens - chunk.computed
        held += reused if here else 0
        if not chunk.patched or not (here or chunk.mark in stored):
            computed += chunk.tokens
            continue
        computed += chunk.computed
        if not here:
            loaded += reused * view.bytes_per_token
        elif view.must_bring(chunk):
            brought += reused * view.bytes_per_token
    moving = loaded / view.bytes_per_second + brought / _TO_DEVICE_BYTES_PER_SECOND
    computing = view.forward_cost.added_seconds(view.queued_tokens + computed)
    return Estimate(view.queued_tokens, computed, loaded, brought, held, computing + moving)


class _Known(NamedTuple):
    """Marks that a replica reported; see `PrefillView`."""

    versions: tuple[int, ...] = ()
    hot: frozenset[bytes] = frozenset()
    on_device: frozenset[bytes] | None = None


_NOTHING_KNOWN = _Known()


class PrefillPolicy(Policy[PrefillReport]):
    """Prefill replicas by seconds: a prompt goes where most of it is in memory.

    Unless that replica's queue costs more than loading elsewhere.
    """

    role, kind, resolution = "prefill", PrefillReport, 1e-3

    def __init__(self, period_s: float, **clock: Callable[[], float]) -> None:
        super().__init__(period_s, **clock)
        self._known: dict[str, _Known] = {}  # by replica
        self._stored: dict[bytes, None] = {}  # oldest first

    def learn(self, replica: str, report: PrefillReport, sequence: int) -> None:
        """See `Policy`."""
        self.ledger.report(replica, sequence, Load(report.queued_tokens, report.requests), report)
        versions = report.hot_version, report.begun_version, report.device_version
        if replica not in self._known or self._known[replica].versions != versions:
            chunks = _marks(report.hot)
            on_device = None if report.on_device is None else _marks(report.on_device)
            self._known[replica] = _Known(versions, chunks | _marks(report.begun), on_device)
            self._remember(chunks)

    def keep(self, replicas: Collection[str]) -> None:
        """See `Policy`."""
        super().keep(replicas)
        self._known = {replica: known for replica, known in self._known.items() if replica in replicas}

    def ask(self, method: str, arguments: Sequence[Any]) -> PrefillAsk | None:
        """See `Policy`. Of `PrefillWorker.link` and `prefetch`, whose first argument says all."""
        if method == "prefetch":
            return PrefillAsk(
                0, tuple(Chunk(mark_of(content), _CHUNK_TOKENS, 0) for content in arguments[0].contents), links=False
            )
        if method != "link":
            return None
        request: LinkRequest = arguments[0]
        mode = request.mode
        if not uses_library(mode):  # nothing is looked up either
            return PrefillAsk(len(request.token_ids), ())
        reuses = looks_up_patch(mode) or uses_canonical_alone(mode)
        patched = request.patched or [True] * len(request.chunks)
        chunks = tuple(
            Chunk(mark_of(span.content), len(span), mode.selected(len(span)) if reuses else len(span), fits)
            for span, fits in zip(request.chunks, patched, strict=True)
        )
        text = len(request.token_ids) - sum(chunk.tokens for chunk in chunks)
        beginnings = _beginnings(request)
        if request.session is not None:  # most of its text and chunks need no forward where it is kept, patched or not
            own, sought = self._session_marks(request.tenant, request.session)
            kept = Chunk(sought, text, 0, session=own)
            chunks = (*(chunk._replace(patched=True) for chunk in chunks), kept)
            return PrefillAsk(0, chunks, beginnings=tuple(one._replace(text=0) for one in beginnings))
        return PrefillAsk(text, chunks, beginnings=beginnings)

    def _session_marks(self, tenant: str, session: SessionRef) -> tuple[bytes, bytes]:
        """Marks of a session and of the one whose KV it takes: its parent, while nobody serves it.

        What a fork shares stays while sessions of one worker share it (see `SessionStore`).
        """
        own = session_mark(tenant, session.id)
        if own in self._stored or session.parent is None or session.clean:
            return own, own
        return own, session_mark(tenant, session.parent)

    def score(self, ask: PrefillAsk, replicas: Collection[str]) -> list[Ranked]:
        """See `Policy`."""
        estimates = {replica: self._estimate(ask, replica) for replica in replicas}
        most = max(each.held for each in estimates.values())

        def reason(held: int) -> str:
            if held < most:
                return "spread"
            return "hot" if held else "least_loaded"

        return [Ranked(replica, each.seconds, reason(each.held), each.held) for replica, each in estimates.items()]

    def sent(self, replica: str, call: str, ask: PrefillAsk | None) -> None:
        """See `Policy`."""
        if ask is None:
            self.ledger.sent(replica, call)
            return
        marks = [chunk.kept_as for chunk in ask.chunks]
        self.ledger.sent(
            replica,
            call,
            Load(self._estimate(ask, replica).computed, 1) if ask.links else NOTHING,
            coming=[*(mark for mark in marks if mark in self._stored), *(known.mark for known in ask.beginnings)],
            kept=marks if ask.links else (),
        )

    def completed(self, replica: str, call: str) -> None:
        """See `Policy`."""
        self._remember(self.ledger.completed(replica, call))

    def _estimate(self, ask: PrefillAsk, replica: str) -> Estimate:
        return estimate(ask, self.view(replica), self._stored)

    def view(self, replica: str) -> PrefillView:
        """Knowledge of a replica.

        Of one without a fresh report, what was sent from here (see `Ledger.load`).
        """
        report = self.ledger.fresh(replica)
        measured = report or next(self.ledger.all_fresh(), None)
        cost = measured.forward_cost if measured else USUAL
        load = self.ledger.load(replica, drained_per_s=1 / cost.added_seconds(1))
        known = self._known[replica] if report else _NOTHING_KNOWN
        return PrefillView(
            queued_tokens=cost.queued_tokens(load.sequences, load.work),
            hot=known.hot,
            expected=self.ledger.expected(replica),
            forward_cost=cost,
            bytes_per_second=(measured and measured.bytes_per_second) or _BYTES_PER_SECOND,
            bytes_per_token=measured.bytes_per_token if measured else 0,
            on_device=known.on_device,
        )

    def _remember(self, marks: Collection[bytes]) -> None:
        self._stored.update(dict.fromkeys(mark for mark in marks if mark not in self._stored))
        for _ in range(len(self._stored) - _REMEMBERED):
            del self._stored[next(iter(self._stored))]


def _marks(packed: bytes) -> frozenset[bytes]:
    return frozenset(packed[i : i + MARK_BYTES] for i in range(0, len(packed), MARK_BYTES))


def _beginnings(request: LinkRequest) -> tuple[Beginning, ...]:
    found = []
    for tokens, mark in marked_beginnings(request.tenant, request.token_ids, request.chunks):
        before = [span for span in request.chunks if span.start < tokens]
        inside = sum(span.stop <= tokens for span in before)
        text = tokens - sum(min(span.stop, tokens) - span.start for span in before)
        found.append(Beginning(mark, tokens, inside, text))
    return tuple(found)


# -- decode -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeAsk:
    """Work of generating from a prompt: `sequences`, of at most `max_tokens` each.

    None: as many as the model allows.
    """

    prompt: int
    max_tokens: int | None
    sequences: int
    is_counted: bool = True  # see `PrefillAsk`
    window: int | None = None  # generated tokens that stay

    def load(self, report: DecodeReport) -> Load:
        """KV blocks and sequences that a replica would reserve."""
        longest = report.max_model_len if self.max_tokens is None else self.prompt + self.max_tokens
        tokens = held_tokens(self.prompt, min(longest, report.max_model_len), self.window, report.block_size)
        return Load(blocks_needed(tokens, self.sequences, report.block_size), self.sequences)


def pressure(load: Load, report: DecodeReport) -> float:
    """Share of a decode replica that so much load takes; beyond 1 some of it waits."""
    return max(load.work / report.blocks_total, load.sequences / report.max_sequences)


class DecodePolicy(Policy[DecodeReport]):
    """Decode replicas by pressure: a sequence goes where the most KV is free for it.

    What already waits there is served first.
    """

    role, kind, resolution = "decode", DecodeReport, 1e-6

    def __init__(self, period_s: float, **clock: Callable[[], float]) -> None:
        super().__init__(period_s, **clock)
        self._told: set[str] = set()  # replicas with a series

    def learn(self, replica: str, report: DecodeReport, sequence: int) -> None:
        """See `Policy`."""
        self.ledger.report(replica, sequence, Load(report.blocks, report.sequences), report)
        KV_USE.labels(worker=replica).set(min(1.0, report.blocks / max(1, report.blocks_total)))
        self._told.add(replica)

    def keep(self, replicas: Collection[str]) -> None:
        """See `Policy`."""
        super().keep(replicas)
        for gone in self._told.difference(replicas):
            KV_USE.remove(gone)
        self._told.intersection_update(replicas)

    def ask(self, method: str, arguments: Sequence[Any]) -> DecodeAsk | None:
        """See `Policy`. Of `DecodeWorker.generate`."""
        if method != "generate":
            return None
        token_ids, transfer, params = arguments[:3]
        return DecodeAsk(len(token_ids), params.max_tokens, params.n or 1, window=window_of(transfer))

    def score(self, ask: DecodeAsk, replicas: Collection[str]) -> list[Ranked]:
        """See `Policy`."""
        costs = {replica: self._pressure(ask, replica) for replica in replicas}
        return [Ranked(replica, cost, "waits" if cost > 1 else "least_pressure") for replica, cost in costs.items()]

    def _pressure(self, ask: DecodeAsk, replica: str) -> float:
        report = self._measured(replica)
        if report is None:  # only where there is one replica
            return 0.0
        return pressure(self.ledger.load(replica).plus(ask.load(report)), report)

    def sent(self, replica: str, call: str, ask: DecodeAsk | None) -> None:
        """See `Policy`."""
        report = self._measured(replica)
        self.ledger.sent(replica, call, NOTHING if ask is None or report is None else ask.load(report))

    def _measured(self, replica: str) -> DecodeReport | None:
        """The replica's report, or another's: replicas of a role are alike."""
        return self.ledger.fresh(replica) or next(self.ledger.all_fresh(), None)


POLICIES: dict[str, type[PrefillPolicy] | type[DecodePolicy]] = {
    policy.role: policy for policy in (PrefillPolicy, DecodePolicy)
}
