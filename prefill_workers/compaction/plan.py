"""Compaction plan of a prompt: entries that are kept, tokens that may be reduced.

| policy  | tokens that keep an entry of their own             | the others                                         |
|---------|----------------------------------------------------|----------------------------------------------------|
| `evict` | the first four; text behind the last chunk, up to  | the most important stay, the rest is left out      |
|         | half of the entries                                |                                                    |
| `cover` | the same                                           | of each chunk, and of the text between, an equal   |
|         |                                                    | share stays: tokens whose values differ most       |
| `merge` | all text                                           | means around anchors, within one image             |
| `paper` | the last                                           | means around anchors (eq. 2 and 3), of which the   |
|         |                                                    | first token is one                                 |

Which tokens are important is measured in each layer by the attention that later tokens pay to them (eq. 1): of the
prompt's last tokens, that is the user's own words, or with `paper` of all tokens that the last forward computed.
`cover` asks nobody: what it keeps answers questions that come later as well. Every policy keeps as many entries in each
layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from prefill_workers.protocol import TEXT, ChunkSpan, CompactionPolicy, LinkRequest
from prefill_workers.sequence import Run

SINKS = 4  # first tokens, which take attention that means nothing (StreamingLLM)
OBSERVERS = 32  # last tokens whose queries choose
COVERED = 1024  # tokens of a group at most, so that distances between all of its tokens stay small


@dataclass(frozen=True)
class CompactionPlan:
    """Reduction of `tokens` KV entries to `kept` in each layer.

    Attributes:
        reducible: token runs that may have fewer entries than tokens, in order; all others keep theirs.
        merges: whether entries are means over buckets, which never leave their run; else tokens are left out.
        first_stays: whether the first token is an anchor whatever its importance.
        observers: last tokens whose queries tell importance; None: all that the last forward computed.
        groups: parts of the reducible runs; of each an equal share stays, chosen by its values. (): importance chooses.
    """

    tokens: int
    kept: int
    reducible: tuple[Run, ...]
    merges: bool
    first_stays: bool
    observers: int | None
    groups: tuple[Run, ...] = ()

    @property
    def shift(self) -> int:
        """Positions by which keys move, so that the last one's equals its index again."""
        return self.kept - self.tokens


def compaction_plan(request: LinkRequest, block_size: int) -> CompactionPlan | None:
    """Plan a request's compaction; None: all entries are kept.

    Entries that fill up the last block are free, beside the slot of the answer's first token: so many more are kept.
    """
    asked, n = request.compaction, len(request.token_ids)
    if asked.budget >= 1:
        return None
    wanted = max(math.ceil(asked.budget * n), asked.least)
    if asked.policy is CompactionPolicy.MERGE:
        images = [chunk for chunk in request.chunks if chunk.modality != TEXT and chunk.count]
        reducible = [Run(chunk.first, chunk.first + chunk.count) for chunk in images]
        least = n - sum(map(len, reducible)) + len(reducible)
    elif asked.policy is CompactionPolicy.PAPER:
        reducible, least = [Run(0, n - 1)], 2
    else:
        behind = n - request.chunks[-1].stop if request.chunks else n
        last = max(1, min(behind, wanted // 2))
        reducible, least = [Run(min(SINKS, n - last), n - last)], SINKS + last
    filled = -(-(max(wanted, least) + 1) // block_size) * block_size - 1
    if filled >= n or not reducible:
        return None
    paper, cover = (asked.policy is policy for policy in (CompactionPolicy.PAPER, CompactionPolicy.COVER))
    return CompactionPlan(
        tokens=n,
        kept=filled,
        reducible=tuple(reducible),
        merges=asked.policy in (CompactionPolicy.MERGE, CompactionPolicy.PAPER),
        first_stays=paper,
        observers=None if paper else 0 if cover else OBSERVERS,
        groups=tuple(_groups(request.chunks, reducible[0])) if cover else (),
    )


def observed(request: LinkRequest) -> int:
    """Last tokens that a link's own forward computes, also where earlier prompts had them.

    It is one, or as many words behind the last chunk as tell what is important.
    """
    asked = request.compaction
    if asked.budget >= 1 or asked.policy not in (CompactionPolicy.EVICT, CompactionPolicy.MERGE):
        return 1
    behind = len(request.token_ids) - (request.chunks[-1].stop if request.chunks else 0)
    return min(OBSERVERS, max(1, behind))


def _groups(chunks: Sequence[ChunkSpan], within: Run) -> Iterator[Run]:
    """Chunks and the text between them inside a run, in parts of at most COVERED tokens."""
    borders = {within.start, within.stop, *(chunk.first for chunk in chunks)}
    borders |= {chunk.first + chunk.count for chunk in chunks}
    edges = sorted(border for border in borders if within.start <= border <= within.stop)
    for start, stop in pairwise(edges):
        parts = -(-(stop - start) // COVERED)
        cuts = [start + (stop - start) * part // parts for part in range(parts + 1)]
        yield from (Run(*cut) for cut in pairwise(cuts))


def placeholder_ids(token_ids: list[int], kept: int) -> list[int]:
    """Token ids [kept] that stand for a compacted prompt in a decode engine.

    It computes none but the last. But repetition penalties read them all, and detokenizers, grammars and reasoning
    parsers a prompt's end: so that stays as it is, as far as there is room for all other ids of the prompt before it,
    each where it comes last. Where there is no room for all of them it is the end alone.
    """
    if kept >= len(token_ids):
        return token_ids
    distinct, behind = np.unique(np.asarray(token_ids)[::-1], return_index=True)
    if len(distinct) > kept:
        return token_ids[-kept:]
    again = np.ones(len(token_ids), dtype=bool)  # by distance from the end: ids that come once more behind
    again[behind] = False
    stay = int(np.flatnonzero(again)[kept - len(distinct)])
    order = np.argsort(-behind)
    others = distinct[order[behind[order] >= stay]]
    return [*others.tolist(), *token_ids[-stay:]]
