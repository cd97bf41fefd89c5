"""Shared blocks under arbitrary calls: none is lost or doubled, or read while it holds other KV."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from clock import Clock
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefill_workers.block_index import BlockIndex, ChunkForm, PrefixMatch
from prefill_workers.block_pool import BlockPool, Lease, PoolExhausted
from prefill_workers.modes import OperatingPoint
from prefill_workers.prefix_digests import PrefixChain, prefix_chain
from prefill_workers.protocol import ChunkSpan

BLOCK, TOTAL = 32, 14
EXACT = ChunkForm(OperatingPoint.RECOMPUTED)
PATCHED = ChunkForm(OperatingPoint.PATCHED, "auto", "own 32")
CONTENTS = st.sampled_from("ab")

# Prompts of few words and images, so that they begin alike often: text of 20 or 48 tokens, or an image of 24.
PARTS = st.lists(st.sampled_from([("text", 20), ("text", 48), ("a", 24), ("b", 24)]), min_size=1, max_size=6)


@dataclass
class Link:
    lease: Lease
    chain: PrefixChain
    match: PrefixMatch
    frame: int
    epoch: int
    forms: tuple[ChunkForm, ...]
    is_done: bool = False


def written(chain: PrefixChain, forms: tuple[ChunkForm, ...], frame: int) -> list[tuple[object, ...]]:
    """What every token's KV depends on: all before it (here by digest and length), how that came about, the frame."""
    found = []
    for token in range(chain.ends[-1]):
        end = chain.index(token + 1)
        found.append((chain.digests[end], forms[: chain.chunks_before(token + 1)], frame, token))
    return found


class SharedBlocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(BLOCK)
        self.pool = BlockPool(range(1, TOTAL + 1), BLOCK, 10, "p", Clock(), self.index)
        self.kv: dict[tuple[int, int], tuple[object, ...]] = {}  # by block and token in it
        self.links: list[Link] = []

    @rule(parts=PARTS, patched=st.booleans(), frame=st.integers(0, 2), tenant=st.sampled_from(["acme", "other"]))
    def begin(self, parts: list[tuple[str, int]], patched: bool, frame: int, tenant: str) -> None:
        spans, n = [], 0
        for kind, tokens in parts:
            if kind != "text":
                spans.append(ChunkSpan(kind, "image", n, n + tokens, n + 1, tokens - 2))
            n += tokens
        chain = prefix_chain(tenant, [7] * n, spans, BLOCK)
        allowed = {EXACT, PATCHED} if patched else {EXACT}
        match = self.index.match(chain, frame, n - 1, allowed.__contains__)
        assert chain.outside_chunks(match.tokens) == match.tokens
        assert {*match.forms} <= allowed
        assert match.tokens < n
        if not self.pool.fits(n, match):
            match = PrefixMatch(frame=frame)
        try:
            lease = self.pool.allocate(n, 1, match)
        except PoolExhausted:
            assert -(-n // BLOCK) > self.pool.free - len(match.blocks)
            return
        forms = (*match.forms, *[PATCHED if patched else EXACT] * (len(spans) - len(match.forms)))
        for i, block in enumerate(match.blocks):
            whole = written(chain, forms, block.frame)[i * BLOCK : min((i + 1) * BLOCK, match.tokens)]
            assert [self.kv[block.block, token] for token in range(len(whole))] == whole, "what it says it holds"
        shared = {lease.blocks[i] for i in range(len(match.blocks)) if match.is_shared(i, BLOCK)}
        for token, kv in enumerate(written(chain, forms, frame)):
            if lease.blocks[token // BLOCK] not in shared:
                self.kv[lease.blocks[token // BLOCK], token % BLOCK] = kv
        assert lease.blocks[(n - 1) // BLOCK] not in shared, "its last token is written into a block of its own"
        self.links.append(Link(lease, chain, match, frame, self.index.epoch, forms))

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        """It is named once it has ended, whatever was forgotten meanwhile, and its blocks are kept for the reader."""
        if running := [link for link in self.links if not link.is_done]:
            link = running[which % len(running)]
            self.pool.end_copying(link.lease)
            self.index.add(link.lease.blocks, link.chain, link.forms, link.match, link.frame, link.epoch)
            link.is_done = True

    @rule(which=st.integers(0, 9))
    def read(self, which: int) -> None:
        """A link is pulled; or it was cancelled before it had ended."""
        if self.links:
            link = self.links.pop(which % len(self.links))
            self.pool.read(link.lease.id)

    @rule(content=CONTENTS)
    def delete(self, content: str) -> None:
        self.index.forget(content, "acme")
        chain = prefix_chain("acme", [7] * 24, [ChunkSpan(content, "image", 0, 24, 1, 22)], BLOCK)
        assert self.index.match(chain, 0, 24, lambda form: True).tokens == 0

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def every_block_is_held_cached_or_free(self) -> None:
        held = {block for link in self.links for block in (*link.lease.blocks, *link.lease.sources)}
        assert self.pool.free == TOTAL - len(held)
        assert self.pool.cached <= self.pool.free

    @invariant()
    def what_a_link_reads_is_its_own_or_equal(self) -> None:
        for link in self.links:
            for token, kv in enumerate(written(link.chain, link.forms, link.frame)):
                assert self.kv[link.lease.blocks[token // BLOCK], token % BLOCK] == kv

    def teardown(self) -> None:
        for link in self.links:
            self.pool.abandon(link.lease.id)
        assert self.pool.free == TOTAL
        assert len({*self.pool.allocate(TOTAL * BLOCK).blocks}) == TOTAL
        assert len(self.index) == 0


TestSharedBlocks = SharedBlocks.TestCase
TestSharedBlocks.settings = settings(max_examples=40, stateful_step_count=25)
