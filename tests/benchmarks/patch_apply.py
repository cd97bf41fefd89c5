"""Linking a stored segment (load, relocate, patch, write into pages) against a plain copy.

The copy moves the canonical KV's bytes once, from one host buffer to another that was touched before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from infra.checkpoints import checkpoint_path
from infra.vllm_env import vllm_environment
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns
from serving.bench.models import CHECKPOINT

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

TOKENS, RANK, SHIFT = 1024, 32, 517
_KEYS = {"canonical": "a" * 64, "patch": "b" * 64}


def run(quick: bool, console: Console) -> Outcome:
    """Measure the whole way from memory and from disk, and its parts."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    console.print("starting a prefill engine")
    checkpoint = checkpoint_path(CHECKPOINT)
    engine = PrefillEngine(EngineSpec(model=str(checkpoint), max_model_len=4096, hand_off=False))
    try:
        with tempfile.TemporaryDirectory(prefix="orbitserve-bench-") as directory, torch.inference_mode():
            samples, bytes_, patch_bytes = _measure(engine, Path(directory), 5 if quick else 40)
    finally:
        engine.shutdown()
    arms = [Arm(name, text, {str(TOKENS): samples[name]}) for name, text in _DESCRIPTIONS.items()]
    case = str(TOKENS)
    copy = arms[0].median_ms(case)
    figures = {
        "fraction_of_copy": copy / arms[1].median_ms(case),
        "fraction_of_copy_from_disk": copy / arms[2].median_ms(case),
        "gib_per_second": bytes_ / 2**30 / (arms[1].median_ms(case) * 1e-3),
        "copy_gib_per_second": bytes_ / 2**30 / (copy * 1e-3),
        "patch_bytes": float(patch_bytes),
        "patch_share_of_kv": patch_bytes / bytes_,
    }
    workload = {"model": CHECKPOINT, "tokens": TOKENS, "rank": RANK, "dtype": "bfloat16", "bytes": bytes_}
    return Outcome(workload, arms, figures)


_DESCRIPTIONS = {
    "copy": "plain copy of the canonical KV's bytes in host memory",
    "link": "load from the library's memory, relocate, patch, write into the engine's pages",
    "link-disk": "the same, loaded from the library's files with checksums verified",
    "apply": "relocate and patch alone",
    "relocate": "relocate alone",
    "write": "write into the engine's pages alone",
}


def _measure(engine: PrefillEngine, directory: Path, turns: int) -> tuple[dict[str, list[float]], int, int]:
    from kvstore.library import Library
    from kvstore.operator.apply import apply
    from kvstore.operator.device_kernel import Placement
    from kvstore.operator.patch import PatchKind
    from kvstore.records.patch_form import PatchForm
    from kvstore.records.record import CanonicalRecord, PatchRecord
    from kvstore.settings import LibrarySettings

    layout = engine.layout
    generator = torch.Generator().manual_seed(0)
    shape = (layout.layers, TOKENS, layout.features)
    kv = torch.randn(shape, generator=generator).to(engine.dtype)
    patch = PatchForm(RANK).form(torch.randn(shape, generator=generator), layout, PatchKind.own, engine.dtype)
    common: dict[str, Any] = {"fingerprint": engine.fingerprint, "tenant": "local", "layout": layout}
    hot = Library(LibrarySettings(directory=directory), engine.fingerprint)
    hot.put(CanonicalRecord(key=_KEYS["canonical"], kv=kv, **common))
    hot.put(PatchRecord(key=_KEYS["patch"], patch=patch, **common))
    hot.flush()
    cold = Library(LibrarySettings(directory=directory, memory_bytes=0), engine.fingerprint)
    blocks = range(1, 2 + TOKENS // engine.block_size)
    slots = engine.slots(blocks, 3, 3 + TOKENS)
    target = torch.empty_like(kv)

    def link(library: Library) -> Tensor:
        canonical = library.get_canonical(_KEYS["canonical"], "local")
        stored = library.get_patch(_KEYS["patch"], "local")
        assert canonical is not None
        assert stored is not None
        if engine.places_on_device:
            engine.place([Placement(canonical.kv, stored.patch, SHIFT, slots, kv_lasts=True, patch_lasts=True)])
        else:
            engine.write_kv(apply(canonical.kv, stored.patch, SHIFT, layout, out=target), slots)
        engine.finish_writes()

    def write() -> None:
        engine.write_kv(kv, slots)
        engine.finish_writes()

    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(kv),
        "link": lambda: link(hot),
        "link-disk": lambda: link(cold),
        "apply": lambda: apply(kv, patch, SHIFT, layout, out=target),
        "relocate": lambda: apply(kv, None, SHIFT, layout, out=target),
        "write": write,
    }
    arms = {name: (lambda body=body: clock_ms(body)) for name, body in work.items()}
    in_turns(arms, 2)  # compiles, warms
    samples = in_turns(arms, turns)
    hot.close()
    cold.close()
    return samples, kv.nbytes, patch.nbytes


BENCHMARK = Benchmark(
    "patch-apply",
    "Load, relocate, patch and write one segment of 1024 tokens, against a plain copy of its bytes.",
    run,
    {"fraction_of_copy": (">=", 0.5)},
)
