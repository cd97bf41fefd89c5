"""Loss of a worker's node: a service over three hosts, of which one has its power cut.

The hosts are namespaces of this machine (`tests/cluster`), which needs root; each has a part of its processors. Two of
them have a prefill and a decode worker each, the third the ingress; the library is on an S3 server. In every turn
streams decode and questions are being linked when the node goes, and further questions come right after.

| figure      | what                                                                                       |
|-------------|--------------------------------------------------------------------------------------------|
| recovery_s  | from the power cut to the first right answer after it                                      |
| slowest_s   | to the last one of those questions, which may have been on the node: linked anew elsewhere |
| failed      | answers that were wrong, cut, or an error; streams included                                |
| back_s      | from `ray start` on the node that came back until workers serve there again                |
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from serving.bench.harness import Benchmark, Outcome
from serving.cli.demo_pages import Story
from tests.cluster.asking import CLIENT_SECONDS, Said, ask, pages
from tests.cluster.cluster import WORKER, Cluster
from tests.cluster.hosts import missing
from tests.cluster.three_hosts import holder, other, three_hosts, well_on_both

STREAMS, BEFORE, AFTER = 4, 6, 6  # streams and questions under way when the node goes; questions that come then
_LONG = {"max_tokens": 250, "ignore_eos": True}
_STORY = Story.drawn(5)
_QUESTION = [*pages(_STORY), {"type": "text", "text": _STORY.questions[0]}]


@dataclass(frozen=True)
class Turn:
    """Seconds after one power cut, and the answers that were not right."""

    recovery_s: float
    slowest_s: float
    back_s: float
    failed: int


def run(quick: bool, console: Console) -> Outcome:
    """Cut the power of a node with workers, several times.

    Raises:
        RuntimeError: no hosts can be made here.
        S3ServerUnavailable: there is no S3 server to be had.
    """
    if reason := missing():
        raise RuntimeError(reason)
    count = 1 if quick else 3
    with tempfile.TemporaryDirectory() as base, three_hosts(Path(base)) as cluster:
        well_on_both(cluster)
        for _ in range(2):
            _right(ask(cluster, _QUESTION))
            cluster.settle()
        turns = []
        for number in range(count):
            turns.append(turn := _cut(cluster))
            console.print(f"  turn {number + 1}: {turn}", highlight=False)
    figures = {
        "recovery_s": statistics.median(turn.recovery_s for turn in turns),
        "slowest_s": max(turn.slowest_s for turn in turns),
        "back_s": statistics.median(turn.back_s for turn in turns),
        "failed": float(sum(turn.failed for turn in turns)),
    }
    workload = {
        "turns": count,
        "hosts": 3,
        "streams": STREAMS,
        "questions": {"under way": BEFORE, "after": AFTER},
        "library": "S3",
    }
    return Outcome(workload, [], figures)


def _cut(cluster: Cluster) -> Turn:
    whole = ask(cluster, _QUESTION, stream=True, **_LONG)
    victim = other(holder(cluster, "LibraryKeeper"))
    with ThreadPoolExecutor(STREAMS + BEFORE + AFTER) as pool:
        begun = [threading.Event() for _ in range(STREAMS)]
        streams = [pool.submit(ask, cluster, _QUESTION, stream=True, began=one, **_LONG) for one in begun]
        for one in begun:
            one.wait(180)
        questions = [pool.submit(_timed, cluster) for _ in range(BEFORE)]
        time.sleep(0.2)
        cluster.network.hosts[victim].power_off()
        cut = time.monotonic()
        questions += [pool.submit(_timed, cluster) for _ in range(AFTER)]
        answers = [one.result() for one in questions]
        ended = [one.result() for one in streams]
    failed = sum(not (one.finished and one.text == whole.text) for one in ended)
    failed += sum(not _is_right(said) for said, _ in answers)
    after = [at - cut for said, at in answers[BEFORE:] if _is_right(said)]  # asked when the node was gone
    began = time.monotonic()
    cluster.join(victim, WORKER)
    well_on_both(cluster)
    back_s = time.monotonic() - began
    return Turn(min(after, default=CLIENT_SECONDS), max(after, default=CLIENT_SECONDS), back_s, failed)


def _timed(cluster: Cluster) -> tuple[Said, float]:
    """An answer that is computed anew, and when it had come."""
    return ask(cluster, _QUESTION, mode="exact"), time.monotonic()


def _is_right(said: Said) -> bool:
    return said.status == 200 and said.finished and said.text == _STORY.answers[0]


def _right(said: Said) -> None:
    if not _is_right(said):
        raise RuntimeError(f"the service does not answer rightly: {said}")


BENCHMARK = Benchmark(
    "cluster",
    "A worker's node of three is lost under load: time to the first right answer, and answers that failed.",
    run,
    {"recovery_s": ("<=", 20.0), "failed": ("<=", 0.0)},
)
