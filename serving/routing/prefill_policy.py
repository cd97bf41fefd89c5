"""Choice of a prefill worker.

A prompt goes where most of it is in memory, unless that worker's queue costs more than loading elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from autoscale.curves import USUAL, ForwardCost
from prefill_workers.modes import looks_up_patch, uses_canonical_alone, uses_library
from prefill_workers.prefix_digests import MARK_BYTES, marked_beginnings
from serving.routing.ledger import NOTHING, Load
from serving.routing.policy import Policy, Ranked

if TYPE_CHECKING:
    from prefill_workers.protocol import LinkRequest, SessionRef

# MARK_BYTES is of a chunk's mark as well: among 10^5 chunks some two are taken for each other once in 10^9 deployments
_CHUNK_TOKENS = 256  # what a chunk is taken for before it is rendered
_REMEMBERED = 1 << 16  # chunks known to be stored
_BYTES_PER_SECOND = float(1 << 30)  # of a replica that has not measured its loads: a disk whose pages are cached
_TO_DEVICE_BYTES_PER_SECOND = 25e9  # from host memory to a GPU: PCIe 4.0 with 16 lanes


def mark_of(content: str) -> bytes:
    """Mark of a content id in reports."""
    return blake3(content.encode()).digest(MARK_BYTES)


def session_mark(tenant: str, session: str) -> bytes:
    """Mark of a tenant's session in reports."""
    return mark_of(f"session\0{tenant}\0{session}")


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
