"""Link jobs: links on their way through the prefill loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from prefill_workers.block_pool import Lease
from prefill_workers.compaction.plan import CompactionPlan
from prefill_workers.link.layerwise_load import LayerwiseLoad
from prefill_workers.link.plan import ChunkState, LinkPlan
from prefill_workers.protocol import LinkResult
from prefill_workers.sequence import Run, complement, merge_runs, union

# What a link that still waits for loads must have to compute for a forward of its own; fewer tokens wait for the next.
# Whatever it computes, a forward has a fixed part (see `cost_model`).
FORWARD_TOKENS = 64


@dataclass(eq=False)
class LinkJob:
    """Job of one link, from its submission (`time.perf_counter`) to its end.

    With a `compaction` a decode engine pulls fewer entries, which lie in the blocks of a lease of their own: the first
    one's stay as they are for harvest and checks.
    """

    plan: LinkPlan
    done: Future[LinkResult]
    submitted: float
    lease: Lease | None = None
    compaction: CompactionPlan | None = None
    compacted: Lease | None = None
    reached: int = 0  # the frontier up to which runs are pending or computed
    pending: list[Run] = field(default_factory=list)
    streams: list[LayerwiseLoad] = field(default_factory=list)  # what the forward over `pending` writes as it comes in
    may_stream: bool = True  # whether layers are worth waiting for: not again once some came too late
    first_token: int | None = None  # of the answer, once the forward that ends the prompt has given it

    @property
    def is_runnable(self) -> bool:
        """True if the link has enough to compute for a forward of its own."""
        return self.tokens >= (FORWARD_TOKENS if self.reached < len(self.plan.sequence) else 1)

    @property
    def tokens(self) -> int:
        """Tokens to be computed."""
        return sum(map(len, self.pending))

    @property
    def computed_in_all(self) -> int:
        """Tokens that are computed by forwards of the link, as far as that is known."""
        return self.plan.tokens_computed

    @property
    def left(self) -> int:
        """Tokens that a forward has still to compute, pending ones included."""
        return self.tokens + sum(map(len, self.plan.runs_between(self.reached, len(self.plan.sequence))))

    @property
    def room(self) -> int:
        """Tokens that the link takes blocks for.

        A decode engine that goes on behind the first token pulls that token's slot as well.
        """
        return len(self.plan.sequence) + (self.plan.request.sampling is not None)

    @property
    def compacted_room(self) -> int:
        """Tokens that a compacted link takes further blocks for, the first token's slot included."""
        return 0 if self.compaction is None else self.compaction.kept + 1

    @property
    def offered(self) -> tuple[Lease, int]:
        """Lease that decode engines pull, and how many of its tokens."""
        if self.compacted is not None:
            return self.compacted, self.compacted_room
        assert self.lease is not None
        return self.lease, self.room

    @property
    def leases(self) -> list[Lease]:
        """Leases of an admitted link."""
        return [lease for lease in (self.lease, self.compacted) if lease is not None]

    @property
    def name(self) -> str:
        """Name of an admitted link, unique on its worker."""
        assert self.lease is not None
        return self.lease.id

    def ends_with(self, runs: Sequence[Run]) -> bool:
        """True if these runs end the prompt."""
        return bool(runs) and runs[-1].stop == len(self.plan.sequence)

    @property
    def runs_to_weigh(self) -> list[Run]:
        """Runs of the partial forward: all that is neither computed nor written.

        Up to the last chunk that is to be weighed.
        """
        chunks = self.plan.chunks
        stop = max(c.span.stop for c in chunks if c.state is ChunkState.TO_WEIGH)
        reused = (run for c in chunks if c.state is not ChunkState.TO_WEIGH for run in c.reused)
        written = union([*self.plan.written, *reused])
        inside = [run for run in written if self.reached <= run.start and run.stop <= stop]
        return merge_runs([*self.pending, *complement(inside, stop, self.reached)])

    def compute_up_to(self, frontier: int) -> None:
        """Take up the runs before the frontier."""
        self.pending = merge_runs([*self.pending, *self.plan.runs_between(self.reached, frontier)])
        self.reached = frontier

    def drop_streams(self) -> bool:
        """Wait for whole chunks after all, and compute again from the first of them on.

        False: none streams in.
        """
        streaming = [chunk for chunk in self.plan.chunks if chunk.state is ChunkState.STREAMING]
        if not streaming:
            return False
        for chunk in streaming:
            chunk.drop_stream()
        self.may_stream, self.streams = False, []
        self.go_back_to(min(chunk.span.start for chunk in streaming))
        return True

    def go_back_to(self, token: int) -> None:
        """Discard what was computed from this token on."""
        if token < self.reached:
            self.pending = [Run(run.start, min(run.stop, token)) for run in self.pending if run.start < token]
            self.reached, self.first_token = token, None
