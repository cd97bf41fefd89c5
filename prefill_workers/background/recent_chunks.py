"""Chunks of earlier prompts, to be paired with those of the next one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kvstore.catalog.index import prefix_key
from kvstore.deletions import reaches
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming


class RecentChunks:
    """The chunks that prompts brought last, without their embeddings. Not thread-safe.

    Args:
        limit: chunks of all tenants that are remembered; those that came longest ago go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # by tenant, name of the prefix and canonical key: prefixes themselves are long to compare
        self._chunks: OrderedDict[tuple[str, str, str], OrbitChunk] = OrderedDict()

    def add(self, served: OrbitForming) -> None:
        """Remember the chunks of a prompt."""
        prefix = prefix_key(served.prefix)
        for chunk in served.chunks:
            name = served.tenant, prefix, chunk.key
            if name not in self._chunks:  # copies: the prompt's own tensors are not kept for a part of them
                ids, positions = chunk.token_ids.clone(), chunk.positions.clone()
                self._chunks[name] = replace(chunk, token_ids=ids, positions=positions, embeddings=None)
            self._chunks.move_to_end(name)
        while len(self._chunks) > self._limit:
            self._chunks.popitem(last=False)

    def forget(self, content: str, tenant: str) -> None:
        """Forget a tenant's deleted content, or everybody's."""
        gone = [
            name
            for name, chunk in self._chunks.items()
            if chunk.content == content and reaches(content, tenant, name[0])
        ]
        for name in gone:
            del self._chunks[name]

    def beside(self, served: OrbitForming, count: int, worth: Callable[[str], float]) -> tuple[OrbitChunk, ...]:
        """Up to `count` other chunks of the same tenant and prefix, those `worth` most first.

        `worth`: by content.
        """
        there = {chunk.content for chunk in served.chunks}
        whose = served.tenant, prefix_key(served.prefix)
        others = [chunk for name, chunk in self._chunks.items() if name[:2] == whose and chunk.content not in there]
        return tuple(sorted(others, key=lambda chunk: worth(chunk.content), reverse=True)[:count])
