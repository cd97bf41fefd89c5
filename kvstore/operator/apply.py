"""Application of the operator R(δ)·(KV + U Vᵀ), on the fused host kernel where it can be."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator import host_kernel
from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind
from kvstore.operator.rotary import rotate, turn_


def relocate(kv: Tensor, delta: int | float, layout: Layout, out: Tensor | None = None) -> Tensor:
    """R(delta) · KV, [layers, tokens, features]: exact relocation (kamera.md §3).

    `out` may be `kv` itself.
    """
    return apply(kv, None, delta, layout, out)


def turn(kv: Tensor, rotation: tuple[Tensor, Tensor], layout: Layout) -> None:
    """R · KV [..., features] in place.

    `rotation`: cos and sin (`RotaryScheme.rotation`), where KV lies.
    """
    for segment, part in zip(layout.segments, layout.split(kv), strict=True):
        if segment.rotary:
            turn_(part.unflatten(-1, (segment.heads, segment.width)), rotation, layout.rotary)


def deficit_at(kv: Tensor, canonical: Tensor, position: int | float, layout: Layout) -> Tensor:
    """Δ = R(-position)·KV(B|A) - KV(B|∅), [layers, tokens, features] fp32 (kamera.md eq. 2).

    For `kv` as it stands in a prompt, its first token at `position`. It is moved in fp32: rounded to bf16 on the way,
    the deficit would hold that error of every number, and a patch would spend its rank on it.
    """
    if kv.shape != canonical.shape:
        raise ShapeMismatch(f"KV in context {list(kv.shape)} and canonical {list(canonical.shape)} differ")
    moved = kv.to(torch.float32, copy=True)
    return relocate(moved, -position, layout, out=moved).sub_(canonical)


def relocate_patch(patch: Patch, delta: int | float, layout: Layout) -> Patch:
    """The patch in the frame moved by delta: R(delta)(U Vᵀ) = U (R(delta) V)ᵀ.

    Only V's columns rotate.

    For KV that was relocated before; `apply` rotates the sum instead, which costs nothing more.
    """
    patch.check_bound()
    moved = []
    for segment, part in zip(layout.segments, patch.segments, strict=True):
        if not segment.rotary:
            moved.append(part)
            continue
        assert part.right is not None
        heads = part.right.float().unflatten(-1, (segment.heads, segment.width))
        moved.append(replace(part, right=rotate(heads, delta, layout.rotary).flatten(-2)))
    return replace(patch, segments=tuple(moved), basis=None)


def apply(kv: Tensor, patch: Patch | None, delta: int | float, layout: Layout, out: Tensor | None = None) -> Tensor:
    """R(delta) · (KV + U Vᵀ), [layers, tokens, features], in fp32, rounded once to kv.dtype.

    `patch` None only relocates. `out`: any tensor of kv's shape and dtype, strided as the caller likes; it may be
    `kv` itself but must not otherwise overlap it. With no patch and delta = 0 the values are kv's, bit for bit.
    """
    layout.check(kv)
    if patch is not None:
        patch.check(kv, layout)
    if out is None:
        out = torch.empty_like(kv)
    elif out.shape != kv.shape or out.dtype != kv.dtype:
        raise ShapeMismatch(f"out is {out.dtype} {list(out.shape)}, expected {kv.dtype} {list(kv.shape)}")
    if patch is None and delta == 0:
        return out if out is kv else out.copy_(kv)
    if not host_kernel.apply(kv, patch, delta, layout, out):
        _apply_by_layer(kv, patch, delta, layout, out)
    return out


def warm_up(layout: Layout, dtype: torch.dtype) -> None:
    """Prepare `apply` for KV of this layout and dtype on the host.

    Compiling takes seconds, once per machine.
    """
    kv = torch.zeros(layout.layers, 1, layout.features, dtype=dtype)
    nothing = [
        Directions.of(torch.zeros(layout.layers, 1, 1), torch.zeros(layout.layers, segment.features, 1))
        for segment in layout.segments
    ]
    for factors in (torch.int8, torch.float32):  # compiled by themselves; no patch at all counts as int8
        segments = tuple(part.to(factors) for part in nothing)
        apply(kv, Patch(PatchKind.own, 1, segments, (0.0,) * len(segments)), 1, layout, out=kv)


def _apply_by_layer(kv: Tensor, patch: Patch | None, delta: int | float, layout: Layout, out: Tensor) -> None:
    """`apply` in plain torch, for any device: one layer's fp32 copy at a time stays in cache."""
    total = torch.empty(kv.shape[1:], dtype=torch.float32, device=kv.device)
    rotation = layout.rotary.rotation(delta, kv.device) if delta != 0 else None
    for layer in range(layout.layers):
        total.copy_(kv[layer])
        if patch is not None and layer >= patch.first_layer:
            for part, directions in zip(layout.split(total), patch.segments, strict=True):
                left, right = directions.factors_of(layer - patch.first_layer)
                part.addmm_(left.t(), right)
        if rotation is not None:
            turn(total, rotation, layout)
        out[layer].copy_(total)
