"""Metrics of what prefill replicas compute in idle time, ahead of requests.

See `prefill_workers.background.compile_queue` and `answer_prefill`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from prefill_workers.background.patch_precompiler import CompileStats
from serving.api.metrics import in_time
from serving.frontend.roles import CompilingRoles


async def compiling(roles: CompilingRoles) -> list[Metric]:
    """The metrics of all replicas; none when they do not answer in time."""
    compiled = await in_time(roles.compiled(), None, "prefill workers")
    return [] if compiled is None else list(families(compiled))


def families(compiled: Mapping[str, CompileStats]) -> Iterator[Metric]:
    """The metrics of all replicas' compiling."""
    waiting = GaugeMetricFamily(
        "orbitserve_compile_waiting", "Sets of which something waits to be compiled.", labels=["replica"]
    )
    forwards = CounterMetricFamily(
        "orbitserve_compile_forwards", "Forwards that nobody had asked for, by job.", labels=["replica", "job"]
    )
    seconds = CounterMetricFamily("orbitserve_compile_seconds", "What these forwards took.", labels=["replica"])
    given_up = CounterMetricFamily(
        "orbitserve_compile_given_up",
        "Jobs not worth their place in the queue, or their bytes in a full library, or of pairs that nobody sums.",
        labels=["replica", "reason"],
    )
    dropped = CounterMetricFamily(
        "orbitserve_patches_dropped",
        "Patches that the compiler had no room for or could not form.",
        labels=["replica"],
    )
    idle = CounterMetricFamily(
        "orbitserve_idle_tokens", "Tokens that forwards computed in idle time, whatever for.", labels=["replica"]
    )
    answers = CounterMetricFamily(
        "orbitserve_answer_tokens",
        "Of these, tokens of answers, which the next turns of their chats bring back.",
        labels=["replica"],
    )
    pulled = CounterMetricFamily(
        "orbitserve_answer_tokens_pulled",
        "Tokens of answers whose KV was read from decode workers instead.",
        labels=["replica"],
    )
    unkept = CounterMetricFamily(
        "orbitserve_answers_given_up",
        "Answers whose KV is neither read nor computed: others came later, or nothing is left of the prompt or of free "
        "blocks.",
        labels=["replica", "reason"],
    )
    host = GaugeMetricFamily(
        "orbitserve_prefix_host_bytes", "KV of prompts' beginnings in host memory, behind the pool.", labels=["replica"]
    )
    restored = CounterMetricFamily(
        "orbitserve_prefix_blocks_restored", "KV blocks that came back from there.", labels=["replica"]
    )
    for replica, stats in compiled.items():
        host.add_metric([replica], stats.host.nbytes)
        restored.add_metric([replica], stats.host.restored)
        idle.add_metric([replica], stats.idle_tokens)
        answers.add_metric([replica], stats.answers.tokens)
        pulled.add_metric([replica], stats.answers.pulled)
        for reason, count in stats.answers.given_up.items():
            unkept.add_metric([replica, reason], count)
        waiting.add_metric([replica], stats.waiting)
        seconds.add_metric([replica], stats.seconds)
        dropped.add_metric([replica], stats.dropped)
        for job, count in stats.forwards.items():
            forwards.add_metric([replica, job], count)
        for reason, count in stats.given_up.items():
            given_up.add_metric([replica, reason], count)
    yield from (waiting, forwards, seconds, given_up, dropped, idle, answers, pulled, unkept, host, restored)
