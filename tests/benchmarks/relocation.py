"""Relocation against computing in place: the largest error, by family and dtype.

A chunk's KV is computed alone at position 0 and relocated; the same chunk is computed alone at the shifted position.
In fp32 the two are compared in all layers. In bf16 both are rounded, the computed one also in every layer below:
relocation is compared with the exact rotation of what is stored, in units in the last place of bf16, and its distance
from fp32 with that of computing in place. Chunks of multimodal models get a grid of M-RoPE positions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES, Family
from infra.vllm_env import vllm_environment
from serving.bench.harness import Benchmark, Outcome

if TYPE_CHECKING:
    from kvstore.operator.layout import Layout
    from prefill_workers.engine.engine import PrefillEngine

TOKENS, COLUMNS = 192, 16
SHIFTS = (1, 64, 1017, 3000)
MAX_MODEL_LEN = 4096


def run(quick: bool, console: Console) -> Outcome:
    """Measure every registered family; `quick` two of them, one of each attention."""
    os.environ.update(vllm_environment(kv_cache_gib=1, threads=os.cpu_count()))
    families = {name: FAMILIES[name] for name in ("qwen2_5_vl", "deepseek_v2")} if quick else FAMILIES
    errors = {}
    with Progress(console=console) as progress:
        task = progress.add_task("families", total=len(families))
        for name, family in families.items():
            errors[name] = _errors(family)
            progress.advance(task)
    figures = {
        "max_abs_fp32": max(row["max_abs_fp32"] for row in errors.values()),
        "max_ulp_bf16": max(row["max_ulp_bf16"] for row in errors.values()),
        "bf16_error_over_in_place": max(row["bf16_error_over_in_place"] for row in errors.values()),
    }
    workload = {"tokens": TOKENS, "shifts": list(SHIFTS), "families": list(families)}
    return Outcome(workload, [], figures, {"relocation": errors})


def _errors(family: Family) -> dict[str, float]:
    from kvstore.operator.apply import relocate

    fp32, layout = _compute(family, "float32")
    bf16, _ = _compute(family, "bfloat16")
    worst = {"max_abs_fp32": 0.0, "max_ulp_bf16": 0.0, "bf16_error_over_in_place": 0.0}
    for shift in SHIFTS:
        moved = relocate(fp32[0], shift, layout)
        stored = relocate(bf16[0], shift, layout)
        exact = relocate(bf16[0].double(), shift, layout)
        # where a pair nearly cancels, the rotation's own fp32 arithmetic is coarser than a bf16 of the result
        unit = torch.exp2(exact.abs().clamp_min(2.0**-126).log2().floor() - 7).clamp_min(2.0**-22 * exact.abs().max())
        found = {
            "max_abs_fp32": float((moved - fp32[shift]).abs().max()),
            "max_ulp_bf16": float(((stored.double() - exact).abs() / unit).max()),
            "bf16_error_over_in_place": float(
                (stored.float() - fp32[shift]).abs().mean() / (bf16[shift].float() - fp32[shift]).abs().mean()
            ),
        }
        worst = {name: max(value, found[name]) for name, value in worst.items()}
    return worst


def _compute(family: Family, dtype: str) -> tuple[dict[int, Tensor], Layout]:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.engine.spec import EngineSpec

    engine = PrefillEngine(
        EngineSpec(
            model=str(checkpoint_path(family.checkpoint)),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            trust_remote_code=family.trust_remote_code,
            hand_off=False,
        )
    )
    try:
        return {shift: _lone(engine, shift) for shift in (0, *SHIFTS)}, engine.layout
    finally:
        engine.shutdown()


def _lone(engine: PrefillEngine, shift: int) -> Tensor:
    """KV of the chunk computed alone, its first token at position `shift`."""
    from prefill_workers.sequence import LinkSequence, Run

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (TOKENS,), generator=generator, dtype=torch.int32)
    index = torch.arange(TOKENS)
    positions = torch.stack((index * 0, index // COLUMNS, index % COLUMNS)) if engine.uses_mrope else index
    blocks = range(1, 2 + TOKENS // engine.block_size)
    engine.forward([(LinkSequence(tokens, positions + shift, blocks), [Run(0, TOKENS)])])
    return engine.read_kv(blocks, 0, TOKENS)


BENCHMARK = Benchmark(
    "relocation",
    "The largest error of relocating a chunk instead of computing it in place, by family and dtype.",
    run,
    {"max_ulp_bf16": ("<=", 1.0)},
)
