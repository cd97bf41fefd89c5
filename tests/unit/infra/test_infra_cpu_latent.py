"""Latent attention of tokens that share a sequence: against fp64, and which batches vLLM's own kernel still takes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from infra.cpu import latent as cpu_latent

HEADS, RANK, ROPE, BLOCK, BLOCKS = 4, 512, 64, 16, 96
SCALE = (RANK + ROPE) ** -0.5
Spans = Sequence[tuple[list[int], int, int]]  # of each row of runs: its sequence's blocks, first token, token behind


def batch(spans: Spans) -> tuple[Tensor, Tensor]:
    """Tables [rows, blocks] and ends [rows], a row per token."""
    widest = max(len(blocks) for blocks, _, _ in spans)
    tables = [[*blocks, *[0] * (widest - len(blocks))] for blocks, start, stop in spans for _ in range(start, stop)]
    ends = [token + 1 for _, start, stop in spans for token in range(start, stop)]
    return torch.tensor(tables, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)


def drawn(rows: int, dtype: torch.dtype, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Queries and a cache; what no token was ever stored in is not a number."""
    generator = torch.Generator().manual_seed(rows)
    queries = torch.randn(rows, HEADS, RANK + ROPE, generator=generator) * size
    cache = torch.randn(BLOCKS, BLOCK, RANK + ROPE, generator=generator)
    cache[0] = torch.nan
    return queries.to(dtype), cache.to(dtype)


def exact(queries: Tensor, cache: Tensor, tables: Tensor, ends: Tensor) -> Tensor:
    found = []
    for query, table, end in zip(queries.double(), tables.long(), ends.tolist(), strict=True):
        stored = cache[table].flatten(0, 1)[:end].double()
        found.append((query @ stored.mT * SCALE).softmax(-1) @ stored[:, :RANK])
    return torch.stack(found)


MIXED: Spans = (
    (list(range(3, 24)), 0, 50),  # blocks one behind the other
    (list(range(3, 24)), 120, 333),  # a later run of the same sequence
    (list(range(60, 40, -1)), 299, 300),  # one token, blocks in another order
    ([70, 72, 74], 33, 45),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [1, 3000, cpu_latent.SCORES])
def test_rows_get_what_each_would_get_by_itself(
    dtype: torch.dtype, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_latent, "SCORES", scores)
    tables, ends = batch(MIXED)
    queries, cache = drawn(len(ends), dtype)
    found = cpu_latent.sequences(tables, ends, BLOCK)
    assert [(one.start, one.stop) for one in found] == [(0, 263), (263, 264), (264, 276)]
    out = cpu_latent.attend(queries, cache, found, SCALE, RANK)
    assert out.dtype is dtype
    wanted = exact(queries, cache, tables, ends)
    assert float((out.double() - wanted).abs().max() / wanted.abs().max()) < 16 * torch.finfo(dtype).eps


def test_what_weighs_nothing_is_left_out_without_a_trace() -> None:
    """Sharp attention has weights that fp32 cannot hold in full: what is made of the others is as near as ever."""
    tables, ends = batch(MIXED)
    queries, cache = drawn(len(ends), torch.float32, size=30.0)
    scores = queries[100, 0] @ cache[tables[100].long()].flatten(0, 1)[: int(ends[100])].mT * SCALE
    smallest = float(scores.double().softmax(-1).min())
    assert 0 < smallest < torch.finfo(torch.float32).tiny
    out = cpu_latent.attend(queries, cache, cpu_latent.sequences(tables, ends, BLOCK), SCALE, RANK)
    wanted = exact(queries, cache, tables, ends)
    assert float((out.double() - wanted).abs().max() / wanted.abs().max()) < 256 * torch.finfo(torch.float32).eps


APART: Spans = [([block], 3, 4) for block in (5, 6, 7)]
PADDED: Spans = [([5], 3, 4), *[([0], -1, 0)] * 2]  # a padded batch: rows that read nothing


@pytest.mark.parametrize(("spans", "by"), [(MIXED, "ours"), (APART, "vllm"), (PADDED, "vllm")])
def test_rows_of_different_sequences_stay_with_vllms_kernel(spans: Spans, by: str) -> None:
    called: list[bool] = []

    def native(*_: Any) -> tuple[Tensor, None]:
        called.append(True)
        return torch.empty(0), None

    forward = cpu_latent._by_sequences(native)
    tables, ends = batch(spans)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=tables, seq_lens=ends))
    backend = SimpleNamespace(scale=SCALE, kv_lora_rank=RANK)
    queries, cache = drawn(len(ends), torch.float32)
    for _ in range(2):  # a forward's layers share their metadata
        out, _ = forward(backend, queries.split([RANK, ROPE], -1), cache, metadata, None)
    assert bool(called) is (by == "vllm")
    if by == "ours":
        assert torch.equal(out, cpu_latent.attend(queries, cache, getattr(metadata, cpu_latent._FOUND), SCALE, RANK))


def test_engines_of_this_process_compute_so() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    if not current_platform.is_cpu():
        pytest.skip("for CPUs")
    cpu_latent.install()
    once: Any = CPUMLAImpl.forward_mqa
    cpu_latent.install()
    assert CPUMLAImpl.forward_mqa is once
    assert once.__wrapped__.__name__ == "forward_mqa"
