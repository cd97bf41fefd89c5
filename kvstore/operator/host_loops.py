"""Numba loops of `kvstore.operator.host_kernel`, compiled once and cached on disk.

Importing them needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_CONTRACT = ("contract",)
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": set(_CONTRACT), "error_model": "numpy"}
_ROWS = 8  # in flight: so many share one read of the basis, which with the rows fills the first-level cache
_ROWS_UNPATCHED = 4
_LANES = 16  # one AVX-512 register; the compiler splits it for narrower ones


@njit(**_OPTIONS)
def load(row: Any, values: Any, bf16: bool) -> None:
    """values = row in fp32; bf16 comes as its bits."""
    if bf16:
        bits = values.view(np.uint32)
        for f in range(row.size):
            bits[f] = np.uint32(row[f]) << np.uint32(16)
    else:
        for f in range(row.size):
            values[f] = row[f]


@njit(**_OPTIONS)
def store(values: Any, row: Any, bf16: bool) -> None:
    """row = values, rounded to nearest even; a NaN stays a NaN."""
    if bf16:
        bits = values.view(np.uint32)
        for f in range(row.size):
            b = bits[f]
            rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            if values[f] != values[f]:
                rounded = np.uint32(0x7FC0)
            row[f] = np.uint16(rounded)
    else:
        for f in range(row.size):
            row[f] = values[f]


@njit(**_OPTIONS)
def rotate(values: Any, width: int, style: int, cos: Any, sin: Any) -> None:
    """R(delta) on every head; style 1 pairs i with i + half, style 2 pairs 2i with 2i + 1."""
    half = cos.size
    for head in range(values.size // width):
        row = values[head * width : (head + 1) * width]
        if style == 1:
            first, second = row[:half], row[half : 2 * half]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * cos[i] - b * sin[i]
                second[i] = b * cos[i] + a * sin[i]
        else:
            for i in range(half):
                a, b = row[2 * i], row[2 * i + 1]
                row[2 * i] = a * cos[i] - b * sin[i]
                row[2 * i + 1] = b * cos[i] + a * sin[i]


@intrinsic
def _add_lanes(
    typing: Any,
    values: Any,
    row: Any,
    left: Any,
    basis: Any,
    basis_stride: Any,
    count: Any,
    rank: Any,
) -> Any:
    """values [8, count] += leftᵀ [8, rank] · basis [rank, count], by addresses and strides.

    `count` is a multiple of 16. Written as vector instructions, because the sums must stay in registers over all ranks:
    what numba makes of the same loops reloads them every time and takes twice as long (2.5 against 5.0 ms on one core
    for 16,384 tokens of 512 features, rank 16; 2.4 ms is what its multiply-add units allow).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, row, left, basis, basis_stride, count, rank = arguments
        number, index = ir.FloatType(), values.type
        lanes = ir.VectorType(number, _LANES)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        nothing = ir.Constant(lanes, ir.Undefined)

        def place(base: Any, line: Any, stride: Any, column: Any, kind: Any) -> Any:
            offset = builder.add(builder.mul(line, stride), column)
            return builder.inttoptr(builder.add(base, builder.mul(offset, index(4))), kind.as_pointer())

        with cgutils.for_range_slice(builder, index(0), count, index(_LANES), index) as (f, _):
            targets = [place(values, index(t), row, f, lanes) for t in range(_ROWS)]
            sums = [cgutils.alloca_once(builder, lanes) for _ in range(_ROWS)]
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(target, align=4), total)
            with cgutils.for_range(builder, rank) as loop:
                direction = builder.load(place(basis, loop.index, basis_stride, f, lanes), align=4)
                for t, total in enumerate(sums):
                    coefficient = builder.load(place(left, loop.index, index(_ROWS), index(t), number), align=4)
                    first = builder.insert_element(nothing, coefficient, ir.IntType(32)(0))
                    term = builder.fmul(builder.shuffle_vector(first, nothing, everywhere), direction, flags=_CONTRACT)
                    builder.store(builder.fadd(builder.load(total), term, flags=_CONTRACT), total)
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(total), target, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), generate


@njit(**_OPTIONS)
def unfold(right: Any, scale: Any, basis: Any) -> None:
    """basis [rank, features] = a layer's right factors in fp32, each with its direction's scale."""
    for r in range(right.shape[0]):
        for f in range(right.shape[1]):
            basis[r, f] = right[r, f] * scale[r]


@njit(**_OPTIONS)
def gather(left: Any, rows: Any, of: Any, token: int, count: int, coefficients: Any) -> None:
    """coefficients [rank, 8] = a layer's left factors in fp32, of `count` tokens from `token`.

    rows, of: see `kvstore.operator.directions.TokenWeights`; no rows: every weight is 1.
    """
    for r in range(left.shape[0]):
        if count == _ROWS:  # a constant, so that the compiler takes them at once
            for t in range(_ROWS):
                coefficients[r, t] = left[r, token + t]
        else:
            for t in range(count):
                coefficients[r, t] = left[r, token + t]
    if rows.shape[0]:
        for r in range(left.shape[0]):
            weights = rows[of[r]]
            for t in range(count):
                coefficients[r, t] *= weights[token + t]


@njit(**_OPTIONS)
def add(values: Any, start: int, coefficients: Any, basis: Any, rank: int) -> None:
    """values[:, start : start + features] += coefficientsᵀ [8, :rank] · basis [:rank, features]."""
    count = basis.shape[1]
    whole = count - count % _LANES
    _add_lanes(
        values[0, start:].ctypes.data,
        values.shape[1],
        coefficients.ctypes.data,
        basis.ctypes.data,
        count,
        whole,
        rank,
    )
    for t in range(_ROWS):
        for r in range(rank):
            for f in range(whole, count):
                values[t, start + f] += coefficients[r, t] * basis[r, f]


@njit(**_OPTIONS)
def patch_rows(
    source: Any,
    target: Any,
    bf16: bool,
    strides: Any,
    shape: Any,
    lefts: Any,
    rights: Any,
    scales: Any,
    starts: Any,
    rows: Any,
    of: Any,
    first_layer: int,
    segments: Any,
    cos: Any,
    sin: Any,
    begin: int,
    end: int,
) -> None:
    """Rows `begin` to `end` of the layers · tokens rows, read, patched, rotated and written.

    source, target: flat memory; strides: (layer, token) of each, in numbers; shape: (tokens, features);
    lefts, rights, scales, starts, rows, of: per segment, as in `kvstore.operator.directions`, factors in int8 or fp32;
    segments: (first feature, features, head width, rotary style or 0).
    """
    tokens, features = shape
    values = np.zeros((_ROWS, features), dtype=np.float32)
    widest = 0
    for index in range(len(segments)):
        for at in range(starts[index].size - 1):
            widest = max(widest, starts[index][at + 1] - starts[index][at])
    bases = np.empty((widest, features), dtype=np.float32)  # of the layer `unfolded`, one segment behind the other
    coefficients = np.zeros((widest, _ROWS), dtype=np.float32)
    unfolded = -1
    row = begin
    while row < end:
        layer, token = row // tokens, row % tokens
        patched = layer >= first_layer
        block = min(_ROWS if patched else _ROWS_UNPATCHED, end - row, tokens - token)
        for t in range(block):
            base = layer * strides[0] + (token + t) * strides[1]
            load(source[base : base + features], values[t], bf16)
        for index in range(len(segments)):
            start, count, width, style = segments[index]
            if patched:
                # Fewer rows are patched as if they were all there; the others are not stored.
                first, last = starts[index][layer - first_layer], starts[index][layer - first_layer + 1]
                basis = bases.reshape(-1)[start * widest : (start + count) * widest].reshape(widest, count)
                if layer != unfolded:
                    unfold(rights[index][first:last], scales[index][first:last], basis)
                at = of[index][first:last]
                gather(lefts[index][first:last], rows[index], at, token, block, coefficients)
                add(values, start, coefficients, basis, last - first)
            if style != 0:
                for t in range(block):
                    rotate(values[t, start : start + count], width, style, cos, sin)
        if patched:
            unfolded = layer
        for t in range(block):
            base = layer * strides[2] + (token + t) * strides[3]
            store(values[t], target[base : base + features], bf16)
        row += block
