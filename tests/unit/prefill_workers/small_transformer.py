"""A small transformer in torch behind the calls of a prefill engine that background work makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvstore_support import FINGERPRINT, GQA
from torch import Tensor

from kvstore.operator.apply import relocate
from kvstore.operator.rotary import rotate
from prefill_workers.sequence import LinkSequence, Run

HIDDEN, BLOCK = 16, 4
LINK, SPARE = range(0, 40), range(40, 80)  # blocks


class Transformer:
    """A decoder of three layers whose KV lies in pages of blocks."""

    layout, dtype, fingerprint, precision = GQA, torch.float32, FINGERPRINT, "float32"
    has_quantised_kv = places_on_device = uses_mrope = False
    block_size = BLOCK

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.embedding = torch.randn(128, HIDDEN)
        self.weights = torch.randn(GQA.layers, 4, HIDDEN, HIDDEN) / HIDDEN**0.5  # of queries, keys, values, output
        self.pages = torch.zeros(GQA.layers, len(LINK) * 2 * BLOCK, GQA.features)
        self.computed = 0

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        return torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, stop)])

    def write_kv(self, kv: Tensor, slots: Tensor) -> None:
        self.pages[:, slots] = kv

    def read_kv(self, blocks: Sequence[int], start: int, count: int) -> Tensor:
        return self.pages[:, self.slots(blocks, start, start + count)].clone()

    def finish_writes(self) -> None:
        """Nothing: writes end at once."""

    def copy_kv(self, sources: Sequence[int], targets: Sequence[int], tokens: int, shift: int) -> None:
        self.write_kv(relocate(self.read_kv(sources, 0, tokens), shift, GQA), self.slots(targets, 0, tokens))

    def forward(self, work: Sequence[tuple[LinkSequence, Sequence[Run]]], ends: Sequence[int] = ()) -> Tensor | None:
        last = []
        for sequence, runs in work:
            index = [i for run in runs for i in range(run.start, run.stop)]
            self.computed += len(index)
            slots = self.slots(sequence.blocks, 0, len(sequence))
            hidden = self.embedding[sequence.token_ids[index].long()]

            def turned(heads: Tensor, sequence: LinkSequence = sequence, index: list[int] = index) -> Tensor:
                rows = zip(heads.unflatten(-1, (2, 8)), sequence.positions[index].tolist(), strict=True)
                return torch.stack([rotate(row, at, GQA.rotary) for row, at in rows])

            for layer in range(GQA.layers):
                queries, keys, values = (hidden @ weight for weight in self.weights[layer, :3])
                self.pages[layer, slots[index]] = torch.cat([turned(keys).flatten(-2), values], -1)
                seen = self.pages[layer, slots]
                keys, values = seen[:, :16].unflatten(-1, (2, 8)), seen[:, 16:].unflatten(-1, (2, 8))
                scores = torch.einsum("qhd,khd->hqk", turned(queries), keys) / 8**0.5
                later = torch.arange(len(sequence))[None] > torch.tensor(index)[:, None]
                mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
                hidden = torch.tanh(hidden + mixed.flatten(-2) @ self.weights[layer, 3])
            last.append(hidden[-1] @ self.embedding.T)
        return torch.stack([last[i] for i in ends]) if ends else None
