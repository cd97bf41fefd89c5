"""Stored chunks and runs under vLLM's own Triton kernels, interpreted; `test_triton_attention` runs this file.

The engine's part on a GPU without one: pages are learnt from vLLM's cache write, our kernel relocates a stored
chunk into them, vLLM's writes the runs' keys and values, and its attention takes every run as a row of the table.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import vllm.triton_utils
from torch import Tensor

from kvstore.operator.device_kernel import Placement, describe, place
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.rotary import RotaryScheme, rotate
from prefill_workers.engine.pages import Pages, learnt

HEADS, QUERIES, WIDTH, SIZE, BLOCKS = 2, 2, 32, 16, 9  # KV heads, queries of each
ONE = torch.ones(1)
LAYOUT = Layout.gqa(1, HEADS, WIDTH, RotaryScheme.from_base(WIDTH))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give vLLM back the Triton that it leaves out where it finds no GPU."""
    for name, value in (("triton", triton), ("tl", tl), ("HAS_TRITON", True)):
        monkeypatch.setattr(vllm.triton_utils, name, value)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))


def write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """vLLM's own write of keys and values [tokens, heads, width]."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    paged = cache.transpose(1, 2).split(WIDTH, -1)
    triton_reshape_and_cache_flash(keys, values, *paged, slots, "auto", ONE, ONE)


def attend(cache: Tensor, queries: Tensor, runs: list[tuple[int, int]], blocks: list[int]) -> Tensor:
    """vLLM's own attention of runs, as rows that share a block table."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    paged = cache.transpose(1, 2).split(WIDTH, -1)
    out = torch.empty_like(queries)
    lengths = torch.tensor([0] + [stop - start for start, stop in runs], dtype=torch.int32)
    ends = torch.tensor([stop for _, stop in runs], dtype=torch.int32)
    table = torch.tensor([blocks + [0] * 4] * len(runs), dtype=torch.int32)
    heads = HEADS * QUERIES
    unified_attention(
        queries, *paged, out, lengths.cumsum(0, dtype=torch.int32), int(lengths.max()), ends, int(ends.max()),
        WIDTH**-0.5, True, (-1, -1), table, 0, None, ONE.expand(2, HEADS), ONE.expand(2, HEADS),
        seq_threshold_3D=0, num_par_softmax_segments=16,
        softmax_segm_output=torch.empty(1, heads, 16, WIDTH), softmax_segm_max=torch.empty(1, heads, 16),
        softmax_segm_expsum=torch.empty(1, heads, 16),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("tokens_first", [False, True])
def test_runs_attend_to_relocated_chunks_as_in_one_prefill(tokens_first: bool) -> None:
    torch.manual_seed(0)
    whole = torch.zeros(BLOCKS, SIZE, HEADS, 2 * WIDTH).transpose(1, 2)
    cache = whole if tokens_first else whole.contiguous()
    last = torch.arange(SIZE) + (BLOCKS - 1) * SIZE

    def through(numbers: Tensor) -> Tensor:
        keys, values = (part.reshape(SIZE, HEADS, WIDTH).float() for part in numbers.split(HEADS * WIDTH, -1))
        write(cache, keys.contiguous(), values.contiguous(), last)
        return cache[BLOCKS - 1].flatten().round().long()

    elements = learnt(SIZE, LAYOUT.features, 128, through)
    assert elements is not None
    table = PageTable.of([cache], elements, LAYOUT)
    assert table is not None
    cache.zero_()

    blocks, stored, runs = [5, 2, 7, 1], (20, 33), [(0, 20), (33, 50), (50, 61)]
    count = runs[-1][1]
    queries = torch.randn(count, HEADS * QUERIES, WIDTH)
    keys, values = torch.randn(2, count, HEADS, WIDTH).unbind(0)
    slots = torch.tensor(blocks)[torch.arange(count) // SIZE] * SIZE + torch.arange(count) % SIZE
    index = torch.cat([torch.arange(*run) for run in runs])
    write(cache, keys[index], values[index], slots[index])

    # the chunk as the library has it, with keys at position 0
    canonical = rotate(keys[slice(*stored)], -stored[0], LAYOUT.rotary)
    kv = torch.cat([canonical.flatten(1), values[slice(*stored)].flatten(1)], -1)[None]
    descriptor = describe([Placement(kv, None, stored[0], slots[slice(*stored)])], LAYOUT, torch.float32)
    place(descriptor, descriptor.words, table, LAYOUT, torch.float32)

    pages = Pages.of(elements, [HEADS * WIDTH] * 2, torch.device("cpu"))
    assert all(part.elements is None for part in pages.parts), "read as strided views"
    read = torch.empty(len(blocks), SIZE, LAYOUT.features)
    pages.read(cache[torch.tensor(blocks)].flatten(1), read)
    expected = torch.cat([keys.flatten(1), values.flatten(1)], -1)
    assert (read.view(-1, LAYOUT.features)[:count] - expected).abs().max() < 1e-5

    found = attend(cache, queries[index], runs, blocks)
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(QUERIES, 1)) * WIDTH**-0.5
    shares = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", shares, values.repeat_interleave(QUERIES, 1))[index]
    assert (found - expected).abs().max() < 1e-5
