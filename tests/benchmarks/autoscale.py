"""Autoscaling policies on public traces and generated shapes, in the simulator.

Traces are read from the folder that the environment variable ORBITSERVE_TRACES names (`mooncake/`,
`servegen-mm-image/`); without it the generated shapes alone are run. The other policies have the best of the settings
that `serving.scaling.study` tries for each, on the very trace that they are judged by; ours has none.

| figure                      | what                                                                                  |
|-----------------------------|---------------------------------------------------------------------------------------|
| replica_seconds_over_oracle | ours over an instant oracle's, on the worst trace                                     |
| over_best                   | ours over the cheapest other policy's that keeps 0.99 of static's good answers        |
| attainment_over_static      | good answers over those of static peak, on the worst trace                            |
| goodput_over_best           | good answers a replica-second over the best other policy's, where 0.7 of images return |
| reuse_kept                  | reused share of tokens in the five minutes after shrinks over that before             |
| reuse_without_hand_over     | the same where replicas that go hand nothing over                                     |
| flips                       | changes of direction in an hour of a load of 2 ± 0.1 replicas, the worst of some       |
| day_seconds                 | processor seconds to simulate a day of ServeGen at `DAY_SCALE` of its rate            |
| decision_ms                 | one decision at 100 prefill and 100 decode replicas: signals taken up, and planned     |

How far a simulated run is from a real one (`p50_error`, `p99_error`) takes a service: benchmark `scale-down`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from autoscale.controllers import Ours
from autoscale.curves import ForwardCost
from autoscale.policies import Bounds, Goals
from autoscale.scaler import Counts, Scaler
from autoscale.signals import Role
from autoscale.simulated import Machine
from autoscale.simulator import Limits, Result, Simulation
from autoscale.traces import Request, generated, mooncake, servegen
from serving.bench.harness import Benchmark, Outcome
from serving.scaling.routers import routers
from serving.scaling.study import KEEPS, OTHERS, Study, loads_of

START_S = 60.0
MORNING_S = 3600.0  # in ServeGen's day: from 1:00 its load rises to nearly three times its least, and falls again
DAY_SCALE = 0.03
LIMITS = Limits(8.0, 0.06)
_SLOW = Machine(forward=ForwardCost(100.0, 1.6e-3), encode_s_per_token=4e-4, start_s=START_S, max_sequences=16)
_FAST = Machine(forward=ForwardCost(300.0, 1.5e-4), start_s=START_S)
_MIDDLE = Machine(forward=ForwardCost(150.0, 8e-4), start_s=START_S, max_sequences=32)


@dataclass(frozen=True)
class Case:
    """One trace with the machine that it is run on.

    `reuse`: share of images that return; None: the trace tells by itself.
    """

    requests: Callable[[], Iterator[Request]]
    machine: Machine
    reuse: float | None


def cases(traces: Path | None, seconds: float) -> dict[str, Case]:
    """Traces by name; those of files where the folder has them."""
    found = {"bursty": Case(lambda: generated("bursty", 7.5, 900.0), _MIDDLE, 0.3)}
    if traces is None:
        found["diurnal 0.7"] = Case(lambda: generated("diurnal", 4.0, seconds, 0.7), _MIDDLE, 0.7)
        return found
    images, blocks = traces / "servegen-mm-image", traces / "mooncake" / "conversation_trace.jsonl"

    def drawn(reuse: float) -> Callable[[], Iterator[Request]]:
        return lambda: servegen(images, reuse, 0.25, start_s=MORNING_S, seconds=seconds)

    def replayed() -> Iterator[Request]:
        return takewhile(lambda request: request.at < seconds, mooncake(blocks))

    found |= {f"servegen {reuse}": Case(drawn(reuse), _SLOW, reuse) for reuse in (0.3, 0.7)}
    return found | {"mooncake": Case(replayed, _FAST, None)}


def run(quick: bool, console: Console) -> Outcome:
    """Run every policy on every trace."""
    folder = os.environ.get("ORBITSERVE_TRACES")
    if folder is None:
        console.print("  ORBITSERVE_TRACES is not set: generated shapes alone")
    traces = None if folder is None else Path(folder)
    seconds = 900.0 if quick else 5400.0
    found: dict[str, Mapping[str, Result]] = {}
    names = list(cases(traces, seconds))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(_of_case, name, traces, seconds) for name in names]
        for name, run in zip(names, runs, strict=True):
            found[name] = run.result()
            for policy, one in found[name].items():
                words = f"{one.attainment:.4f} good, {one.total_replica_seconds:.0f} replica-seconds, {one.turns} turns"
                console.print(f"  {name}, {policy}: {words}", highlight=False)
    reuse = {name: case.reuse for name, case in cases(traces, seconds).items()}
    figures = {**_over(found, reuse), "flips": _flips(1 if quick else 3), "decision_ms": _decision_ms()}
    if traces is not None:
        figures["day_seconds"] = _day_seconds(traces)
    workload = {
        "traces": list(found),
        "seconds": seconds,
        "start_s": START_S,
        "ttft_s": LIMITS.ttft_s,
        "itl_s": LIMITS.itl_s,
        "library": "on the disks of prefill nodes",
        "day_scale": DAY_SCALE,
    }
    return Outcome(workload, [], figures, _tables(found))


def _of_case(name: str, traces: Path | None, seconds: float) -> dict[str, Result]:
    """Every policy on one trace."""
    case = cases(traces, seconds)[name]
    study = Study(case.requests, case.machine, LIMITS, 40)
    return {policy: study.run(policy) for policy in ("static", "oracle", "ours", "ours-no-hand-over", *OTHERS)}


def _best(results: Mapping[str, Result]) -> Result:
    """The cheapest other policy among those that attain enough, else the one that attains most."""
    needed = KEEPS * results["static"].attainment
    others = [results[name] for name in ("static", *OTHERS)]
    return min((one for one in others if one.attainment >= needed), key=lambda one: one.total_replica_seconds)


def _over(found: Mapping[str, Mapping[str, Result]], reuse: Mapping[str, float | None]) -> dict[str, float]:
    def worst(over: Callable[[Mapping[str, Result]], float]) -> float:
        return max(over(results) for results in found.values())

    returning = [results for name, results in found.items() if (reuse[name] or 0.0) >= 0.5]
    shrinks = {
        figure: [one for results in found.values() for one in results[policy].shrinks]
        for figure, policy in (("reuse_kept", "ours"), ("reuse_without_hand_over", "ours-no-hand-over"))
    }
    return {
        "replica_seconds_over_oracle": worst(
            lambda one: one["ours"].total_replica_seconds / one["oracle"].total_replica_seconds
        ),
        "over_best": worst(lambda one: one["ours"].total_replica_seconds / _best(one).total_replica_seconds),
        "attainment_over_static": min(one["ours"].attainment / one["static"].attainment for one in found.values()),
        "goodput_over_best": min(
            one["ours"].goodput / max(one[name].goodput for name in ("static", *OTHERS)) for one in returning
        ),
        **{figure: _kept(pairs) for figure, pairs in shrinks.items() if pairs},
    }


def _kept(shrinks: list[tuple[float, float]]) -> float:
    before, after = (sum(side) for side in zip(*shrinks, strict=True))
    return after / before


def _flips(hours: int) -> float:
    """Of an hour, the worst; how many replicas there are at first is none of them. No image comes again."""
    mean_s = loads_of(generated("steady", 1.0, 3600.0, 0.0), _MIDDLE).mean_s
    found = []
    for seed in range(hours):
        ours = Ours(Goals(LIMITS.ttft_s, LIMITS.itl_s), Bounds(1, 20))
        load = generated("wavering", 2.1 / mean_s, 3600.0, 0.0, seed)
        simulation = Simulation(ours, _MIDDLE, LIMITS, routers, initial={Role.PREFILL: 4, Role.DECODE: 1})
        found.append(simulation.run(load).turns)
    return float(max(found))


def _day_seconds(traces: Path) -> float:
    began = time.process_time()
    slower = replace(_SLOW, forward=ForwardCost(10.0, 8e-3), encode_s_per_token=2e-3)
    ours = Ours(Goals(4 * LIMITS.ttft_s, LIMITS.itl_s), Bounds(1, 40))
    initial = {Role.PREFILL: 6, Role.DECODE: 1}
    simulation = Simulation(ours, slower, LIMITS, routers, initial=initial, shared=True)
    simulation.run(servegen(traces / "servegen-mm-image", 0.3, DAY_SCALE))
    return time.process_time() - began


def _decision_ms() -> float:
    scaler = Scaler({Role.PREFILL: Bounds(1, 200), Role.DECODE: Bounds(1, 200)}, Goals(4.0))
    common = {"age_s": 9.0, "ready_s": 60.0}
    prefill = {**common, "compute_s2": 0.0, "load_s": 0.0, "queued_s": 0.5, "waiting": 1.0}
    decode = {**common, "blocks": 10.0, "blocks_total": 100.0, "sequences": 3.0, "max_sequences": 16.0}
    taken = []
    for now in range(200):
        at = now + 1.0
        work = {**prefill, "clock": at, "links": at, "compute_s": 0.8 * at}
        signals = {
            Role.PREFILL: {f"p{number}": work for number in range(100)},
            Role.DECODE: {f"d{number}": {**decode, "clock": at} for number in range(100)},
        }
        began = time.process_time()
        scaler.observe(now, signals)
        scaler.plan(now, dict.fromkeys(signals, Counts(100, 100)))
        taken.append((time.process_time() - began) * 1e3)
    return statistics.median(taken)


def _tables(found: Mapping[str, Mapping[str, Result]]) -> dict[str, dict[str, dict[str, float]]]:
    def table(value: Callable[[Result], float]) -> dict[str, dict[str, float]]:
        policies = dict.fromkeys(policy for results in found.values() for policy in results)
        rows = {policy: {name: value(results[policy]) for name, results in found.items()} for policy in policies}
        return {
            policy: {name: cell for name, cell in row.items() if math.isfinite(cell)} for policy, row in rows.items()
        }

    return {
        "good answers": table(lambda one: one.attainment),
        "replica-hours": table(lambda one: one.total_replica_seconds / 3600),
        "good answers a replica-second": table(lambda one: one.goodput),
        "TTFT p99, s": table(lambda one: one.summary()["ttft_p99_s"]),
        "changes of direction": table(lambda one: float(one.turns)),
        "reused share after shrinks over before": table(lambda one: one.reuse_kept()),
    }


BENCHMARK = Benchmark(
    "autoscale",
    "Policies that scale prefill and decode, ours and others', on public traces by the simulator.",
    run,
    {
        "replica_seconds_over_oracle": ("<=", 1.25),
        "over_best": ("<=", 1.0),
        "attainment_over_static": (">=", 0.99),
        "goodput_over_best": (">=", 1.2),
        "reuse_kept": (">=", 0.95),
        "flips": ("<=", 0.0),
        "day_seconds": ("<=", 120.0),
        "decision_ms": ("<=", 5.0),
    },
)
