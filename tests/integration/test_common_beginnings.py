"""Text that many prompts begin with is computed once: in every mode but `off`, for its own tenant, and exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rig import Linked, Rig, apart

from prefill_workers.link.prefix_cache import BLOCK
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import LinkRequest

pytestmark = pytest.mark.engine

SYSTEM = "You read pages for people who have no time, and answer in one word. "
PAGES = [SYSTEM, 1, " and ", 2, " and then say what follows."]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(prefix_cache_bytes=1 << 24)


@pytest.mark.parametrize("mode", ["auto", "exact", "full-reuse", "mpic-8", "cacheblend-30"])
def test_a_prompt_that_begins_like_one_before_links_like_a_prompt_that_does_not(
    rig: Rig, make_rig: Callable[..., Rig], mode: str
):
    plain = make_rig()
    for one in (rig, plain):
        one.link(PAGES)
    linked, expected = rig.link(PAGES, mode), plain.link(PAGES, mode)
    known = linked.result.prefix_tokens_reused
    assert known == linked.plan.request.chunks[0].start // BLOCK * BLOCK > 0
    assert expected.result.prefix_tokens_reused == 0
    assert linked.points == expected.points
    assert linked.result.tokens_reused == expected.result.tokens_reused + known
    assert apart(linked.kv, expected.kv) < 1e-5
    assert float((linked.logprobs - expected.logprobs).abs().max()) < 1e-4


def test_what_differs_before_the_first_chunk_is_computed(rig: Rig):
    rig.link(PAGES)
    linked = rig.link(["Another word, " + SYSTEM, 1, "What is this?"], "exact")
    assert linked.result.prefix_tokens_reused == 0


def test_a_prompt_without_chunks_takes_what_it_shares_but_for_its_last_token(rig: Rig):
    tokens = list(range(30, 30 + 4 * BLOCK))
    first = linked_tokens(rig, [*tokens, 4])
    assert first.result.tokens_computed == len(tokens) + 1
    longer = linked_tokens(rig, [*tokens, 5, 6, 7])
    assert (longer.result.prefix_tokens_reused, longer.result.tokens_computed) == (len(tokens), 3)
    assert torch.equal(longer.kv[:, : len(tokens)], first.kv[:, : len(tokens)])
    again = linked_tokens(rig, tokens)
    assert (again.result.prefix_tokens_reused, again.result.tokens_computed) == (3 * BLOCK, BLOCK)
    assert apart(again.kv, first.kv[:, : len(tokens)]) < 1e-5


def test_a_link_has_ended_well_though_its_beginning_cannot_be_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(rig.prefixes, "keep", fail)
        assert rig.link(PAGES).points == ["encoded", "encoded"]
    assert rig.link(PAGES).result.prefix_tokens_reused == 0
    assert rig.link(PAGES).result.prefix_tokens_reused > 0


def test_nothing_is_taken_that_may_have_been_wrong_when_patches_are_allowed_again(rig: Rig):
    rig.link(PAGES)
    rig.linker.fidelity.disable(OperatingPoint.PATCHED, "a test")
    assert rig.linker.fidelity.allow(OperatingPoint.PATCHED)
    assert len(rig.prefixes) == 0


def test_nothing_is_taken_or_kept_where_reuse_is_off(rig: Rig):
    rig.link(PAGES, "off")
    assert len(rig.prefixes) == 0
    rig.link(PAGES)
    assert len(rig.prefixes) > 0
    assert rig.link(PAGES, "off").result.prefix_tokens_reused == 0


def test_a_tenant_finds_nothing_of_anothers(rig: Rig):
    rig.link(PAGES, tenant="acme")
    assert rig.link(PAGES, tenant="other").result.prefix_tokens_reused == 0
    assert rig.link(PAGES, tenant="acme").result.prefix_tokens_reused > 0


def linked_tokens(rig: Rig, tokens: list[int]) -> Linked:
    plan = rig.linker.plan(LinkRequest("test", tokens))
    return rig.finish(plan, rig.loop.submit(plan).result(60))
