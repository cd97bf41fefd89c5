"""The plain values that linking passes around: runs, and one sequence being linked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start` up to `stop` of a sequence, to be computed."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the placeholder tokens that begin at `start`."""

    start: int
    embeddings: Tensor  # [tokens, hidden]
    mask: Tensor | None = None  # [placeholder tokens] bool: which of them carry an embedding; None = all


@dataclass
class LinkSequence:
    """One sequence whose KV is being put together in `blocks`.

    `positions` are already shifted so that the last token's position equals its index (DESIGN.md, hand-off).
    """

    token_ids: Tensor  # [n] int32
    positions: Tensor  # [n] or [3, n] int64
    blocks: Sequence[int]
    embedded: Sequence[Embedded] = field(default_factory=tuple)

    def __len__(self) -> int:
        return len(self.token_ids)

    def embedding_rows(self, index: Tensor) -> tuple[Tensor | None, Tensor]:
        """Embeddings of the tokens at `index` (ascending) that carry one, and the mask over `index` that says which."""
        mask = torch.zeros(len(index), dtype=torch.bool)
        rows: list[Tensor] = []
        for item in self.embedded:
            count = len(item.embeddings) if item.mask is None else len(item.mask)
            inside = (index >= item.start) & (index < item.start + count)
            local = index[inside] - item.start
            if item.mask is None:
                mask |= inside
            else:
                carries = item.mask[local]
                mask[inside] = carries
                local = (item.mask.long().cumsum(0) - 1)[local[carries]]
            rows.append(item.embeddings[local])
        return (torch.cat(rows) if rows and bool(mask.any()) else None), mask
