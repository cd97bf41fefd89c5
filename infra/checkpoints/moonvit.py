"""Kimi-VL's vision tower (MoonViT) and projector in plain torch, to train and save.

Parameters have the names that vLLM's loader knows. Pictures of one size come as patches, row by row, and their grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infra.checkpoints.kimi_vl import HEADS, POSITIONS

_THETA = 10000.0


class _Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(POSITIONS, POSITIONS, width))

    def forward(self, grid: Sequence[int]) -> Tensor:
        if tuple(grid) == (POSITIONS, POSITIONS):
            return self.weight.flatten(0, 1)
        table = self.weight.permute(2, 0, 1)[None]
        return F.interpolate(table, size=tuple(grid), mode="bicubic")[0].permute(1, 2, 0).flatten(0, 1)


class _PatchEmbed(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)
        self.pos_emb = _Positions(width)

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        pictures = patches.shape[:-3]
        return self.proj(patches.flatten(0, -4)).view(*pictures, -1) + self.pos_emb(grid)


class _Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(hidden), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _Perceptron(width)

    def forward(self, hidden: Tensor, phases: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.norm0(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k = (_turned(part, phases).transpose(-3, -2) for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v.transpose(-3, -2)).transpose(-3, -2).flatten(-2)
        hidden = hidden + self.wo(attended)
        return hidden + self.mlp(self.norm1(hidden))


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.final_layernorm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, phases: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, phases)
        return self.final_layernorm(hidden)


class MoonViT(nn.Module):
    """Pictures' patches to features, one row a patch."""

    def __init__(self, width: int, depth: int, patch: int) -> None:
        super().__init__()
        self.width = width
        self.patch_embed = _PatchEmbed(width, patch)
        self.encoder = _Encoder(width, depth)

    def forward(self, patches: Tensor, grid: Sequence[int]) -> Tensor:
        """Features [..., patches, width] of a (rows, columns) grid's patches.

        `patches`: [..., patches, 3, size, size].
        """
        return self.encoder(self.patch_embed(patches, grid), phases(grid, self.width // HEADS).to(patches.device))


class Projector(nn.Module):
    """`merge` x `merge` neighbouring patches to one embedding of the language model."""

    def __init__(self, width: int, hidden: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        merged = width * merge**2
        self.pre_norm = nn.LayerNorm(width, eps=1e-5)
        self.linear_1, self.linear_2 = nn.Linear(merged, merged), nn.Linear(merged, hidden)

    def forward(self, features: Tensor, grid: Sequence[int]) -> Tensor:
        """Embeddings [..., tokens, hidden] of pictures' features [..., patches, width]."""
        rows, columns = (size // self.merge for size in grid)
        cells = self.pre_norm(features).unflatten(-2, (rows, self.merge, columns, self.merge)).transpose(-4, -3)
        return self.linear_2(F.gelu(self.linear_1(cells.flatten(-5, -4).flatten(-3))))


def phases(grid: Sequence[int], head: int) -> Tensor:
    """Rotary angles [patches, head / 2] of a grid: by column in even places, by row in odd ones."""
    frequencies = _THETA ** -(torch.arange(0, head, 4).float() / head)
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = torch.stack([columns.reshape(-1, 1) * frequencies, rows.reshape(-1, 1) * frequencies], -1)
    return angles.flatten(1)


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring features of `heads` [..., patches, heads, head] turned by `angles`."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
