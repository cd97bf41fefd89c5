"""Triton kernel of `kvstore.operator.device_kernel`.

Importing it needs Triton. With TRITON_INTERPRET=1 set before that, it runs on the host, as in the tests; the
interpreter truncates to bf16 where a GPU rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a chunk's row in the descriptor (`device_kernel.describe`), and behind them of each of its two segments.
CHUNK_WORDS, SEGMENT_WORDS = 7, 11
INT8, FP32, MODEL = 0, 1, 2  # kinds of factors; MODEL: of the KV's dtype

_CHUNK = tl.constexpr(CHUNK_WORDS)
_SEGMENT = tl.constexpr(SEGMENT_WORDS)
_ROW = tl.constexpr(CHUNK_WORDS + 2 * SEGMENT_WORDS)
_INT8 = tl.constexpr(INT8)
_FP32 = tl.constexpr(FP32)


@triton.jit
def _numbers(address, at, mask, kind, MODEL_TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors in fp32, whatever they are stored as."""
    if kind == _INT8:
        found = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask=mask, other=0).to(tl.float32)
    elif kind == _FP32:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0)
    else:
        found = tl.load(address.to(tl.pointer_type(MODEL_TYPE)) + at, mask=mask, other=0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["work", "slots"])
def place_chunks(  # type: ignore[no-untyped-def]
    words,  # int64: the descriptor (`device_kernel.describe`)
    angles,  # the same memory as fp32
    work,  # where in it the work list [items, 2] begins: chunk, first token
    slots,  # and the slots of all chunks' tokens
    pages,  # int64 [layers]: address of each layer's cache
    columns,  # int64 [columns, 3]: feature of the KV, of its segment, element of a block, where `WIDTH` of them begin
    block_stride,
    token_stride,
    block_size,
    FIRST: tl.constexpr,  # columns of the first segment
    ROTARY: tl.constexpr,  # bit s: segment s rotates
    WIDTH: tl.constexpr,  # features of a column
    PAIRS: tl.constexpr,  # pairs of them that rotate
    INTERLEAVED: tl.constexpr,
    KV_TYPE: tl.constexpr,
    PAGE_TYPE: tl.constexpr,
    LIMIT: tl.constexpr,  # largest number of quantised pages; 0: pages are of the KV's dtype
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,  # columns begin at multiples of 16 bytes, in KV and in pages
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One column of one layer for `TOKENS` tokens: load, add U Vᵀ, rotate, round, scatter.

    The two members of a pair that rotates lie in two tiles, [TOKENS, LANES] each. Features that do not rotate are dealt
    out to both.
    """
    item, column, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segment = (column >= FIRST).to(tl.int32)
    row = words + tl.load(words + work + 2 * item) * _ROW
    t = tl.load(words + work + 2 * item + 1) + tl.arange(0, TOKENS)
    live = t < tl.load(row + 4)

    lane = tl.arange(0, LANES)
    half: tl.constexpr = WIDTH // 2
    if INTERLEAVED:
        one, two = 2 * lane, 2 * lane + 1
    else:
        one, two = lane, lane + PAIRS
    if half > PAIRS:
        rest = lane - PAIRS  # lanes behind the pairs
        one = tl.where(rest < 0, one, 2 * PAIRS + rest)
        two = tl.where(rest < 0, two, PAIRS + half + rest)
    there = live[:, None] & (lane < half)[None, :]

    kv = tl.load(row).to(tl.pointer_type(KV_TYPE)) + layer * tl.load(row + 1) + tl.load(columns + 3 * column)
    kv_token = tl.load(row + 2)
    if ALIGNED:
        kv, kv_token = tl.multiple_of(kv, 16), tl.multiple_of(kv_token, 8)
    kv = kv + t[:, None] * kv_token
    a = tl.load(kv + one[None, :], mask=there, other=0).to(tl.float32)
    b = tl.load(kv + two[None, :], mask=there, other=0).to(tl.float32)

    patched = layer - tl.load(row + 5)
    if patched >= 0:
        factors = row + _CHUNK + segment * _SEGMENT
        starts = words + tl.load(factors + 7) + patched
        stop = tl.load(starts + 1)
        left, left_row, left_kind = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
        right, right_row, right_kind = tl.load(factors + 3), tl.load(factors + 4), tl.load(factors + 5)
        scale = tl.load(factors + 6).to(tl.pointer_type(tl.float32))
        weights, weights_row = tl.load(factors + 8), tl.load(factors + 9)
        feature = tl.load(columns + 3 * column + 1)
        for first in range(tl.load(starts), stop, RANKS):
            r = first + tl.arange(0, RANKS)
            on = r < stop
            wanted = on[None, :] & live[:, None]
            u = _numbers(left, r[None, :] * left_row + t[:, None], wanted, left_kind, KV_TYPE)
            u = u * tl.load(scale + r, mask=on, other=0)[None, :]
            if weights != 0:
                of = tl.load(tl.load(factors + 10).to(tl.pointer_type(tl.int64)) + r, mask=on, other=0)
                weight = weights.to(tl.pointer_type(tl.float32)) + of[None, :] * weights_row + t[:, None]
                u = u * tl.load(weight, mask=wanted, other=0)
            at = r[:, None] * right_row + feature
            wanted = on[:, None] & (lane < half)[None, :]
            v = _numbers(right, at + one[None, :], wanted, right_kind, KV_TYPE)
            a = tl.dot(u, v, a, input_precision=PRECISION)
            v = _numbers(right, at + two[None, :], wanted, right_kind, KV_TYPE)
            b = tl.dot(u, v, b, input_precision=PRECISION)

    turn = tl.load(row + 6)
    if (turn >= 0) & (((ROTARY >> segment) & 1) != 0):
        turning = lane < PAIRS
        cos = tl.load(angles + 2 * turn + lane, mask=turning, other=1.0)[None, :]
        sin = tl.load(angles + 2 * turn + PAIRS + lane, mask=turning, other=0.0)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned

    slot = tl.load(words + slots + tl.load(row + 3) + t, mask=live, other=0)
    page = tl.load(pages + layer).to(tl.pointer_type(PAGE_TYPE)) + tl.load(columns + 3 * column + 2)
    offset = (slot // block_size) * block_stride + (slot % block_size) * token_stride
    if ALIGNED:
        page, offset = tl.multiple_of(page, 16), tl.multiple_of(offset, 16)
    page = page + offset[:, None]
    a, b = a.to(KV_TYPE), b.to(KV_TYPE)
    if LIMIT > 0:  # as the engine quantises: what the model's dtype has, without overflow
        a, b = a.to(tl.float32), b.to(tl.float32)
        a = tl.where(a > LIMIT, LIMIT, tl.where(a < -LIMIT, -LIMIT, a))
        b = tl.where(b > LIMIT, LIMIT, tl.where(b < -LIMIT, -LIMIT, b))
    tl.store(page + one[None, :], a.to(PAGE_TYPE), mask=there)
    tl.store(page + two[None, :], b.to(PAGE_TYPE), mask=there)
