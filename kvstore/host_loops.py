"""The compiled loops of `kvstore.host_kernel`; importing this module needs numba. Compiled once, cached on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": {"contract"}, "error_model": "numpy"}
_ROWS = 4  # in flight: with 512 features 8 KiB, a quarter of a core's first-level cache


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


@njit(**_OPTIONS)
def add(a: Any, b: Any, x: Any, y: Any, basis: Any) -> None:
    """a += x basis and b += y basis: two tokens share each read of the basis, eight ranks at a time.

    More of either no longer vectorises: the compiler gives up on proving that the rows do not overlap.
    """
    for r in range(0, basis.shape[0], 8):
        rows = basis[r : r + 8]
        x0, x1, x2, x3, x4, x5, x6, x7 = x[r], x[r + 1], x[r + 2], x[r + 3], x[r + 4], x[r + 5], x[r + 6], x[r + 7]
        y0, y1, y2, y3, y4, y5, y6, y7 = y[r], y[r + 1], y[r + 2], y[r + 3], y[r + 4], y[r + 5], y[r + 6], y[r + 7]
        for f in range(a.size):
            p, q = a[f], b[f]
            w0 = rows[0, f]
            p += x0 * w0
            q += y0 * w0
            w1 = rows[1, f]
            p += x1 * w1
            q += y1 * w1
            w2 = rows[2, f]
            p += x2 * w2
            q += y2 * w2
            w3 = rows[3, f]
            p += x3 * w3
            q += y3 * w3
            w4 = rows[4, f]
            p += x4 * w4
            q += y4 * w4
            w5 = rows[5, f]
            p += x5 * w5
            q += y5 * w5
            w6 = rows[6, f]
            p += x6 * w6
            q += y6 * w6
            w7 = rows[7, f]
            p += x7 * w7
            q += y7 * w7
            a[f], b[f] = p, q


@njit(**_OPTIONS)
def patch_rows(
    source: Any,
    target: Any,
    bf16: bool,
    strides: Any,
    shape: Any,
    lefts: Any,
    rights: Any,
    first_layer: int,
    segments: Any,
    cos: Any,
    sin: Any,
    begin: int,
    end: int,
) -> None:
    """Rows `begin` to `end` of the layers · tokens rows, read, patched, rotated and written.

    source, target: flat memory; strides: (layer, token) of each, in numbers; shape: (tokens, features);
    lefts, rights: per segment [layers, tokens + 1, rank] and [layers, rank, features_s], the rank a multiple of 8;
    segments: (first feature, features, head width, rotary style or 0).
    """
    tokens, features = shape
    values = np.empty((_ROWS + 1, features), dtype=np.float32)
    row = begin
    while row < end:
        layer, token = row // tokens, row % tokens
        block = min(_ROWS, end - row, tokens - token)
        for t in range(block):
            base = layer * strides[0] + (token + t) * strides[1]
            load(source[base : base + features], values[t], bf16)
        for index in range(len(segments)):
            start, count, width, style = segments[index]
            if layer >= first_layer:
                left, right = lefts[index][layer - first_layer], rights[index][layer - first_layer]
                # A lone last token is added as one of two: `left` has a row, `values` a scratch row, to spare.
                for t in range(0, block, 2):
                    a, b = values[t, start : start + count], values[t + 1, start : start + count]
                    add(a, b, left[token + t], left[token + t + 1], right)
            if style != 0:
                for t in range(block):
                    rotate(values[t, start : start + count], width, style, cos, sin)
        for t in range(block):
            base = layer * strides[2] + (token + t) * strides[3]
            store(values[t], target[base : base + features], bf16)
        row += block
