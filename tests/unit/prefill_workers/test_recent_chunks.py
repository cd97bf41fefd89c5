"""Which chunks of earlier prompts are remembered, and whom a prompt's chunks may meet."""

from __future__ import annotations

import torch

from prefill_workers.background.recent_chunks import RecentChunks
from prefill_workers.patches.orbit_patches import OrbitChunk, OrbitForming


def served(names: str, tenant: str = "acme", prefix: tuple[int, ...] = (7,)) -> OrbitForming:
    whole = torch.arange(100)
    chunks = (
        OrbitChunk(f"key {name}", name, whole[:3], whole[:3], torch.zeros(1, 4), first=1, needs_embeddings=True)
        for name in names
    )
    return OrbitForming(prefix, tuple(chunks), tenant, prefix)


def beside(known: RecentChunks, prompt: OrbitForming, count: int = 9) -> str:
    """Contents, those that come later in the alphabet being worth more."""
    return "".join(chunk.content for chunk in known.beside(prompt, count, lambda content: float(ord(content))))


def test_a_prompt_meets_the_others_of_its_tenant_and_prefix_those_worth_most_first():
    known = RecentChunks(100)
    for prompt in (served("abc"), served("cd"), served("x", tenant="other"), served("y", prefix=())):
        known.add(prompt)
    assert beside(known, served("b")) == "dca"
    assert beside(known, served("b"), count=2) == "dc"
    assert beside(known, served("xy", tenant="other")) == ""


def test_prefixes_are_not_compared_token_by_token_with_every_chunk():
    compared = 0

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

    def prefix() -> tuple[int, ...]:
        return tuple(map(Token, range(1000)))

    known = RecentChunks(100)
    known.add(served("abcdefghijklmnop", prefix=prefix()))
    assert beside(known, served("abcdefghijklmn", prefix=prefix())) == "po"
    assert compared <= 3 * 1000


def test_those_that_came_longest_ago_are_forgotten():
    known = RecentChunks(3)
    for names in ("a", "b", "c", "a", "d"):
        known.add(served(names))
    assert beside(known, served("z")) == "dca"


def test_neither_embeddings_nor_whole_prompts_are_kept():
    known = RecentChunks(3)
    known.add(served("a"))
    (chunk,) = known.beside(served("z"), 1, lambda content: 1.0)
    assert chunk.embeddings is None
    assert chunk.needs_embeddings
    assert chunk.token_ids.untyped_storage().nbytes() == 3 * chunk.token_ids.element_size()
    assert chunk.positions.tolist() == [0, 1, 2]


def test_what_was_deleted_is_forgotten_for_its_owner_alone():
    known = RecentChunks(9)
    for tenant in ("acme", "other"):
        known.add(served("ab", tenant))
    known.forget("a", "acme")
    assert beside(known, served("z")) == "b"
    assert beside(known, served("z", "other")) == "ba"
