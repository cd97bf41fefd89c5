"""Index of KV blocks by what prompts begin with: whose KV a block holds, and its origin.

A block is named by the digests of the beginnings that end in it (`prefix_digests`). KV depends on more than tokens:

| on                | so                                                                                            |
|-------------------|-----------------------------------------------------------------------------------------------|
| how chunks in     | an exact chain and an approximate one never mix, nor two approximate ones: each block knows   |
| front were linked | the `ChunkForm` of every chunk up to its end, and goes on only behind blocks with the same    |
| the frame         | positions are shifted so that a prompt's last one equals its index (`sequence.LinkSequence`), |
|                   | with M-RoPE by more the more images there are: blocks of another frame are copied and turned  |

Copies are turned from the block that was computed, not from copies, as far as that is still there: each turn rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from kvstore.deletions import reaches
from prefill_workers.modes import EXACT_POINTS, OperatingPoint
from prefill_workers.prefix_digests import MARK_BYTES, PrefixChain
from prefill_workers.sequence import Run

MOST_ROTATIONS = 1  # of KV: each rounds once, in bfloat16 1.2e-3 after one, 5e-3 after eight


class ChunkForm(NamedTuple):
    """Origin of a chunk's KV, as far as it decides which requests it may serve.

    `asked`: mode and text of the requests that take it, "" for all whose mode is `auto` or `exact`. `detail`: kind and
    rank of its patch.
    """

    point: OperatingPoint
    asked: str = ""
    detail: str = ""

    @property
    def is_exact(self) -> bool:
        """True if the chunk was computed, in a mode that computes exactly or keeps to patches."""
        return self.point in EXACT_POINTS and not self.asked


Forms = tuple[ChunkForm, ...]


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A block of a prompt's KV.

    Attributes:
        forms, contents: of the chunks that start before its end.
        frame: position of the prompt's first token.
        rotations: how often keys in it were turned, since they were computed.
        names: digests of the beginnings that end in it.
    """

    block: int
    tenant: str
    forms: Forms
    contents: tuple[str, ...]
    frame: int
    rotations: int
    names: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class PrefixMatch:
    """Blocks that hold the first `tokens` of a prompt, the last of them perhaps more.

    `forms`: of the chunks among these tokens. `frame`: the prompt's own.
    """

    tokens: int = 0
    blocks: tuple[CachedBlock, ...] = ()
    forms: Forms = ()
    frame: int = 0

    @property
    def hit(self) -> Run:
        """Tokens that need no forward."""
        return Run(0, self.tokens)

    def is_shared(self, index: int, block_size: int) -> bool:
        """True if the prompt can refer to the block at `index`, which is full and in its frame."""
        return (index + 1) * block_size <= self.tokens and self.blocks[index].frame == self.frame

    def is_turned(self, run: Run, block_size: int) -> bool:
        """True if keys of some tokens in a run were turned since they were computed, or are to be."""
        found = self.blocks[run.start // block_size : -(-run.stop // block_size)]
        return any(block.rotations or block.frame != self.frame for block in found)


NO_MATCH = PrefixMatch()


class BlockIndex:
    """Names of KV blocks. Thread-safe; blocks themselves belong to `block_pool.BlockPool`.

    Args:
        block_size: tokens per block.
        relocates: whether blocks serve in other frames than their own. Not where the engine's pages hold fewer bits
            than KV is read in: it would be quantised once more.

    Attributes:
        epoch: ends when anything is forgotten. Blocks of a link that was planned before are not named any more: they
            may hold what was forgotten.
        clears: how often all were forgotten.
        is_elsewhere: of a digest that names none of these blocks any more, whether one can be brought back.
    """

    def __init__(self, block_size: int, *, relocates: bool = True) -> None:
        self.block_size, self._relocates = block_size, relocates
        self.epoch = 0
        self._lock = threading.Lock()
        self._named: dict[bytes, list[CachedBlock]] = {}
        self._blocks: dict[int, CachedBlock] = {}
        self._marked: dict[bytes, None] = {}  # digests that routers know by their marks; last came the latest prompt's
        self.marks_version = 0
        self.clears = 0
        self.is_elsewhere: Callable[[bytes], bool] = lambda digest: False

    def marks(self, limit: int) -> bytes:
        """Marks of up to `limit` beginnings, the latest prompts'; `marks_version` changes with them."""
        with self._lock:
            return b"".join(digest[:MARK_BYTES] for digest in islice(reversed(self._marked), limit))

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def match(self, chain: PrefixChain, frame: int, limit: int, allows: Callable[[ChunkForm], bool]) -> PrefixMatch:
        """Longest known beginning of up to `limit` tokens whose chunks' forms serve.

        Of several an exact one. It ends outside of chunks, so that no chunk is computed in part.
        """
        with self._lock:
            exact = self._match(chain, frame, limit, lambda form: form.is_exact and allows(form))
            found = self._match(chain, frame, limit, allows)
        return found if found.tokens > exact.tokens else exact

    def _match(self, chain: PrefixChain, frame: int, limit: int, allows: Callable[[ChunkForm], bool]) -> PrefixMatch:
        size, end = self.block_size, 0
        paths: dict[Forms, tuple[CachedBlock, ...]] = {(): ()}

        def longer(end: int) -> dict[Forms, tuple[CachedBlock, ...]]:
            """Paths that go on to `end` in one more block."""
            i = chain.index(end)
            if i == len(chain.ends) or chain.ends[i] != end:
                return {}
            before, found = chain.chunks_before(end), dict[Forms, tuple[CachedBlock, ...]]()
            for block in sorted(self._named.get(chain.digests[i], ()), key=lambda one: self._turned(one, frame)):
                forms = block.forms[:before]
                path = next((path for known, path in paths.items() if forms[: len(known)] == known), None)
                serves = self._turned(block, frame) <= MOST_ROTATIONS and all(map(allows, forms))
                if path is not None and forms not in found and serves:
                    found[forms] = (*path, block)
            return found

        while end + size <= limit and (found := longer(end + size)):
            paths, end = found, end + size
        first, last = chain.index(end + 1), chain.index(min(limit, end + size - 1) + 1)
        for part in reversed(chain.ends[first:last]):
            if found := longer(part):
                paths, end = found, part
                break
        tokens = chain.outside_chunks(end)
        forms, path = next(iter(paths.items()))
        return PrefixMatch(tokens, path[: -(-tokens // size)], forms[: chain.chunks_before(tokens)], frame)

    def _turned(self, block: CachedBlock, frame: int) -> int:
        """Rotations of a block's keys once it serves in a frame; too many where it cannot."""
        if block.frame == frame:
            return 0
        return block.rotations + 1 if self._relocates else MOST_ROTATIONS + 1

    def add(
        self,
        blocks: Sequence[int],
        chain: PrefixChain,
        forms: Forms,
        match: PrefixMatch,
        frame: int,
        epoch: int,
        tokens: int | None = None,
    ) -> None:
        """Name a link's blocks, as far as the same KV is not known.

        Args:
            blocks: of the whole prompt, in order; nothing is written into those named any more.
            forms: of all its chunks.
            match: what it began with.
            frame: position of its first token.
            epoch: when it was planned.
            tokens: that are computed, of a link that is under way: whole blocks of these are named. None: all are.
        """
        size, n = self.block_size, chain.ends[-1] if chain.ends else 0
        if tokens is not None:
            n = min(n, tokens // size * size)
        with self._lock:
            if epoch != self.epoch:
                return
            for i, block in enumerate(blocks[: -(-n // size)]):
                if block in self._blocks:
                    continue
                stop = min((i + 1) * size, n)
                before = chain.chunks_before(stop)
                source = match.blocks[i] if i < len(match.blocks) else None
                cached = CachedBlock(
                    block,
                    chain.tenant,
                    forms[:before],
                    chain.contents[:before],
                    frame,
                    0 if source is None else source.rotations + (source.frame != frame),
                )
                for at in range(chain.index(i * size + 1), chain.index(stop + 1)):
                    self._name(cached, chain.digests[at], chain.chunks_before(chain.ends[at]))
                if cached.names:
                    self._blocks[block] = cached
            self._mark(chain, n)

    def _mark(self, chain: PrefixChain, tokens: int) -> None:
        """Report a prompt's known beginnings of up to so many tokens as the latest."""
        for end, digest in zip(chain.ends[: chain.index(tokens + 1)], chain.digests, strict=False):
            if digest in self._named and chain.is_marked(end):
                self._marked.pop(digest, None)
                self._marked[digest] = None
        self.marks_version += 1

    def _name(self, cached: CachedBlock, digest: bytes, before: int) -> None:
        known = self._named.setdefault(digest, [])
        if any(one.frame == cached.frame and one.forms[:before] == cached.forms[:before] for one in known):
            return
        known.append(cached)
        cached.names.append(digest)

    def get(self, block: int) -> CachedBlock | None:
        """A block that is named; None if it is not."""
        return self._blocks.get(block)

    def named(self, digest: bytes) -> list[CachedBlock]:
        """Blocks in which a beginning ends."""
        with self._lock:
            return [*self._named.get(digest, ())]

    def add_again(self, block: int, evicted: CachedBlock, epoch: int) -> bool:
        """Name a block that holds the KV of one that was evicted.

        False if anything was forgotten since `epoch`.
        """
        with self._lock:
            if epoch != self.epoch:
                return False
            cached = replace(evicted, block=block, names=[])
            for digest in evicted.names:
                self._name(cached, digest, len(cached.forms))
            if cached.names:
                self._blocks[block] = cached
            return True

    def drop(self, block: int) -> None:
        """Forget a block, which is about to hold other KV."""
        with self._lock:
            self._drop(block)

    def _drop(self, block: int) -> None:
        cached = self._blocks.pop(block, None)
        if cached is None:
            return
        for digest in cached.names:
            known = self._named[digest]
            known.remove(cached)
            if not known:
                del self._named[digest]
                if not self.is_elsewhere(digest):
                    self._unmark(digest)

    def unmark(self, digest: bytes) -> None:
        """Tell routers no more of a beginning, unless a block is named by it."""
        with self._lock:
            if digest not in self._named:
                self._unmark(digest)

    def _unmark(self, digest: bytes) -> None:
        if digest in self._marked:
            del self._marked[digest]
            self.marks_version += 1

    def forget(self, content: str, tenant: str) -> None:
        """Forget all blocks of prompts in which a deleted content stands before or in them."""
        with self._lock:
            self.epoch += 1
            gone = [
                one.block
                for one in self._blocks.values()
                if content in one.contents and reaches(content, tenant, one.tenant)
            ]
            for block in gone:
                self._drop(block)

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self.epoch += 1
            self.clears += 1
            self.marks_version += 1
            for known in (self._named, self._blocks, self._marked):
                known.clear()
