"""The prefix cache by itself: what of a prompt's prefix it knows, in which frame, and what goes first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstore_support import GQA, random_kv
from torch import Tensor

from kvstore.operator.apply import relocate
from prefill_workers.link.prefix_cache import AT_ONCE, BLOCK, CachedPrefix, PrefixCache, relocated
from prefill_workers.sequence import Run

SYSTEM = list(range(100, 100 + 3 * BLOCK))


def kv_of(tokens: int, seed: int = 0) -> Tensor:
    return random_kv(GQA, tokens, seed=seed)


def learn(cache: PrefixCache, token_ids: list[int], tenant: str = "acme", at: int = 0, seed: int = 0) -> Tensor:
    """Look a prompt up and keep what is not known; returns KV of all its whole blocks in the prompt's frame."""
    prefix, found = cache.look_up(tenant, token_ids, at)
    known = [kv for _, kv in relocated(found, at, GQA)]
    computed = kv_of(len(cache.wanted(prefix, busy=False)), seed)
    if len(computed[0]):
        cache.keep(prefix, computed)
    return torch.cat([*known, computed], 1)


def known(cache: PrefixCache, token_ids: list[int], tenant: str = "acme", at: int = 0) -> int:
    prefix, found = cache.look_up(tenant, token_ids, at)
    assert len(prefix.hit) == len(found) * BLOCK
    return len(prefix.hit)


def test_a_prompt_is_known_as_far_as_whole_blocks_are_the_same() -> None:
    cache = PrefixCache(100)
    learn(cache, [*SYSTEM, 1, 2, 3])
    assert known(cache, [*SYSTEM, 7, 8]) == 3 * BLOCK
    assert known(cache, SYSTEM[:-1]) == 2 * BLOCK
    assert known(cache, [*SYSTEM[: BLOCK + 2], 0, *SYSTEM[BLOCK + 3 :]]) == BLOCK
    assert known(cache, [0, *SYSTEM[1:]]) == 0, "the later blocks are the same, what stands before them is not"
    assert known(cache, SYSTEM[: BLOCK - 1]) == 0
    prefix, _ = cache.look_up("acme", [*SYSTEM, *range(BLOCK + 1)], 0)
    assert cache.wanted(prefix, busy=False) == Run(3 * BLOCK, 4 * BLOCK)


def test_a_busy_worker_keeps_what_is_wanted_for_the_second_time() -> None:
    cache = PrefixCache(100)
    first, _ = cache.look_up("acme", [*SYSTEM, *range(2 * BLOCK)], 0)
    assert not cache.wanted(first, busy=True)
    again, _ = cache.look_up("acme", [*SYSTEM, *range(BLOCK, 3 * BLOCK)], 0)
    assert cache.wanted(again, busy=True) == Run(0, 3 * BLOCK)
    cache.keep(again, kv_of(3 * BLOCK))
    assert known(cache, [*SYSTEM, *range(2 * BLOCK)]) == 3 * BLOCK


def test_a_long_prompt_is_kept_bit_by_bit() -> None:
    cache, long = PrefixCache(1000), list(range(3 * AT_ONCE * BLOCK))
    for turn in range(3):
        assert known(cache, long) == turn * AT_ONCE * BLOCK
        learn(cache, long)
    assert known(cache, long) == len(long)


def test_a_tenants_prompts_are_its_own() -> None:
    cache = PrefixCache(100)
    learn(cache, SYSTEM)
    assert known(cache, SYSTEM, "other") == 0


def test_what_is_taken_in_its_own_frame_is_what_was_kept_however_often() -> None:
    cache = PrefixCache(100)
    computed = learn(cache, SYSTEM, at=5)
    for _ in range(2):
        _, found = cache.look_up("acme", SYSTEM, 5)
        ((run, kv),) = relocated(found, 5, GQA)
        assert run == Run(0, 3 * BLOCK)
        assert torch.equal(kv, computed)
        kv.zero_()  # a caller's own


def test_other_frames_are_relocated_from_the_one_in_which_each_block_was_computed() -> None:
    cache = PrefixCache(100)
    first = learn(cache, SYSTEM[: 2 * BLOCK], at=3)
    whole = learn(cache, SYSTEM, at=11, seed=1)
    _, found = cache.look_up("acme", SYSTEM, 11)
    (near, moved), (far, own) = relocated(found, 11, GQA)
    assert (near, far) == (Run(0, 2 * BLOCK), Run(2 * BLOCK, 3 * BLOCK))
    assert torch.equal(moved, relocate(first, 8, GQA))
    assert torch.equal(own, whole[:, 2 * BLOCK :])


def test_frames_are_apart_where_relocated_kv_would_be_quantised_again() -> None:
    cache = PrefixCache(100, relocates=False)
    learn(cache, SYSTEM, at=3)
    assert known(cache, SYSTEM, at=3) == 3 * BLOCK
    assert known(cache, SYSTEM, at=4) == 0


def test_the_ends_of_what_came_longest_ago_go_first() -> None:
    cache = PrefixCache(5)
    learn(cache, SYSTEM)
    learn(cache, [*SYSTEM[:BLOCK], *range(3 * BLOCK)])  # six blocks in all, the first of them in both
    assert len(cache) == 5
    assert known(cache, SYSTEM) == 2 * BLOCK, "its end"
    assert known(cache, [*SYSTEM[:BLOCK], *range(3 * BLOCK)]) == 4 * BLOCK


def test_a_prompt_loses_its_own_end_before_its_beginning() -> None:
    cache = PrefixCache(4)
    learn(cache, SYSTEM)
    learn(cache, [*SYSTEM, *range(2 * BLOCK)])
    assert known(cache, [*SYSTEM, *range(2 * BLOCK)]) == 4 * BLOCK
    assert known(PrefixCache(2), SYSTEM) == 0
    small = PrefixCache(2)
    learn(small, SYSTEM)
    assert known(small, SYSTEM) == 2 * BLOCK


def test_without_memory_nothing_is_looked_up_or_kept() -> None:
    cache = PrefixCache(0)
    assert cache.look_up("acme", SYSTEM, 0) == (CachedPrefix(), ())
    learn(cache, SYSTEM)
    assert len(cache) == 0


def test_nothing_is_known_after_it_is_cleared() -> None:
    cache = PrefixCache(100)
    learn(cache, SYSTEM)
    cache.clear()
    assert known(cache, SYSTEM) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=12))
def test_whatever_came_before_a_prompt_finds_its_longest_beginning(prompts: list[list[int]]) -> None:
    """Prompts of blocks that are all zeros or all ones: their beginnings coincide often."""
    cache = PrefixCache(1000)
    before: list[list[int]] = []
    for blocks in prompts:
        tokens = [value for value in blocks for _ in range(BLOCK)]
        longest = max((shared(blocks, other) for other in before), default=0)
        assert known(cache, tokens) == longest * BLOCK
        learn(cache, tokens)
        before.append(blocks)
    assert len(cache) == len({tuple(blocks[:end]) for blocks in before for end in range(1, len(blocks) + 1)})


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
