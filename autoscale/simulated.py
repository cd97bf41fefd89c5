"""Simulated replicas and library: what a request costs where, under a virtual clock.

A prefill replica runs one forward after another over what waits, several links in one where `ForwardCost.joins` says
so; loads go beside forwards, and the longer of the two counts. A decode replica steps for all of its sequences at once;
between two changes of their number the steps are counted in bulk. Blocks of a sequence are reserved whole, prompt and
answer, as `decode_workers.admission` does.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import simpy

from autoscale.curves import ForwardCost
from autoscale.traces import Chunk, Request

COMPOSE_UP_TO = 3  # antecedents whose pairs stand for a set that was never seen


@dataclass(frozen=True)
class Machine:
    """Service curves of one replica of each role, and what a start takes.

    Attributes:
        forward: cost of a prefill forward; `encode_s_per_token`: of encoding images, in prefill workers.
        step_s, step_s_per_sequence: of a decode step.
        overhead_s: of a request besides, until its first token.
        memory_bytes: of a prefill replica for chunks; `disk_bytes`: of its node's disk.
        bytes_per_second: from a tier into memory.
    """

    forward: ForwardCost = ForwardCost(300.0, 4e-4)  # noqa: RUF009 - frozen
    max_batch_tokens: int = 4096
    max_queue: int = 256
    encode_s_per_token: float = 1e-4
    bytes_per_token: int = 57_344
    bytes_per_second: float = 2e9
    memory_bytes: float = 8e9
    disk_bytes: float = 2e11
    step_s: float = 0.02
    step_s_per_sequence: float = 2e-4
    blocks_total: int = 16_384
    block_size: int = 16
    max_sequences: int = 64
    overhead_s: float = 0.02
    start_s: float = 60.0


class Library:
    """Stored chunks and patches of all replicas, as far as links mind them.

    Every chunk costs the same to compute per byte, so that eviction by worth is eviction by last use.

    Args:
        shared: all replicas reach a tier that outlives them (`library.url`); else a chunk is on the disks of the nodes
            that computed or were given it, and gone with the last of them.
    """

    def __init__(self, machine: Machine, shared: bool) -> None:
        self._machine, self._shared = machine, shared
        self._holders: dict[str, set[str]] = {}
        self._tokens: dict[str, int] = {}
        self._patches: OrderedDict[tuple[str, frozenset[str]], None] = OrderedDict()
        self._disks: dict[str, OrderedDict[str, None]] = {}
        self._disk_bytes: dict[str, float] = {}
        self._only: defaultdict[str, int] = defaultdict(int)  # tokens of chunks that a replica alone holds

    def lacks(self, chunk: Chunk, before: Collection[str]) -> bool:
        """True if the chunk must be computed behind these others."""
        if not self._is_stored(chunk.content):
            return True
        if chunk.is_prefix or not before or (chunk.content, frozenset(before)) in self._patches:
            return False
        pairs = all((chunk.content, frozenset((one,))) in self._patches for one in before)
        return not (pairs and len(before) <= COMPOSE_UP_TO)

    def _is_stored(self, content: str) -> bool:
        return content in self._tokens if self._shared else bool(self._holders.get(content))

    def keep(self, replica: str, chunks: Iterable[Chunk]) -> None:
        """Note the chunks and patches that a link leaves on its replica's node."""
        before: list[str] = []
        for chunk in chunks:
            self._keep_chunk(replica, chunk.content, chunk.tokens)
            if before and not chunk.is_prefix:
                self._patches[chunk.content, frozenset(before)] = None
                for one in before:
                    self._patches[chunk.content, frozenset((one,))] = None
            before.append(chunk.content)
        for _ in range(len(self._patches) - 400_000):
            self._patches.popitem(last=False)

    def _keep_chunk(self, replica: str, content: str, tokens: int) -> None:
        self._tokens[content] = tokens
        disk = self._disks.setdefault(replica, OrderedDict())
        if content in disk:
            disk.move_to_end(content)
            return
        disk[content] = None
        self._add(replica, content)
        used = self._disk_bytes.get(replica, 0.0) + tokens * self._machine.bytes_per_token
        while used > self._machine.disk_bytes:
            oldest, _ = disk.popitem(last=False)
            self._remove(replica, oldest)
            used -= self._tokens[oldest] * self._machine.bytes_per_token
        self._disk_bytes[replica] = used

    def _add(self, replica: str, content: str) -> None:
        holders, tokens = self._holders.setdefault(content, set()), self._tokens[content]
        if len(holders) == 1:
            self._only[next(iter(holders))] -= tokens
        holders.add(replica)
        if len(holders) == 1:
            self._only[replica] += tokens

    def _remove(self, replica: str, content: str) -> None:
        holders, tokens = self._holders[content], self._tokens[content]
        holders.discard(replica)
        if len(holders) == 1:
            self._only[next(iter(holders))] += tokens
        elif not holders:
            self._only[replica] -= tokens

    def tokens_only_at(self, replica: str) -> int:
        """Tokens of chunks that nobody else has."""
        return 0 if self._shared else self._only[replica]

    def end_costs_s(self, replica: str) -> float:
        """Seconds that the end of a replica costs; as `kvstore.hand_over.at_stake`.

        What it alone holds is to be handed over or computed again, whichever is less.
        """
        machine = self._machine
        computing = machine.forward.added_seconds(1) + machine.encode_s_per_token
        return self.tokens_only_at(replica) * min(computing, machine.bytes_per_token / machine.bytes_per_second)

    def hand_over(self, replica: str, to: Collection[str], most_s: float) -> float:
        """Give what only a replica has to others, as far as there is time; returns the seconds.

        The last used goes first. Others find it at once; who calls lets the time pass.
        """
        targets, passed = list(to), 0.0
        if self._shared or not targets:
            return passed
        alone = [one for one in reversed(self._disks.get(replica, OrderedDict())) if len(self._holders[one]) == 1]
        for number, content in enumerate(alone):
            seconds = self._tokens[content] * self._machine.bytes_per_token / self._machine.bytes_per_second
            if passed + seconds > most_s:
                break
            passed += seconds
            self._keep_chunk(targets[number % len(targets)], content, self._tokens[content])
        return passed

    def lose(self, replica: str) -> None:
        """A replica's node has gone."""
        for content in self._disks.pop(replica, ()):
            self._remove(replica, content)
        self._disk_bytes.pop(replica, None)
        self._only.pop(replica, None)


@dataclass(eq=False, slots=True)
class Job:
    """A request under way.

    Times are the clock's; tokens of chunks that were found again are `reused`.
    """

    request: Request
    name: str
    computed: int = 0
    encoded: int = 0
    loaded_s: float = 0.0
    reused: int = 0
    work_s: float = 0.0
    first_token: float = float("nan")
    ended: float = float("nan")
    blocks: int = 0


@dataclass(eq=False)
class Prefill:
    """A prefill replica."""

    name: str
    machine: Machine
    env: simpy.Environment
    library: Library
    linked: Callable[[Prefill, Job], None]
    emptied: Callable[[Prefill], None]
    born: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    memory: OrderedDict[str, int] = field(default_factory=OrderedDict)
    memory_bytes: float = 0.0
    version: int = 0
    queued_tokens: int = 0
    queued_s: float = 0.0
    links: int = 0
    compute_s: float = 0.0
    compute_s2: float = 0.0
    load_s: float = 0.0
    forwards: int = 0
    _fixed_s: float = 0.0  # of the forward that runs

    def submit(self, job: Job) -> bool:
        """Take a link in; False where the queue is full."""
        if len(self.waiting) >= self.machine.max_queue:
            return False
        self.weigh(job)
        self.waiting.append(job)
        self.queued_tokens += job.computed
        self.queued_s += job.work_s
        if not self.running:
            self._forward()
        return True

    def weigh(self, job: Job) -> None:
        """Fill in what a link must compute, encode and load here."""
        machine, before = self.machine, list[str]()
        job.computed = job.request.text
        for chunk in job.request.chunks:
            if self.library.lacks(chunk, before):
                job.computed += chunk.tokens
                if not chunk.is_prefix and chunk.content not in self.memory:
                    job.encoded += chunk.tokens
            else:
                job.reused += chunk.tokens
                if chunk.content not in self.memory:
                    job.loaded_s += chunk.tokens * machine.bytes_per_token / machine.bytes_per_second
            before.append(chunk.content)
        job.work_s = machine.forward.added_seconds(job.computed) + machine.encode_s_per_token * job.encoded

    def _forward(self) -> None:
        if not self.waiting:
            return
        machine, batch = self.machine, [self.waiting.popleft()]
        tokens = batch[0].computed
        while self.waiting and tokens + self.waiting[0].computed <= machine.max_batch_tokens:
            if not machine.forward.joins(self.waiting[0].computed, len(batch), len(self.waiting)):
                break
            batch.append(self.waiting.popleft())
            tokens += batch[-1].computed
        forwards = max(1, -(-tokens // machine.max_batch_tokens))
        fixed = forwards * machine.forward.added_seconds(machine.forward.fixed_tokens)
        seconds = fixed + sum(job.work_s for job in batch)
        loads = sum(job.loaded_s for job in batch)
        self.running = batch
        self._fixed_s, self.forwards = fixed, self.forwards + forwards
        self.env.timeout(max(seconds, loads)).callbacks.append(self._done)

    def _done(self, _: simpy.Event) -> None:
        batch, self.running = self.running, []
        for job in batch:  # counted here, when it is queued no more, so that no work counts twice
            own = job.work_s + self._fixed_s / len(batch)
            self.links, self.compute_s, self.compute_s2 = self.links + 1, self.compute_s + own, self.compute_s2 + own**2
            self.load_s += job.loaded_s
            self.queued_tokens -= job.computed
            self.queued_s = max(0.0, self.queued_s - job.work_s)
            self.library.keep(self.name, job.request.chunks)
            for chunk in job.request.chunks:
                self._remember(chunk)
            self.linked(self, job)
        self._forward()
        if not self.load:
            self.emptied(self)

    def _remember(self, chunk: Chunk) -> None:
        if chunk.content in self.memory:
            self.memory.move_to_end(chunk.content)
            return
        self.memory[chunk.content] = chunk.tokens
        self.memory_bytes += chunk.tokens * self.machine.bytes_per_token
        while self.memory_bytes > self.machine.memory_bytes:
            self.memory_bytes -= self.memory.popitem(last=False)[1] * self.machine.bytes_per_token
        self.version += 1

    @property
    def load(self) -> int:
        """Links that wait or run."""
        return len(self.waiting) + len(self.running)

    def signals(self) -> dict[str, float]:
        """As `autoscale.signals` has them."""
        return {
            "clock": self.env.now + 1.0,
            "age_s": self.env.now - self.born,
            "ready_s": self.machine.start_s,
            "forwards": self.forwards,
            "links": self.links,
            "compute_s": self.compute_s,
            "compute_s2": self.compute_s2,
            "load_s": self.load_s,
            "queued_s": self.queued_s,
            "waiting": self.load,
            "only_here_s": self.library.end_costs_s(self.name),
        }


@dataclass(eq=False)
class Decode:
    """A decode replica. `clock` counts the steps of each of its sequences."""

    name: str
    machine: Machine
    env: simpy.Environment
    ended: Callable[[Decode, Job], None]
    born: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[tuple[float, int, Job]] = field(default_factory=list)
    reserved: int = 0
    awaited: int = 0
    clock: float = 0.0
    changed: float = 0.0
    generation: int = 0
    number: int = 0

    @property
    def load(self) -> int:
        """Sequences that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def step_s(self) -> float:
        """Seconds of a step now."""
        return self.machine.step_s + self.machine.step_s_per_sequence * len(self.running)

    def submit(self, job: Job) -> None:
        """Take a sequence in."""
        job.blocks = min(job.request.blocks(self.machine.block_size), self.machine.blocks_total)
        self.awaited += job.blocks
        self.waiting.append(job)
        self._admit()

    def _pass(self) -> None:
        self.clock += (self.env.now - self.changed) / self.step_s if self.running else 0.0
        self.changed = self.env.now

    def _admit(self) -> None:
        self._pass()
        machine = self.machine
        while self.waiting and len(self.running) < machine.max_sequences:
            if self.reserved + self.waiting[0].blocks > machine.blocks_total:
                break
            job = self.waiting.popleft()
            self.reserved, self.awaited = self.reserved + job.blocks, self.awaited - job.blocks
            self.number += 1
            heapq.heappush(self.running, (self.clock + max(job.request.output - 1, 0), self.number, job))
        self.generation += 1
        if self.running:
            due = self.env.timeout(max(0.0, self.running[0][0] - self.clock) * self.step_s, self.generation)
            due.callbacks.append(self._due)

    def _due(self, event: simpy.Event) -> None:
        if event.value != self.generation:
            return
        self._pass()
        while self.running and self.running[0][0] <= self.clock + 1e-6:
            _, _, job = heapq.heappop(self.running)
            self.reserved -= job.blocks
            self.ended(self, job)
        self._admit()

    def signals(self) -> dict[str, float]:
        """As `autoscale.signals` has them."""
        return {
            "clock": self.env.now + 1.0,
            "age_s": self.env.now - self.born,
            "ready_s": self.machine.start_s,
            "blocks": self.reserved + self.awaited,
            "blocks_total": self.machine.blocks_total,
            "sequences": self.load,
            "max_sequences": self.machine.max_sequences,
            "waiting": len(self.waiting),
            "itl_s": self.step_s if self.running else 0.0,
        }
