"""The batch of one forward: the runs of several sequences, concatenated.

Plain tensors, no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from prefill_workers.sequence import LinkSequence, Run

_TABLE_TOKENS = 128  # block tables are of a multiple of so many, as in vLLM: some backends take no others
_NO_SLOT = -1  # which vLLM's kernels write nothing to


@dataclass(frozen=True)
class Rows:
    """The rows of an attention batch."""

    lengths: Tensor  # [r] int32, tokens of each row
    ends: Tensor  # [r] int32, index behind each row's last token
    block_tables: Tensor  # [r, blocks] int32, of a sequence with fewer blocks 0 behind them


@dataclass(frozen=True)
class Attending:
    """Tokens of a batch, of which it is asked how they attend to stretches of their sequence.

    Attributes:
        tokens: which of the batch's; they follow one another in their sequence.
        first: the index of the first of them in its sequence.
        blocks: the sequence's.
        others: the stretches, all before them.
    """

    tokens: Run
    first: int
    blocks: Sequence[int]
    others: tuple[Run, ...]


@dataclass(frozen=True)
class Observing:
    """Tokens of a batch whose attention tells how important earlier tokens are.

    Attributes:
        link: whose.
        tokens: which of the batch's; they follow one another in their sequence.
        first: the index of the first of them in its sequence.
        blocks: the sequence's.
    """

    link: str
    tokens: Run
    first: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class RunBatch:
    """One forward: the tokens of all runs, concatenated. `t` tokens; a row is a run.

    With padding the model runs over `p` >= `t` tokens; else p = t.
    """

    token_ids: Tensor  # [p] int32
    positions: Tensor  # [p] or [3, p] int64
    slots: Tensor  # [p] int64, where each token's KV goes
    index: Tensor  # [t] int64, index of each token in its own sequence
    rows: Rows
    is_embedding: Tensor  # [p] bool
    embeddings: Tensor | None  # [is_embedding.sum(), hidden]

    def short_first(self, rows: Sequence[int]) -> tuple[RunBatch, list[int]]:
        """The batch with its rows in order of length, and where these `rows` are then.

        vLLM's MLA backends attend from short rows to latents as they are stored, but only from those before the first
        long one; every other row up-projects its whole context.
        """
        lengths = self.rows.lengths.long()
        order = lengths.argsort(stable=True)
        sorted_lengths = lengths[order]
        starts = lengths.cumsum(0) - lengths
        shifts = starts[order] - (sorted_lengths.cumsum(0) - sorted_lengths)
        tokens = torch.arange(len(self.index)) + shifts.repeat_interleave(sorted_lengths)
        embeddings = self.embeddings
        if embeddings is not None:
            places = self.is_embedding.cumsum(0) - 1
            embeddings = embeddings[places[tokens][self.is_embedding[tokens]]]
        batch = RunBatch(
            token_ids=self.token_ids[tokens],
            positions=self.positions[..., tokens],
            slots=self.slots[tokens],
            index=self.index[tokens],
            rows=Rows(self.rows.lengths[order], self.rows.ends[order], self.rows.block_tables[order]),
            is_embedding=self.is_embedding[tokens],
            embeddings=embeddings,
        )
        return batch, order.argsort()[list(rows)].tolist()

    def padded(self, buckets: Sequence[int]) -> RunBatch:
        """The batch at the least length of these that holds it; as it is where none does.

        Tokens of padding have no slot and no row: nothing is written of them, and they attend to nothing.
        """
        spare = min((length for length in buckets if length >= len(self.slots)), default=0) - len(self.slots)
        if spare <= 0:
            return self
        return replace(
            self,
            token_ids=pad(self.token_ids, (0, spare)),
            positions=pad(self.positions, (0, spare)),
            slots=pad(self.slots, (0, spare), value=_NO_SLOT),
            is_embedding=pad(self.is_embedding, (0, spare)),
        )


def assemble(work: Sequence[tuple[LinkSequence, Sequence[Run]]], block_size: int) -> RunBatch:
    """Concatenate the runs of several sequences into one batch, in order."""
    lengths = torch.tensor([run.stop - run.start for _, runs in work for run in runs], dtype=torch.int32)
    ends = torch.tensor([run.stop for _, runs in work for run in runs], dtype=torch.int32)
    aligned = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, block_size)
    widest = -(-max(len(sequence.blocks) for sequence, _ in work) // aligned) * aligned
    tables = torch.zeros(len(lengths), widest, dtype=torch.int32)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("ids", "positions", "slots", "index", "mask", "embeddings")}
    row = 0
    for sequence, runs in work:
        table = torch.tensor(sequence.blocks, dtype=torch.int32)
        tables[row : row + len(runs), : len(table)] = table
        row += len(runs)
        index = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        parts["ids"].append(sequence.token_ids[index])
        parts["positions"].append(sequence.positions[..., index])
        parts["slots"].append(table[index // block_size].long() * block_size + index % block_size)
        parts["index"].append(index)
        rows, mask = sequence.embedding_rows(index)
        parts["mask"].append(mask)
        if rows is not None:
            parts["embeddings"].append(rows)
    return RunBatch(
        token_ids=torch.cat(parts["ids"]),
        positions=torch.cat(parts["positions"], dim=-1),
        slots=torch.cat(parts["slots"]),
        index=torch.cat(parts["index"]),
        rows=Rows(lengths, ends, tables),
        is_embedding=torch.cat(parts["mask"]),
        embeddings=torch.cat(parts["embeddings"]) if parts["embeddings"] else None,
    )
