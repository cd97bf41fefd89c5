"""Host memory behind the KV pool, for evicted blocks that prompts may begin with.

| when                     | what                                                                              |
|--------------------------|-----------------------------------------------------------------------------------|
| the pool needs blocks    | the KV of cached blocks that it takes is copied here, under their names             |
| before a link is planned | what the prompt begins with behind what the pool has is copied back, and cached     |
| a content is deleted     | blocks in or behind it go, here and in the pool                                   |

The block used longest ago goes first. How its KV was made and its frame go with each block, so that a block that came
back serves whom it served before.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.deletions import reaches
from prefill_workers.block_index import BlockIndex, CachedBlock, ChunkForm, Forms
from prefill_workers.block_pool import BlockPool
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.prefix_hits import PrefixHits
from prefill_workers.prefix_digests import PrefixChain
from prefill_workers.protocol import LinkRequest

logger = logging.getLogger(__name__)

_READ_BLOCKS = 64  # at once: a device gathers them in memory of its own


@dataclass(frozen=True)
class HostStats:
    """Blocks in host memory, and how many came back from there."""

    blocks: int = 0
    nbytes: int = 0
    restored: int = 0


@dataclass(eq=False)
class _HostBlock:
    cached: CachedBlock
    kv: Tensor  # [layers, block size, features]


class HostBlocks:
    """LRU cache of evicted blocks. Belongs to the prefill loop's thread, but for `holds`.

    Args:
        max_bytes: of KV.
    """

    def __init__(self, engine: PrefillEngine, pool: BlockPool, hits: PrefixHits, max_bytes: int) -> None:
        self._engine, self._pool, self._hits, self._max_bytes = engine, pool, hits, max_bytes
        self._blocks: OrderedDict[_HostBlock, None] = OrderedDict()  # used longest ago first
        self._named: dict[bytes, list[_HostBlock]] = {}
        self._nbytes = self._restored = self._clears = 0
        pool.on_evict = self._keep
        hits.index.is_elsewhere = self._named.__contains__

    def stats(self) -> HostStats:
        """Numbers, from any thread."""
        return HostStats(len(self._blocks), self._nbytes, self._restored)

    def holds(self, chain: PrefixChain) -> bool:
        """True if some beginning of a prompt is here. From any thread."""
        return any(digest in self._named for digest in chain.digests)

    def restore(self, request: LinkRequest, chain: PrefixChain) -> None:
        """Copy back what a prompt begins with and the pool has not, as far as there is room."""
        epoch, index = self._hits.epoch, self._hits.index
        self._clear_with(index)
        kept, lacking = self._path(chain, self._hits.allows(request))
        taken = self._pool.take_cached(len(lacking), besides=[one.block for one in kept])
        back = lacking[: len(taken)]
        if not back:
            return
        size = self._pool.block_size
        self._engine.write_kv(torch.cat([one.kv for one in back], 1), self._engine.slots(taken, 0, len(back) * size))
        self._engine.finish_writes()
        for block, one in zip(taken, back, strict=True):
            if index.add_again(block, one.cached, epoch):
                self._restored += 1
            self._drop(one)

    def forget(self, content: str, tenant: str) -> None:
        """Drop blocks of prompts in which a deleted content stands before or in them.

        Also from the pool, again: one may have come back since its index forgot them.
        """
        for one in [*self._blocks]:
            if content in one.cached.contents and reaches(content, tenant, one.cached.tenant):
                self._drop(one)
        self._hits.index.forget(content, tenant)

    def _path(
        self, chain: PrefixChain, allows: Callable[[ChunkForm], bool]
    ) -> tuple[list[CachedBlock], list[_HostBlock]]:
        """Blocks that a prompt begins with, one after another: those in the pool, and those here."""
        size, end = self._pool.block_size, 0
        kept: list[CachedBlock] = []
        lacking: list[_HostBlock] = []
        forms: Forms = ()
        while end % size == 0:
            found: CachedBlock | _HostBlock | None = None
            for at in reversed(range(chain.index(end + 1), chain.index(end + size + 1))):  # whole, or its longest part
                before = chain.chunks_before(chain.ends[at])
                if found := self._behind(forms, chain.digests[at], before, allows):
                    break
            if found is None:
                break
            if isinstance(found, _HostBlock):
                lacking.append(found)
                found = found.cached
            else:
                kept.append(found)
            forms, end = found.forms[:before], chain.ends[at]
        return kept, lacking

    def _behind(
        self, forms: Forms, digest: bytes, before: int, allows: Callable[[ChunkForm], bool]
    ) -> CachedBlock | _HostBlock | None:
        """A block, of the pool's if it has one, that goes on behind chunks of these forms, up to `before` chunks."""

        def serves(cached: CachedBlock) -> bool:
            own = cached.forms[:before]
            return own[: len(forms)] == forms and all(map(allows, own))

        here = (one for one in self._named.get(digest, ()) if serves(one.cached))
        return next(filter(serves, self._hits.index.named(digest)), None) or next(here, None)

    def _clear_with(self, index: BlockIndex) -> None:
        """Drop all if the index was cleared: what a block was linked from may have been wrong."""
        if self._clears != index.clears:
            self._clears = index.clears
            for one in [*self._blocks]:
                self._drop(one)

    def _keep(self, blocks: Sequence[int]) -> None:
        """Copy blocks that the pool is about to hand out."""
        self._clear_with(self._hits.index)
        named = [cached for block in blocks if (cached := self._hits.index.get(block)) is not None]
        if not named:
            return
        try:
            for first in range(0, len(named), _READ_BLOCKS):
                self._copy(named[first : first + _READ_BLOCKS])
        except (RuntimeError, MemoryError) as error:  # the pool hands them out all the same
            logger.warning("evicted blocks are not kept in host memory: %s", error)
        while self._nbytes > self._max_bytes:
            self._drop(next(iter(self._blocks)))

    def _copy(self, named: Sequence[CachedBlock]) -> None:
        size = self._pool.block_size
        kv = self._engine.read_kv([cached.block for cached in named], 0, len(named) * size)
        for cached, part in zip(named, kv.split(size, 1), strict=True):
            block = _HostBlock(cached, part.clone())
            self._blocks[block] = None
            self._nbytes += block.kv.nbytes
            for digest in cached.names:
                self._named.setdefault(digest, []).append(block)

    def _drop(self, one: _HostBlock) -> None:
        if one not in self._blocks:  # of those that come back some may have given way to what makes room for them
            return
        del self._blocks[one]
        self._nbytes -= one.kv.nbytes
        for digest in one.cached.names:
            self._named[digest].remove(one)
            if not self._named[digest]:
                del self._named[digest]
                self._hits.index.unmark(digest)
