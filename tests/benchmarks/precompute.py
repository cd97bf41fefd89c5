"""The offline caching job: chunks per second with one and two workers of equal threads.

Every job has a fresh library and encodes, computes and stores every image: embeddings, canonical and the patch for the
leading place. The clock runs from the first image's start to the last one's end, with all workers up before.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from rich.console import Console

from infra.checkpoints import checkpoint_path
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.bench.models import CHECKPOINT
from serving.deploy.ray_cluster import ray_cluster
from serving.loadtest.images import image_url
from tests.benchmarks.servers import bench_config

IMAGE_TOKENS = 256
_START_SECONDS = 600


def run(quick: bool, console: Console) -> Outcome:
    """Measure jobs of either size, in turns."""
    from ray.data import DataContext

    images, turns = (8, 1) if quick else (48, 3)
    threads = max(1, (os.cpu_count() or 1) // 2)
    DataContext.get_current().wait_for_min_actors_s = _START_SECONDS
    with ray_cluster(), tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as folder:
        manifest = Path(folder) / "manifest.jsonl"
        lines = (json.dumps({"url": image_url(IMAGE_TOKENS, number)}) for number in range(images))
        manifest.write_text("\n".join(lines))
        jobs = {f"workers-{n}": partial(_job_ms, n, threads, manifest, console) for n in (1, 2)}
        samples = in_turns(jobs, turns)
    case = str(images)
    arms = [
        Arm(name, f"job of {images} images with {name[-1]} worker(s)", {case: times}) for name, times in samples.items()
    ]
    per_second = [images / (arm.median_ms(case) * 1e-3) for arm in arms]
    figures = {"chunks_per_s_1": per_second[0], "chunks_per_s_2": per_second[1], "gain": per_second[1] / per_second[0]}
    workload = {"model": CHECKPOINT, "images": images, "tokens": IMAGE_TOKENS, "threads": threads, "patches": "own"}
    return Outcome(workload, arms, figures)


def _job_ms(workers: int, threads: int, manifest: Path, console: Console) -> float:
    from serving.offline.precompute import Summary, outcomes
    from serving.offline.precompute_manifest import Manifest

    console.print(f"a job with {workers} worker(s)")
    with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as root:
        config = bench_config(
            checkpoint_path(CHECKPOINT), Path(root), precompute={"workers": workers, "threads": threads}
        )
        source, summary = Manifest(str(manifest)), Summary()
        count = source.count()
        for outcome in outcomes(config, source, count):
            summary.add(outcome)
    if summary.canonicals != count:
        raise RuntimeError(f"{count} images, but {summary.canonicals} canonicals: {summary.failures}")
    return summary.seconds * 1e3


BENCHMARK = Benchmark(
    "precompute",
    "Offline caching job: chunks per second, one worker against two on the same threads each.",
    run,
    {},
)
