"""Loads beside compute (mpic.md §3.2) against loading and computing alone.

A request has n images, m of them missing.

| arm     | what is timed                                                                                  |
|---------|------------------------------------------------------------------------------------------------|
| both    | the whole link: what is stored loads from the tier while the missing images are encoded and computed |
| chunks  | the same, but whatever stands behind a stored image waits until all of that has come |
| load    | the stored records of the same images until the last one is in memory, nothing computed         |
| compute | the same link with every stored record in memory already                                        |

The cases differ in the tier and in where the missing images stand: spread evenly, or at an end. Tokens attend to all
before them, so without loading by layer (`prefill_workers.link.layerwise_load`) an image that is missing behind all
stored ones would be encoded while they load, but not prefilled: `chunks` is that arm. Loading from the slow tier takes
about half as long as computing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from infra.checkpoints import checkpoint_path
from infra.vllm_env import vllm_environment
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns
from serving.bench.models import CHECKPOINT, measured_dtype
from serving.bench.worker import TENANT, Worker, prompt_over, worker
from serving.loadtest.images import PIXELS, SHAPES

if TYPE_CHECKING:
    from kvstore.library import Library
    from kvstore.tiers.base import Tier
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.scheduler.cost_model import ForwardCostModel

TOKENS, RANK = 256, 32
LATENCY_S, BYTES_PER_S = 0.005, 48 * (1 << 20)
_DESCRIPTIONS = {
    "both": "the whole link; stored images load while missing ones are encoded and computed",
    "chunks": "the same, but what stands behind a stored image waits until all of it has come",
    "load": "only loading what is stored",
    "compute": "the whole link, everything stored in memory already",
}


@dataclass(frozen=True)
class Case:
    """A set of missing images, and the tier: the raw disk or one behind a slow link."""

    name: str
    images: int
    missing: tuple[int, ...]
    slow: bool = True


CASES = (
    Case("spread", 8, (2, 6)),
    Case("missing-first", 8, (0, 1)),
    Case("missing-last", 8, (6, 7)),
    Case("disk", 8, (2, 6), slow=False),
)


def run(quick: bool, console: Console) -> Outcome:
    """Measure every case, its arms in turns."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    console.print("starting a prefill engine")
    engine = PrefillEngine(
        EngineSpec(model=str(checkpoint_path(CHECKPOINT)), dtype=measured_dtype(), max_model_len=4096, hand_off=False)
    )
    cases = CASES[:1] if quick else CASES
    turns = 3 if quick else 9
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    try:
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as directory:
                for name, times in _Measurement(engine, case, Path(directory)).samples(turns).items():
                    samples[name][case.name] = times
            console.print(f"  {case.name} done")
    finally:
        engine.shutdown()
    arms = {name: Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()}
    figures: dict[str, float] = {}
    for case in cases:
        both, chunks, load, compute = (arms[name].median_ms(case.name) for name in _DESCRIPTIONS)
        suffix = "" if case is CASES[0] else "_" + case.name.replace("-", "_")
        figures |= {
            f"over_max{suffix}": both / max(load, compute),
            f"over_sum{suffix}": both / (load + compute),
            f"chunks_over_max{suffix}": chunks / max(load, compute),
        }
    workload = {
        "model": CHECKPOINT,
        "dtype": measured_dtype(),
        "image_tokens": TOKENS,
        "rank": RANK,
        "cases": {case.name: {"images": case.images, "missing": case.missing, "slow": case.slow} for case in cases},
        "slow_tier": {"latency_ms": LATENCY_S * 1e3, "mib_per_s": BYTES_PER_S / 2**20},
    }
    return Outcome(workload, list(arms.values()), figures)


class _Measurement:
    """One case: a request, and a tier with random KV and patches of its other images."""

    def __init__(self, engine: PrefillEngine, case: Case, directory: Path) -> None:
        from kvstore.tiers.disk import DiskTier
        from kvstore.tiers.faults import SlowTier
        from prefill_workers.scheduler.cost_model import ForwardCostModel

        self._cost_model = ForwardCostModel()
        self._engine, self._directory = engine, directory
        disk = DiskTier(directory)
        self._prompt = prompt_over(engine, [_picture(i) for i in range(case.images)])
        with self._opened(disk) as opened:
            self._stored = list(self._fill(opened, set(case.missing)))
        self._tier: Tier = SlowTier(disk, LATENCY_S, BYTES_PER_S) if case.slow else disk

    def samples(self, turns: int) -> dict[str, list[float]]:
        """Milliseconds of every turn, by arm."""
        arms = {
            "both": lambda: self._link(warm=False),
            "chunks": lambda: self._link(warm=False, by_layer=False),
            "load": self._load,
            "compute": lambda: self._link(warm=True),
        }
        in_turns(arms, 1)  # compiles, warms, learns the pace of forwards
        return in_turns(arms, turns)

    def _link(self, warm: bool, by_layer: bool = True) -> float:
        with self._opened(self._tier, self._cost_model if by_layer else None) as opened:
            if warm:
                self._load_all(opened.library)
            return clock_ms(lambda: self._link_once(opened))

    def _link_once(self, opened: Worker) -> None:
        result = opened.link(self._prompt)
        if result.tokens_reused != sum(chunk.tokens for chunk in result.chunks if chunk.operating_point == "patched"):
            raise RuntimeError("the report of reused tokens is wrong")
        if sum(chunk.operating_point == "patched" for chunk in result.chunks) * 2 != len(self._stored):
            raise RuntimeError(f"not every stored image was linked: {result.chunks}")

    def _load(self) -> float:
        with self._opened(self._tier) as opened:
            return clock_ms(lambda: self._load_all(opened.library))

    def _load_all(self, library: Library) -> None:
        loads = [library.load(kind, key, TENANT) for kind, key in self._stored]
        if any(load.result() is None for load in loads):
            raise RuntimeError("a record that was stored could not be loaded")

    @contextmanager
    def _opened(self, tier: Tier, cost_model: ForwardCostModel | None = None) -> Iterator[Worker]:
        """A worker whose memory is empty, and whose files the system has not cached either.

        `cost_model`: what it knows of its forwards, and goes on learning; None: nothing, so that it loads by chunk.
        """
        from kvstore.library import Library
        from kvstore.records.patch_form import PatchForm
        from kvstore.settings import LibrarySettings

        for path in self._directory.rglob("*.arrow"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        settings = LibrarySettings(directory=None, load_timeout_s=60)
        with (
            Library(settings, self._engine.fingerprint, [tier]) as library,
            worker(self._engine, library, PatchForm(RANK), learns=False, cost_model=cost_model) as opened,
        ):
            yield opened

    def _fill(self, opened: Worker, missing: set[int]) -> Iterator[tuple[Any, str]]:
        """Store random KV and a patch for each image not missing; yields their kinds and keys."""
        from kvstore.operator.patch import PatchKind
        from kvstore.records.record import CanonicalRecord, PatchRecord

        engine, layout, library, linker = self._engine, self._engine.layout, opened.library, opened.linker
        request = self._prompt.request
        generator = torch.Generator().manual_seed(0)
        for i, keys in enumerate(linker.keys(request)):
            if i in missing:
                continue
            common: dict[str, Any] = {"fingerprint": engine.fingerprint, "tenant": TENANT, "layout": layout}
            shape = (layout.layers, len(request.chunks[i]), layout.features)
            kv, delta = (torch.randn(shape, generator=generator) for _ in range(2))
            patch = linker.form.form(delta, layout, PatchKind.own, engine.dtype)
            library.put(CanonicalRecord(key=keys.canonical, kv=kv.to(engine.dtype), **common))
            library.put(PatchRecord(key=keys.own_patch, patch=patch, **common))
            library.flush()
            yield "patch", keys.own_patch
            yield "canonical", keys.canonical


def _picture(number: int) -> Image.Image:
    wide, high = (side * PIXELS for side in SHAPES[TOKENS])
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (high, wide, 3), dtype=np.uint8))


BENCHMARK = Benchmark(
    "parallel-load",
    "Link n images of which m are missing, against the larger of loading alone and computing alone, and their sum.",
    run,
    {"over_max": ("<=", 1.15)},
)
