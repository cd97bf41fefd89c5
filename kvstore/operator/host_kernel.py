"""Fused host kernel of the operator: one pass reads, adds U Vᵀ, rotates and rounds.

The plain torch version (`kvstore.operator.patch`) passes over an fp32 copy several times. Compiled by numba on first
use (some seconds, then cached on disk), once for int8 factors and for no patch, once for all others:
`kvstore.operator.apply.warm_up` has that done before a request needs it. `apply` declines whatever it does not cover,
and everything where numba is missing, so callers keep the torch version; a kernel for device memory fits beside it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]

_STYLES = {"neox": 1, "interleaved": 2}
_THREAD_NUMBERS = 1 << 17  # a second thread must have at least this many numbers to work on
_NOTHING = Directions.of(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0)).to(torch.int8)


@cache
def _loops() -> Callable[..., None] | None:
    """The compiled loops, or None where numba cannot provide them."""
    try:
        from kvstore.operator.host_loops import patch_rows

        refuse_special_names(sys.modules["llvmlite.binding.ffi"].lib)
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba found no place for its cache
        logger.warning("KV on the host is patched by torch, more slowly: %s", error)
        return None
    return patch_rows


def refuse_special_names(handle: Any) -> None:
    """Make numba's LLVM handle refuse names like `__dict__`, as attribute look-up expects.

    It answers every name with a function; vLLM, which looks through all modules when an engine starts, fails on that.
    """
    kind: Any = type(handle)
    answer = kind.__getattr__

    def refusing(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    kind.__getattr__ = refusing


def apply(kv: Tensor, patch: Patch | None, delta: int | float, layout: Layout, out: Tensor) -> bool:
    """`kvstore.operator.apply.apply` for checked arguments.

    False, with nothing written, if not covered.

    Covers bf16 and fp32 in host memory whose features lie side by side.
    """
    on_host = kv.device.type == out.device.type == "cpu"
    if not on_host or kv.dtype not in (torch.bfloat16, torch.float32) or kv.shape[1] == 0:
        return False
    if kv.stride(2) != 1 or out.stride(2) != 1:
        return False
    loops = _loops()
    if loops is None:
        return False
    layers, tokens, features = kv.shape
    style = _STYLES[layout.rotary.style] if delta != 0 else 0
    segments = tuple(
        (place.start, segment.features, segment.width, style if segment.rotary else 0)
        for segment, place in zip(layout.segments, layout.slices().values(), strict=True)
    )
    parts = patch.segments if patch else (_NOTHING,) * len(segments)
    first_layer = patch.first_layer if patch else layers
    lefts, rights = _numbers(parts)
    scales = tuple(part.scale.numpy() for part in parts)
    starts = tuple(np.array(part.starts) for part in parts)
    cos, sin = (table.numpy() for table in layout.rotary.rotation(delta, "cpu"))
    strides = (kv.stride(0), kv.stride(1), out.stride(0), out.stride(1))
    shape, bf16 = (tokens, features), kv.dtype is torch.bfloat16
    weights, of = zip(*(_weights(part) for part in parts), strict=True)
    factors = (lefts, rights, scales, starts, weights, of, first_layer)
    arguments = (_flat(kv), _flat(out), bf16, strides, shape, *factors, segments, cos, sin)

    rows = layers * tokens
    threads = max(1, min(torch.get_num_threads(), kv.numel() // _THREAD_NUMBERS))
    bounds = [rows * part // threads for part in range(threads + 1)]
    others = [_pool().submit(loops, *arguments, *bounds[part : part + 2]) for part in range(1, threads)]
    loops(*arguments, *bounds[:2])
    for other in others:
        other.result()
    return True


@cache
def _pool() -> ThreadPoolExecutor:
    """Thread pool with as many threads as were ever busy at once."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvstore-apply")


def _flat(tensor: Tensor) -> Array:
    """All memory that the tensor spans, as one flat array of fp32 numbers or of bf16's bits."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = tensor.detach().as_strided((span,), (1,))
    return flat.numpy() if tensor.dtype is torch.float32 else flat.view(torch.uint16).numpy()


def _numbers(parts: Sequence[Directions]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Left and right factors as the loops take them: int8 if all of them are, else fp32."""
    sides = [part.left for part in parts], [part.right for part in parts if part.right is not None]
    narrow = {factor.dtype for side in sides for factor in side} == {torch.int8}
    left, right = (tuple((_bytes if narrow else _fp32)(factor) for factor in side) for side in sides)
    return left, right


def _weights(part: Directions) -> tuple[Array, Array]:
    """The tokens' weights [rows, tokens] and the row of each direction; no rows: all are 1."""
    if part.weights is None:
        return np.empty((0, 0), dtype=np.float32), np.empty(0, dtype=np.int64)
    return np.ascontiguousarray(part.weights.rows.numpy()), np.ascontiguousarray(part.weights.of.numpy())


def _bytes(factor: Tensor) -> Array:
    return np.ascontiguousarray(factor.detach().numpy())


def _fp32(factor: Tensor) -> Array:
    """A factor as fp32 numbers.

    By numpy: torch's threads would go on spinning on the cores that the loops need.
    """
    if factor.dtype is torch.bfloat16:
        bits = factor.detach().contiguous().view(torch.uint16).numpy().astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(factor.detach().numpy(), dtype=np.float32)
