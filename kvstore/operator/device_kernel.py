"""The operator on a device: one Triton kernel writes all chunks of a link into pages.

`place` does for all layers of all chunks what `apply` and a cache's own update do for one: load canonical KV, add U Vᵀ,
rotate, round once, scatter (kamera.md eq. 1). Everything that it must know of the chunks goes to the device in one
buffer of 64-bit words, the descriptor:

| words            | of each chunk, work item or token                                                           |
|------------------|---------------------------------------------------------------------------------------------|
| rows             | addresses and strides of KV, factors, scales and token weights                              |
| starts           | per segment, where each layer's directions begin                                            |
| angles           | cos and sin of the chunk's distance, fp32                                                   |
| work list        | (chunk, first token) of each tile                                                           |
| slots            | where each token goes                                                                       |

so that a link is one copy and one launch, however many chunks it has. Tested in Triton's interpreter against
`kvstore.operator.apply`; it has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.patch import Patch

_TOKENS = 32  # of a tile
_RANKS = 16  # directions of one matrix product
_WARPS = 8  # with 4, registers spill on sm_90
_ALIGNMENT = 16  # bytes of the widest load and store


class Placement(NamedTuple):
    """Canonical KV of a chunk, and where it goes.

    `kv`: [layers, tokens, features], in the device's memory, features side by side; `patch` is there too, bound.
    `delta`: distance in positions; `slots`: [tokens] int64, on the host. `kv_lasts`, `patch_lasts`: it is a record's
    own object, which later links bring again: a copy of it may serve them too.
    """

    kv: Tensor
    patch: Patch | None
    delta: int | float
    slots: Tensor
    kv_lasts: bool = False
    patch_lasts: bool = False


@dataclass(frozen=True)
class Descriptor:
    """Description of one launch, as 64-bit words on the host.

    `work`, `slots`: where the work list and the slots begin; `items`: of the work list; `is_aligned`: KV can be loaded
    16 bytes at a time.
    """

    words: Tensor
    work: int
    slots: int
    items: int
    is_aligned: bool


@cache
def is_available() -> bool:
    """True if Triton can be imported."""
    try:
        import kvstore.operator.device_loops  # noqa: F401
    except ImportError:
        return False
    return True


def may_store(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """True if Triton compiles stores of a number format for GPUs of a capability."""
    return dtype != torch.float8_e4m3fn or capability >= (8, 9)


def describe(chunks: Sequence[Placement], layout: Layout, dtype: torch.dtype) -> Descriptor:
    """The descriptor of one launch.

    Raises:
        ShapeMismatch: KV of another dtype or layout, a patch that does not fit, or features that do not lie side by
            side.
    """
    from kvstore.operator.device_loops import CHUNK_WORDS, SEGMENT_WORDS

    pairs = layout.rotary.rotary_dim // 2
    turns = [torch.cat(layout.rotary.rotation(chunk.delta, "cpu")) for chunk in chunks if chunk.delta != 0]
    angles = len(chunks) * (CHUNK_WORDS + len(layout.segments) * SEGMENT_WORDS)
    tables = angles + len(turns) * pairs
    rows, starts, tokens = list[int](), list[int](), 0
    for chunk in chunks:
        _check(chunk, layout, dtype)
        first_layer = layout.layers if chunk.patch is None else chunk.patch.first_layer
        turn = angles if chunk.delta != 0 else -1
        rows += [chunk.kv.data_ptr(), *chunk.kv.stride()[:2], tokens, len(chunk.slots), first_layer, turn]
        for part in (None,) * len(layout.segments) if chunk.patch is None else chunk.patch.segments:
            if part is None:
                rows += [0] * SEGMENT_WORDS
            else:
                rows += _segment_row(part, tables + len(starts), dtype)
                starts += part.starts
        tokens += len(chunk.slots)
        angles += pairs if chunk.delta != 0 else 0
    tiles = [
        torch.stack([torch.full((len(at),), number), at], dim=1).flatten()
        for number, at in enumerate(torch.arange(0, len(chunk.slots), _TOKENS) for chunk in chunks)
    ]
    work, items = tables + len(starts), sum(map(len, tiles)) // 2
    parts = [torch.tensor(rows), *(turn.view(torch.int64) for turn in turns), torch.tensor(starts, dtype=torch.int64)]
    words = torch.cat([*parts, *tiles, *(chunk.slots for chunk in chunks)])
    return Descriptor(words, work, work + 2 * items, items, all(_is_aligned(chunk.kv) for chunk in chunks))


def place(descriptor: Descriptor, words: Tensor, pages: PageTable, layout: Layout, dtype: torch.dtype) -> None:
    """Launch the kernel: relocate, patch and write the described chunks, all layers.

    Args:
        words: the descriptor's words on the device.
        dtype: of the chunks' KV. Pages of another dtype are quantised, after rounding to this one.
    """
    from kvstore.operator.device_loops import place_chunks

    if not descriptor.items:
        return
    kernel: Any = place_chunks
    kernel[(descriptor.items, len(pages.columns), layout.layers)](
        words,
        words.view(torch.float32),
        descriptor.work,
        descriptor.slots,
        pages.addresses,
        pages.columns,
        pages.block_stride,
        pages.token_stride,
        pages.block_size,
        **constants(pages, layout, dtype, is_aligned=descriptor.is_aligned),
    )


def constants(pages: PageTable, layout: Layout, dtype: torch.dtype, *, is_aligned: bool) -> dict[str, Any]:
    """Compile-time arguments of the kernel; `is_aligned`: see `Descriptor`."""
    return {
        "FIRST": pages.first,
        "ROTARY": sum(1 << index for index, segment in enumerate(layout.segments) if segment.rotary),
        "WIDTH": pages.width,
        "PAIRS": layout.rotary.rotary_dim // 2,
        "INTERLEAVED": layout.rotary.style == "interleaved",
        "KV_TYPE": _triton_type(dtype),
        "PAGE_TYPE": _triton_type(pages.dtype),
        "LIMIT": torch.finfo(pages.dtype).max if pages.dtype != dtype else 0.0,
        # of three TF32 products the sum has all but fp32's last bits, and tensor cores are some 10 times as fast
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32x3",
        "ALIGNED": is_aligned and pages.is_aligned,
        "TOKENS": _TOKENS,
        "RANKS": _RANKS,
        "LANES": max(16, 1 << (pages.width // 2 - 1).bit_length()),
        "num_warps": _WARPS,
    }


def _check(chunk: Placement, layout: Layout, dtype: torch.dtype) -> None:
    layout.check(chunk.kv)
    if chunk.patch is not None:
        chunk.patch.check(chunk.kv, layout)
    if chunk.kv.dtype != dtype or chunk.kv.shape[1] != len(chunk.slots):
        raise ShapeMismatch(
            f"KV {chunk.kv.dtype} {list(chunk.kv.shape)} does not go to {len(chunk.slots)} slots of a {dtype} model"
        )
    if chunk.kv.stride(2) != 1:
        raise ShapeMismatch("KV is placed from tensors whose features lie side by side")


def _is_aligned(kv: Tensor) -> bool:
    strides = (stride * kv.itemsize % _ALIGNMENT == 0 and stride % 8 == 0 for stride in kv.stride()[:2])
    return kv.data_ptr() % _ALIGNMENT == 0 and all(strides)


def _segment_row(part: Directions, starts: int, dtype: torch.dtype) -> list[int]:
    """A segment's words of a chunk's row."""
    assert part.right is not None
    sides = [word for side in (part.left, part.right) for word in _side(side, dtype)]
    weights = (0, 0, 0)
    if part.weights is not None:
        rows, of = part.weights
        weights = (rows.data_ptr(), rows.stride(0), of.data_ptr())
    return [*sides, part.scale.data_ptr(), starts, *weights]


def _side(factor: Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Address, row stride and kind of a factor."""
    from kvstore.operator.device_loops import FP32, INT8, MODEL

    kinds = {torch.int8: INT8, torch.float32: FP32, dtype: MODEL}
    if factor.dtype not in kinds or factor.stride(1) != 1:
        raise ShapeMismatch(f"factors {factor.dtype} with strides {factor.stride()} cannot be added to {dtype} KV")
    return factor.data_ptr(), factor.stride(0), kinds[factor.dtype]


@cache
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
    }[dtype]
