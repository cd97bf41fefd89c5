"""Rotary position embedding as an operator: R(delta) moves keys from p to p + delta.

See kamera.md §3.

RoPE composes, R(a) R(b) = R(a + b), so moving a cached key needs the distance only, never the position. Angles are
computed in fp64 (delta reaches 10^5, the fastest frequency is 1 rad per position), the rotation in fp32, and the result
is rounded once to the tensor's dtype. M-RoPE shifts t, h and w of a chunk by the same delta, so one scalar serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvstore.errors import ShapeMismatch

RotaryStyle = Literal["neox", "interleaved"]


@dataclass(frozen=True)
class RotaryScheme:
    """Rotary layout: pairs of features that rotate together, and their frequencies.

    `inverse_frequencies`: radians per position, fp64, one per rotated pair (rotary_dim / 2 values).
    `style`: "neox" pairs feature i with i + rotary_dim/2; "interleaved" pairs 2i with 2i + 1.
    """

    inverse_frequencies: tuple[float, ...]
    style: RotaryStyle = "neox"

    def __post_init__(self) -> None:
        if not self.inverse_frequencies:
            raise ShapeMismatch("a rotary scheme needs at least one frequency")
        if self.style not in ("neox", "interleaved"):
            raise ShapeMismatch(f"unknown rotary style {self.style!r}")
        object.__setattr__(self, "inverse_frequencies", tuple(float(f) for f in self.inverse_frequencies))

    @classmethod
    def from_base(cls, rotary_dim: int, base: float = 10000.0, style: RotaryStyle = "neox") -> RotaryScheme:
        """The unscaled scheme: frequency i is base^(-2i / rotary_dim)."""
        return cls(tuple(base ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)), style)

    @property
    def rotary_dim(self) -> int:
        """Number of leading features of a head that rotate; any after them pass unchanged."""
        return 2 * len(self.inverse_frequencies)

    def rotation(self, delta: int | float, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `delta` positions: two fp32 tensors [rotary_dim / 2] on `device`."""
        angles = torch.tensor(self.inverse_frequencies, dtype=torch.float64) * delta
        return angles.cos().float().to(device), angles.sin().float().to(device)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two members of every rotated pair, as views [..., rotary_dim / 2] of x [..., width]."""
        half = len(self.inverse_frequencies)
        if x.shape[-1] < 2 * half:
            raise ShapeMismatch(f"head width {x.shape[-1]} is smaller than the rotary dimension {2 * half}")
        if self.style == "neox":
            return x[..., :half], x[..., half : 2 * half]
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def rotate(x: Tensor, delta: int | float, scheme: RotaryScheme, out: Tensor | None = None) -> Tensor:
    """R(delta) x for x [..., width], fp32 maths rounded once to x.dtype.

    With delta = 0 the values are x's, bit for bit.

    `out`: where to write, same shape and dtype; it may be x itself, but must not otherwise overlap x.
    """
    if out is None:
        out = torch.empty_like(x)
    elif out.shape != x.shape:
        raise ShapeMismatch(f"out has shape {tuple(out.shape)}, expected {tuple(x.shape)}")
    in_place = out is x or (out.data_ptr() == x.data_ptr() and out.stride() == x.stride())
    if delta == 0:
        return out if in_place else out.copy_(x)
    _turn(x, scheme.rotation(delta, x.device), scheme, out)
    if not in_place and x.shape[-1] > scheme.rotary_dim:
        out[..., scheme.rotary_dim :].copy_(x[..., scheme.rotary_dim :])
    return out


def turn_(x: Tensor, rotation: tuple[Tensor, Tensor], scheme: RotaryScheme) -> None:
    """R x in place, by cos and sin (`RotaryScheme.rotation`) that lie where x does."""
    _turn(x, rotation, scheme, x)


def _turn(x: Tensor, rotation: tuple[Tensor, Tensor], scheme: RotaryScheme, out: Tensor) -> None:
    cos, sin = rotation
    first, second = (member.float() for member in scheme.pairs(x))
    rotated_first = torch.mul(first, cos).addcmul_(second, sin, value=-1.0)
    rotated_second = torch.mul(second, cos).addcmul_(first, sin)
    out_first, out_second = scheme.pairs(out)
    out_first.copy_(rotated_first)
    out_second.copy_(rotated_second)


def turns_evenly(table: Tensor, frequencies: Tensor) -> bool:
    """True if a table [positions, rotary_dim] of cos, sin turns by a fixed angle per position.

    It may be multiplied by a constant, and is rounded to its dtype, its angles to fp32. `frequencies`: radians per
    position, fp64.
    """
    scale = float(table[0, 0])  # cos(0)
    angles = torch.arange(len(table), dtype=torch.float64)[:, None] * frequencies
    exact = scale * torch.cat((angles.cos(), angles.sin()), dim=-1)
    allowed = abs(scale) * (torch.finfo(table.dtype).eps + 2 * angles.abs().max() * 2.0**-24)
    return table.shape == exact.shape and bool((table.double() - exact).abs().max() <= allowed)
