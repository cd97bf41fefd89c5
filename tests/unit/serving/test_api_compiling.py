"""What /metrics says of what prefill replicas compile ahead of requests."""

from __future__ import annotations

from dataclasses import replace

from prefill_workers.background.answer_prefill import AnswerStats
from prefill_workers.background.patch_precompiler import CompileStats
from prefill_workers.host_blocks import HostStats
from serving.api.compiling import compiling
from serving.api.metrics import exposition
from serving.errors import RoleUnavailable


class Roles:
    def __init__(self, *replicas: CompileStats) -> None:
        self.replicas = replicas

    async def compiled(self) -> dict[str, CompileStats]:
        if not self.replicas:
            raise RoleUnavailable("gone")
        return {f"r{i}": stats for i, stats in enumerate(self.replicas)}


async def test_metrics_say_what_waits_was_compiled_and_took():
    given_up = {"queue": 0, "bytes": 4}
    answers = AnswerStats(waiting=1, tokens=128, given_up={"evicted": 2})
    stats = CompileStats(3, {"orders": 6, "pairs": 2}, 1.5, given_up, dropped=5, idle_tokens=700, answers=answers)
    stats = replace(stats, host=HostStats(blocks=2, nbytes=4096, restored=3))
    lines = exposition(await compiling(Roles(stats))).decode().splitlines()
    for line in (
        'orbitserve_compile_waiting{replica="r0"} 3.0',
        'orbitserve_compile_forwards_total{job="orders",replica="r0"} 6.0',
        'orbitserve_compile_forwards_total{job="pairs",replica="r0"} 2.0',
        'orbitserve_compile_seconds_total{replica="r0"} 1.5',
        'orbitserve_compile_given_up_total{reason="bytes",replica="r0"} 4.0',
        'orbitserve_patches_dropped_total{replica="r0"} 5.0',
        'orbitserve_idle_tokens_total{replica="r0"} 700.0',
        'orbitserve_prefix_host_bytes{replica="r0"} 4096.0',
        'orbitserve_prefix_blocks_restored_total{replica="r0"} 3.0',
        'orbitserve_answer_tokens_total{replica="r0"} 128.0',
        'orbitserve_answers_given_up_total{reason="evicted",replica="r0"} 2.0',
    ):
        assert line in lines


async def test_a_scrape_goes_without_replicas_that_do_not_answer():
    assert await compiling(Roles()) == []
