"""Digests of a prompt's beginnings: tokens, contents of chunks, and the tenant that asks.

A placeholder's token id says nothing of the image behind it, so a chunk's content id goes in where the chunk begins.
Equal digests mean equal KV up to there, if it was computed exactly; `block_index` says what holds otherwise. Prefill
workers name KV blocks by them, and routers tell by the same digests which worker holds a prompt's beginning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from prefill_workers.protocol import ChunkSpan

GRAIN = 16  # tokens: a beginning is found at multiples of it, and at the edges of chunks
MARK_BYTES = 8  # of a beginning's mark in reports
_SHORTEST = 64  # tokens of a beginning that has a mark
_CONTEXT = "orbitserve 2026 prefix v2"
_CHUNK = b"\xff\xff\xff\xff"  # no token's id


@dataclass(frozen=True)
class PrefixChain:
    """Digests of a prompt's beginnings.

    Attributes:
        ends: tokens of each beginning, ascending.
        digests: of each.
        starts, contents: of the prompt's chunks, in order.
        stops: ends of the chunks.
    """

    tenant: str
    ends: tuple[int, ...]
    digests: tuple[bytes, ...]
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    contents: tuple[str, ...] = ()

    def common(self, other: PrefixChain) -> int:
        """Tokens of the longest beginning that both have."""
        both = range(min(len(self.ends), len(other.ends)))  # equal ones come first
        equal = bisect_left(both, True, key=lambda i: self.digests[i] != other.digests[i])
        return self.ends[equal - 1] if equal else 0

    def index(self, end: int) -> int:
        """Index of the first beginning of at least `end` tokens."""
        return bisect_left(self.ends, end)

    def is_marked(self, end: int) -> bool:
        """True if routers know a beginning of `end` tokens by its mark."""
        return end in self.stops or _is_marked_length(end)

    def chunks_before(self, end: int) -> int:
        """Number of chunks that start before token `end`."""
        return bisect_left(self.starts, end)

    def outside_chunks(self, end: int) -> int:
        """`end`, or the start of the chunk that it would cut."""
        before = self.chunks_before(end)
        return self.starts[before - 1] if before and self.stops[before - 1] > end else end


def prefix_chain(tenant: str, token_ids: Sequence[int], chunks: Sequence[ChunkSpan], block_size: int) -> PrefixChain:
    """Digests of a prompt's beginnings at multiples of the grain and at edges of chunks."""
    grain = int(np.gcd(GRAIN, block_size))
    n = len(token_ids)
    edges = {edge for span in chunks for edge in (span.start, span.stop)}
    ends = sorted({*range(grain, n + 1, grain), *edges} - {0})
    return PrefixChain(
        tenant,
        tuple(ends),
        tuple(prefix_digests(tenant, token_ids, chunks, ends)),
        tuple(span.start for span in chunks),
        tuple(span.stop for span in chunks),
        tuple(span.content for span in chunks),
    )


def marked_beginnings(tenant: str, token_ids: Sequence[int], chunks: Sequence[ChunkSpan]) -> list[tuple[int, bytes]]:
    """Tokens and marks of a prompt's beginnings as routers know them, ascending.

    They end at chunks' ends, and at 64, 96, 128, 192, 256, ... tokens: of what is known at least two thirds show.
    """
    lengths, length = set[int](), _SHORTEST
    while length < len(token_ids):
        lengths |= {length, length * 3 // 2}
        length *= 2
    stops = {span.stop for span in chunks}
    ends = sorted(end for end in lengths | stops if end < len(token_ids))
    digests = prefix_digests(tenant, token_ids, chunks, ends)
    return [(end, digest[:MARK_BYTES]) for end, digest in zip(ends, digests, strict=True)]


def _is_marked_length(tokens: int) -> bool:
    lowest = tokens & -tokens
    return tokens >= _SHORTEST and tokens // lowest in (1, 3)


def prefix_digests(
    tenant: str, token_ids: Sequence[int], chunks: Iterable[ChunkSpan], ends: Iterable[int]
) -> list[bytes]:
    """Digests of a prompt's first tokens up to each of `ends` (ascending).

    They do not depend on where else digests are taken.
    """
    hasher = blake3(_sized(tenant), derive_key_context=_CONTEXT)
    ids = memoryview(np.asarray(token_ids, "<i4").tobytes())
    coming, done = iter(chunks), 0
    span = next(coming, None)
    digests = []
    for end in ends:
        while span is not None and span.start < end:
            hasher.update(ids[4 * done : 4 * span.start])
            done = span.start
            hasher.update(_CHUNK + _sized(f"{span.first - span.start} {span.count} {len(span)} {span.content}"))
            span = next(coming, None)
        hasher.update(ids[4 * done : 4 * end])
        done = end
        digests.append(hasher.digest())
    return digests


def _sized(text: str) -> bytes:
    written = text.encode()
    return len(written).to_bytes(4, "little") + written
