"""The device kernel in Triton's interpreter; `test_device_kernel` runs this file in a process of its own.

Casts are PyTorch's there, which round as a GPU does: the interpreter's own truncate to bf16 and lose carries in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from kvstore.errors import ShapeMismatch
from kvstore.operator.apply import _apply_by_layer
from kvstore.operator.basis import pool_basis
from kvstore.operator.device_kernel import Placement, describe, place
from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.patch import Patch, PatchKind, compose, form_patch
from kvstore.operator.rotary import RotaryScheme

BLOCK, BLOCKS = 16, 12
FORMATS = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
EXAMPLES = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # the interpreter is too slow to shrink
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def casts_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter's casts from fp32 round."""
    own = interpreter._convert_float

    def convert(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given != tl.float32 or wanted not in FORMATS:
            return own(numbers, given, wanted, rounding)
        dtype, bits = FORMATS[wanted]
        return torch.from_numpy(numbers.view("float32").copy()).to(dtype).view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@dataclass
class Pool:
    """Paged caches of all layers, [blocks, heads, block, 2 · width] or [blocks, block, features] (MLA)."""

    layout: Layout
    caches: list[Tensor]

    @classmethod
    def of(cls, layout: Layout, order: str, dtype: torch.dtype) -> Pool:
        """Empty pages in one of vLLM's orders: a block's heads or its tokens first, or a block's layers together."""
        heads, width = layout.segments[0].heads, layout.segments[0].width
        inner = [BLOCK, layout.features] if layout.family == "mla" else [heads, BLOCK, 2 * width]
        if layout.family == "gqa" and order == "NHD":
            whole = torch.zeros(layout.layers, BLOCKS, BLOCK, heads, 2 * width).transpose(2, 3)
        elif order == "BLHNC":
            whole = torch.zeros(BLOCKS, layout.layers, *inner).transpose(0, 1)
        else:
            whole = torch.zeros(layout.layers, BLOCKS, *inner)
        return cls(layout, list(whole.to(dtype).unbind(0)))

    def elements(self) -> Tensor:
        """[block, features]: the element of `cache[block].flatten()` that has a token's feature."""
        token = torch.arange(BLOCK)[:, None]
        if self.layout.family == "mla":
            return token * self.layout.features + torch.arange(self.layout.features)
        heads, width = self.layout.segments[0].heads, self.layout.segments[0].width
        segment, head, column = (torch.cartesian_prod(*map(torch.arange, (2, heads, width)))).unbind(1)
        return (head * BLOCK + token) * 2 * width + segment * width + column

    def read(self, slots: Tensor) -> Tensor:
        """[layers, tokens, features] fp32 of what the pages hold."""
        block, token = slots // BLOCK, slots % BLOCK
        rows = [cache[block].float().flatten(1) for cache in self.caches]
        elements = self.elements()[token]
        return torch.stack([row.gather(1, elements) for row in rows])


def patch_of(kind: str, layout: Layout, tokens: int, seed: int, dtype: torch.dtype) -> Patch | None:
    """A patch of each kind that the library stores, or of which links make sums."""
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(layout.layers, tokens, layout.features, generator=generator) for _ in range(3)]
    if kind == "none":
        return None
    if kind == "spread int8":
        return form_patch(deltas[0], layout, 5, dtype=torch.int8, spread=True)
    if kind == "deep, model's dtype":
        return form_patch(deltas[0], layout, 4, depth=0.5, dtype=dtype)
    if kind == "full rank":
        return form_patch(deltas[0], layout)
    if kind == "shared basis":
        basis = pool_basis([form_patch(delta, layout) for delta in deltas], 4)
        return form_patch(deltas[0], layout, 4, dtype=torch.int8, basis=basis).bind(basis)
    parts = [form_patch(delta, layout, 3, dtype=torch.int8) for delta in deltas]
    summed = compose(parts[:2], 0.5, parts[2])
    weights = torch.rand(layout.layers, tokens, generator=generator) + 0.5
    return replace(summed, segments=tuple(part.weighted(weights) for part in summed.segments))


KINDS = ("none", "spread int8", "deep, model's dtype", "full rank", "shared basis", "weighted sum")
LAYOUTS = {
    "neox": Layout.gqa(2, 2, 32, RotaryScheme.from_base(32)),
    "interleaved": Layout.gqa(2, 1, 32, RotaryScheme.from_base(32, style="interleaved")),
    "a head of 20, of which 12 rotate": Layout.gqa(3, 2, 20, RotaryScheme.from_base(12)),
    "mla": Layout.mla(2, 64, 16, RotaryScheme.from_base(16, style="interleaved")),
}
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
          (torch.bfloat16, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2))  # fmt: skip


def unit(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    """Distance of neighbouring numbers of a dtype, there."""
    facts = torch.finfo(dtype)
    return facts.eps * torch.exp2(numbers.abs().clamp_min(facts.smallest_normal).log2().floor())


def launched(pool: Pool, chunks: Sequence[Placement], dtype: torch.dtype) -> None:
    pages = PageTable.of(pool.caches, pool.elements(), pool.layout)
    assert pages is not None
    descriptor = describe(chunks, pool.layout, dtype)
    place(descriptor, descriptor.words, pages, pool.layout, dtype)


ORDERS = ("HND", "NHD", "BLHNC")


@EXAMPLES
@given(
    family=st.sampled_from(sorted(LAYOUTS)),
    order=st.sampled_from(ORDERS),
    dtypes=st.sampled_from(DTYPES),
    chunks=st.lists(
        st.tuples(st.integers(1, 40), st.integers(-3, 30_000), st.sampled_from(KINDS)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 1000),
)
def test_one_launch_equals_the_operator(
    family: str,
    order: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    chunks: list[tuple[int, int, str]],
    seed: int,
) -> None:
    equals_the_operator(LAYOUTS[family], order, dtypes, chunks, seed)


@pytest.mark.parametrize(("number", "pair"), enumerate(product(sorted(LAYOUTS), DTYPES)))
def test_every_layout_is_placed_in_every_dtype(number: int, pair: tuple[str, tuple[torch.dtype, torch.dtype]]) -> None:
    """In each order of pages and with each kind of patch by turns."""
    kinds = (KINDS[number % len(KINDS)], KINDS[(number + 3) % len(KINDS)])
    chunks = [(17 + number, 40 * number, kinds[0]), (5, -3, kinds[1])]
    equals_the_operator(LAYOUTS[pair[0]], ORDERS[number % len(ORDERS)], pair[1], chunks, number)


def equals_the_operator(
    layout: Layout,
    order: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    chunks: list[tuple[int, int, str]],
    seed: int,
) -> None:
    """One launch writes what the operator computes, and touches nothing else."""
    dtype, paged = dtypes
    generator = torch.Generator().manual_seed(seed)
    pool = Pool.of(layout, order, paged)
    free = torch.randperm((BLOCKS - 1) * BLOCK, generator=generator) + BLOCK
    placements, wanted = [], []
    for number, (tokens, delta, kind) in enumerate(chunks):
        record = torch.randn(layout.layers, tokens + 1, layout.features + 8, generator=generator).to(dtype)
        kv = record[:, 1:, : layout.features]  # strided as in a file
        patch = patch_of(kind, layout, tokens, seed + number, dtype)
        slots, free = free[:tokens], free[tokens:]
        placements.append(Placement(kv, patch, delta, slots))
        wanted.append(torch.empty(kv.shape, dtype=dtype))
        _apply_by_layer(kv, patch, delta, layout, wanted[-1])
    launched(pool, placements, dtype)
    for chunk, expected in zip(placements, wanted, strict=True):
        found, expected = pool.read(chunk.slots), expected.to(paged).float()
        if chunk.patch is None and chunk.delta == 0 and paged == dtype:
            assert torch.equal(found, expected)
            continue
        allowed = unit(paged, expected) if dtype != torch.float32 else 2e-6 * expected.abs().max()
        allowed = allowed + 2e-6 * expected.abs().max()  # another order of sums before the rounding
        excess = (found - expected).abs() - allowed
        assert excess.max() <= 0, (found.flatten()[excess.argmax()], expected.flatten()[excess.argmax()])
    assert not pool.read(free).any()


def test_every_kind_of_patch_goes_with_every_other() -> None:
    layout, dtype = LAYOUTS["mla"], torch.float32
    pool = Pool.of(layout, "HND", dtype)
    slots = torch.randperm((BLOCKS - 1) * BLOCK)[: 7 * len(KINDS)].view(-1, 7) + BLOCK
    kv = torch.randn(layout.layers, 7, layout.features)
    chunks = [Placement(kv, patch_of(kind, layout, 7, 3, dtype), 41, at) for kind, at in zip(KINDS, slots, strict=True)]
    launched(pool, chunks, dtype)
    for chunk in chunks:
        expected = torch.empty_like(kv)
        _apply_by_layer(kv, chunk.patch, 41, layout, expected)
        assert (pool.read(chunk.slots) - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_a_rank_writes_its_share_of_the_heads() -> None:
    whole = Layout.gqa(2, 4, 32, RotaryScheme.from_base(32))
    pool = Pool.of(Layout.gqa(2, 2, 32, whole.rotary), "NHD", torch.float32)
    share = whole.share(1, 2)
    pages = PageTable.of(pool.caches, pool.elements(), whole, 2, share)
    assert pages is not None
    kv, slots = torch.randn(2, 9, whole.features), torch.arange(20, 29)
    patch = patch_of("spread int8", whole, 9, 0, torch.float32)
    descriptor = describe([Placement(kv, patch, 5, slots)], whole, torch.float32)
    place(descriptor, descriptor.words, pages, whole, torch.float32)
    expected = torch.empty_like(kv)
    _apply_by_layer(kv, patch, 5, whole, expected)
    assert torch.allclose(pool.read(slots), expected[..., share], atol=1e-5)


def test_keys_that_lie_transposed_have_no_table() -> None:
    pool = Pool.of(LAYOUTS["neox"], "HND", torch.float32)
    elements = pool.elements()
    elements[:, :32] = elements[:, :32].flatten().view(32, BLOCK).t()
    assert PageTable.of(pool.caches, elements, pool.layout) is None


def test_what_the_kernel_cannot_read_is_refused() -> None:
    layout = LAYOUTS["neox"]
    kv, slots = torch.zeros(2, 5, layout.features), torch.arange(5)
    with pytest.raises(ShapeMismatch, match="4 slots"):
        describe([Placement(kv, None, 1, slots[:4])], layout, torch.float32)
    with pytest.raises(ShapeMismatch, match="side by side"):
        describe([Placement(kv.mT.contiguous().mT, None, 1, slots)], layout, torch.float32)
    factors = tuple(Directions.of(torch.zeros(2, 5, 1), torch.zeros(2, 64, 1)).to(torch.float16) for _ in range(2))
    with pytest.raises(ShapeMismatch, match="float16"):
        describe([Placement(kv, Patch(PatchKind.own, 1, factors, (1.0, 1.0)), 1, slots)], layout, torch.float32)
