"""One server under one workload, run after run; and a whole load test over a list of rates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import cycle

from serving.loadtest.arrivals import Arrival, count_for, mean_rate, poisson, rescaled
from serving.loadtest.bodies import Bodies
from serving.loadtest.client import Client, Endpoint, Sample, Tally, connections_allowed, open_loop
from serving.loadtest.workloads import Workload

MAX_IN_FLIGHT = 10_000
DURATION_S = 30.0
Watch = Callable[[str, Tally], AbstractContextManager[None]]


@dataclass(frozen=True)
class Plan:
    """A load test's rates, in requests a second, and how long each is kept up.

    With a trace its arrivals are due as recorded, or at each of `rates` as its mean rate. `count` requests a rate, or
    as many as `duration_s` holds (None: 30 s, or the whole trace); before them `warmup` requests at the same rate, of a
    trace its first ones, that are answered and not counted.
    """

    rates: Sequence[float] = ()
    count: int | None = None
    duration_s: float | None = None
    warmup: int = 5
    seed: int = 0
    trace: Sequence[Arrival] | None = None

    def steps(self) -> Iterator[tuple[float, list[Arrival], list[Arrival]]]:
        """(rate, warm-up, arrivals) in order; of Poisson arrivals each rate has its own."""
        if self.trace is not None:
            for rate in self.rates or [mean_rate(self.trace)]:
                due = rescaled(self.trace, rate) if self.rates else list(self.trace)
                if self.duration_s is not None:
                    due = [arrival for arrival in due if arrival.at <= self.duration_s]
                yield rate, self._warmup(rate), due[: self.count]
            return
        for rate in self.rates:
            count = self.count or count_for(rate, DURATION_S if self.duration_s is None else self.duration_s)
            yield rate, self._warmup(rate), poisson(rate, count, self.seed)

    def asked_before(self, step: int, requests: int) -> int:
        """Requests, of so many at the step-th rate, whose exact body was sent before.

        A trace's own bodies are the same at every rate and in the warm-up; the workload's requests are new each time.
        """
        repeated = requests if step else min(self.warmup, requests)
        return sum(arrival.body is not None for arrival in (self.trace or ())[:repeated])

    def _warmup(self, rate: float) -> list[Arrival]:
        due = poisson(rate, self.warmup, self.seed + 1) if self.warmup else []
        if self.trace is None:
            return due
        return [replace(asked, at=arrival.at) for arrival, asked in zip(due, cycle(self.trace), strict=False)]


class Subject:
    """A server under a workload, continuing across runs: requests, uploaded pictures."""

    def __init__(
        self,
        endpoint: Endpoint,
        workload: Workload,
        max_in_flight: int = MAX_IN_FLIGHT,
        drain_s: float | None = None,
    ) -> None:
        """Set up the subject.

        `drain_s` bounds the wait after a run's last request; None: until all are answered or timed out.
        """
        self.endpoint, self.workload = endpoint, workload
        self.max_in_flight = connections_allowed(max_in_flight)
        self._drain_s = endpoint.timeout_s + 5 if drain_s is None else drain_s
        self._bodies = Bodies(endpoint, workload)

    async def run(self, arrivals: Sequence[Arrival], tally: Tally | None = None) -> list[Sample]:
        """Send all arrivals when due and wait for the answers; samples in the arrivals' order.

        Raises:
            EndpointError: the server is not there, has not the model, or takes no files.
        """
        async with Client(self.endpoint) as client:
            model = await client.model()
            schedule = [(arrival.at, await self._bodies.body(arrival, model, client)) for arrival in arrivals]
            tally = Tally() if tally is None else tally
            return await open_loop(client.ask, schedule, tally, self.max_in_flight, self._drain_s)

    async def one_by_one(self, count: int, tally: Tally | None = None) -> list[Sample]:
        """Send the workload's next requests, each when the one before is answered.

        Raises:
            EndpointError: see `run`.
        """
        tally = Tally() if tally is None else tally
        tally.planned += count
        async with Client(self.endpoint) as client:
            model = await client.model()
            for _ in range(count):
                body = await self._bodies.body(Arrival(0.0), model, client)
                tally.sent += 1
                sample = await client.ask(await body.content())
                body.answered(sample)
                tally.samples.append(sample)
        return tally.samples


@dataclass(frozen=True)
class RateResult:
    """Result of one rate."""

    rate: float
    samples: Sequence[Sample]
    held_back: int
    peak_in_flight: int


async def load_test(subject: Subject, plan: Plan, watch: Watch) -> AsyncIterator[RateResult]:
    """Every rate of the plan, as it comes: warmed up, run, drained.

    `watch` shows a tally, under a title, while a run lasts.

    Raises:
        EndpointError: see `Subject.run`.
    """
    for rate, warmup, arrivals in plan.steps():
        if warmup:
            tally = Tally()
            with watch(f"{rate:g}/s, warm-up", tally):
                await subject.run(warmup, tally)
        tally = Tally()
        with watch(f"{rate:g}/s", tally):
            samples = await subject.run(arrivals, tally)
        yield RateResult(rate, samples, tally.held_back, tally.peak)
