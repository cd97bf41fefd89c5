"""Prefix cache: KV of the text before a prompt's first chunk, or of a prompt without chunks.

Nothing stands before that text (tools, system prompt, what a user writes ahead of the images), so its KV is the same in
every prompt that begins with the same tokens, whatever follows: to take it again is exact to rounding, in every mode.
It is kept in blocks of `BLOCK` tokens, each under a digest of its tokens and all before, as in vLLM's prefix cache.

Frames differ: a prompt's positions are shifted so that the last one equals its index (`sequence.LinkSequence`), for
M-RoPE by more the more images there are. Blocks are kept in the frame in which they were computed and relocated from
there, so KV is rounded once more however often it is taken; between equal frames it is copied.

Keeping copies KV out of the engine's pages, on its thread: so much at once, and where other links wait only what came
before, as what a user writes ahead of an image hardly comes again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from kvstore.operator.apply import relocate
from kvstore.operator.layout import Layout
from prefill_workers.sequence import Run

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine

BLOCK = 16  # tokens
AT_ONCE = 64  # blocks that are kept of one prompt
_CONTEXT = "orbitserve 2026 prefix v1"
_REMEMBERED = 1 << 15  # blocks of which it is known that they came


@dataclass(frozen=True, eq=False)
class Block:
    """KV of one block's tokens, in the frame in which the prompt begins at position `at`."""

    kv: Tensor  # [layers, BLOCK, features]
    at: int


@dataclass(frozen=True)
class CachedPrefix:
    """Look-up of a prompt's first text: digests of its blocks, the first `cached` of which hit.

    `at` is the position of the prompt's first token in its own frame.
    """

    digests: tuple[bytes, ...] = ()
    cached: int = 0
    at: int = 0

    @property
    def hit(self) -> Run:
        """Tokens that need no forward."""
        return Run(0, self.cached * BLOCK)


class PrefixCache:
    """LRU cache of prefix blocks in this process's memory. Thread-safe.

    Of one prompt, the last blocks go first.

    Tenants share the memory, and nothing in it: who asked what could be told from the time that an answer takes.

    Args:
        limit: blocks that are held. 0: nothing is looked up.
        relocates: whether blocks serve in other frames than their own. Not where the engine's pages hold fewer bits
            than KV is read in: it would be quantised once more.
    """

    def __init__(self, limit: int, *, relocates: bool = True) -> None:
        self._limit, self._relocates = limit, relocates
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._came: OrderedDict[bytes, None] = OrderedDict()

    @classmethod
    def of(cls, engine: PrefillEngine, nbytes: int) -> PrefixCache:
        """Build a cache of so many bytes for an engine's linker."""
        block = BLOCK * engine.layout.bytes_per_token(engine.dtype)
        return cls(nbytes // block, relocates=not engine.has_quantised_kv)

    def __len__(self) -> int:
        return len(self._blocks)

    def look_up(self, tenant: str, token_ids: Sequence[int], at: int) -> tuple[CachedPrefix, tuple[Block, ...]]:
        """Look up the text `token_ids` before a prompt's first chunk; returns the blocks that hit."""
        if not self._limit:
            return CachedPrefix(), ()
        digests = tuple(_digests(tenant if self._relocates else f"{at} {tenant}", token_ids))
        with self._lock:
            found = tuple(self._blocks[digest] for digest in takewhile(self._blocks.__contains__, digests))
            self._touch(digests)
        return CachedPrefix(digests, len(found), at), found

    def wanted(self, prefix: CachedPrefix, *, busy: bool) -> Run:
        """Tokens, from the first miss on, whose KV is to be kept of a finished prompt.

        `busy`: only of blocks that are wanted for the second time.
        """
        unknown = prefix.digests[prefix.cached :]
        with self._lock:
            blocks = sum(1 for _ in takewhile(self._came.__contains__, unknown)) if busy else len(unknown)
            for digest in reversed(unknown):
                self._came[digest] = None
                self._came.move_to_end(digest)
            while len(self._came) > _REMEMBERED:
                self._came.popitem(last=False)
        first = prefix.hit.stop
        return Run(first, first + min(blocks, AT_ONCE, max(0, self._limit - prefix.cached)) * BLOCK)

    def keep(self, prefix: CachedPrefix, kv: Tensor) -> None:
        """Keep the first blocks that missed.

        `kv` [layers, tokens, features] is theirs, in the prompt's frame.
        """
        # each of its own: a view would hold all of `kv`
        new = [Block(part.clone(), prefix.at) for part in kv.split(BLOCK, 1)]
        with self._lock:
            for digest, block in zip(prefix.digests[prefix.cached :], new, strict=False):
                self._blocks.setdefault(digest, block)
            self._touch(prefix.digests)
            while len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._blocks.clear()

    def _touch(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):
            if digest in self._blocks:
                self._blocks.move_to_end(digest)


def relocated(blocks: Sequence[Block], at: int, layout: Layout) -> Iterator[tuple[Run, Tensor]]:
    """KV of a prompt's first blocks in the frame of `at`, in a few stretches of tokens.

    KV is [layers, tokens, features].
    """
    start = 0
    for kept_at, stretch in groupby(blocks, key=lambda block: block.at):
        kv = torch.cat([block.kv for block in stretch], 1)
        stop = start + kv.shape[1]
        yield Run(start, stop), relocate(kv, at - kept_at, layout, out=kv)
        start = stop


def _digests(tenant: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """Digest of each whole block, over its tokens and all before."""
    hasher = blake3(tenant.encode() + b"\0", derive_key_context=_CONTEXT)
    whole = len(token_ids) - len(token_ids) % BLOCK
    for tokens in np.asarray(token_ids[:whole], "<i4").reshape(-1, BLOCK):
        hasher.update(tokens.tobytes())
        yield hasher.digest()
