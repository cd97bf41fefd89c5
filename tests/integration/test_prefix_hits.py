"""Beginnings of prompts are computed once: text and chunks, for its own tenant, and exactly where it was exact.

Workers on one engine use the same blocks: what a prompt is compared with is linked before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from rig import Linked, Part, Rig, all_free, apart, fill

from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.prefix_digests import GRAIN
from prefill_workers.protocol import LinkRequest, PixelsNeeded

pytestmark = pytest.mark.engine

SYSTEM = "You read pages, and answer in one word. "
TURN = "<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>user\n"
FIRST: list[Part] = [SYSTEM, 1, " and ", 2, " and then say what follows."]
SECOND: list[Part] = [*FIRST, TURN.format("Nothing at all does.") + "Are you quite sure of it?"]
THIRD: list[Part] = [*SECOND, TURN.format("Yes.") + "Then what is this: ", 3, " Tell me."]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(keeps_prefixes=True)


def same(linked: Linked, expected: Linked) -> bool:
    logprobs = float((linked.logprobs - expected.logprobs).abs().max())
    return apart(linked.kv, expected.kv) < 2e-5 and logprobs < 1e-4


def test_a_later_turn_computes_only_what_is_new_and_equals_a_prompt_computed_whole(
    rig: Rig, make_rig: Callable[..., Rig]
):
    """The third brings an image, and so another frame (M-RoPE): what is known is turned into it."""
    turns, before = (FIRST, SECOND, THIRD, THIRD), 0
    plain = make_rig()
    whole = [plain.link(parts, "off") for parts in turns]
    for parts, expected in zip(turns, whole, strict=True):
        linked = rig.link(parts, "exact")
        n = len(linked.plan.sequence)
        assert linked.result.tokens_computed <= max(n - before, 0) + 2 * GRAIN
        assert linked.result.tokens_computed + linked.result.prefix_tokens_reused == n
        assert same(linked, expected)
        before = n
    assert linked.points == ["prefix"] * 3
    assert "earlier prompt began alike" in linked.result.chunks[0].reason
    rig.wait_until_free()
    assert all_free(rig)
    assert rig.loop.stats().blocks_cached > 0


def test_an_answer_is_computed_in_idle_time_and_the_next_turn_begins_with_it(rig: Rig, make_rig: Callable[..., Rig]):
    """Behind images, with which positions lag behind indices."""
    whole = make_rig().link(SECOND, "off")
    first = rig.link(FIRST, "exact")
    n, turn = len(first.plan.sequence), whole.plan.sequence.token_ids.tolist()
    assert turn[:n] == first.plan.request.token_ids, "the template ends a prompt as it begins its answer"
    before = rig.loop.stats().compiled
    rig.loop.keep_answer(first.result.lease, turn[n : n + 2 * GRAIN])
    rig.loop.call(lambda: None).result(60)
    rig.settle()
    after = rig.loop.stats().compiled
    assert (
        2 * GRAIN <= after.answers.tokens - before.answers.tokens == after.idle_tokens - before.idle_tokens < 3 * GRAIN
    )
    linked = rig.link(SECOND, "exact")
    assert linked.result.prefix_tokens_reused > n + GRAIN
    assert same(linked, whole)
    assert rig.loop.stats().harvest_failures == 0
    rig.wait_until_free()
    assert all_free(rig)


def test_what_the_pool_evicts_comes_back_from_host_memory(make_rig: Callable[..., Rig]):
    rig = make_rig(keeps_prefixes=True, learns=False, host_bytes=1 << 28)
    first, asked = rig.link(FIRST, "exact"), rig.render(SECOND)
    request = LinkRequest("test", asked.token_ids, asked.chunks, Mode.EXACT)
    for lease in fill(rig):
        rig.loop._pool.abandon(lease)
    with pytest.raises(PixelsNeeded):
        rig.linker.plan(request)
    coming = rig.loop.bring_back(request)
    assert coming is not None
    coming.result(60)
    plan = rig.linker.plan(request)
    linked = rig.finish(plan, rig.loop.submit(plan).result(60))
    known = linked.result.prefix_tokens_reused
    assert linked.points == ["prefix", "prefix"]
    assert known >= len(first.plan.sequence) - GRAIN
    assert torch.equal(linked.kv[:, :known], first.kv[:, :known])
    assert rig.loop.stats().compiled.host.restored == -(-known // rig.engine.block_size)
    rig.wait_until_free()
    assert all_free(rig)


def test_a_new_question_about_an_image_needs_no_pixels_and_no_library(make_rig: Callable[..., Rig]):
    rig = make_rig(keeps_prefixes=True, learns=False)
    first = rig.link([SYSTEM, 1, "What is this?"], "exact")
    asked = rig.render([SYSTEM, 1, "By whom is it, and when was it made?"])
    plan = rig.linker.plan(LinkRequest("test", asked.token_ids, asked.chunks))
    linked = rig.finish(plan, rig.loop.submit(plan).result(60))
    end = asked.chunks[0].stop
    assert linked.result.prefix_tokens_reused == end, "up to the image's last token, in the middle of a block"
    assert linked.result.tokens_computed == len(asked.token_ids) - end
    assert torch.equal(linked.kv[:, :end], first.kv[:, :end])
    assert same(linked, make_rig().link([SYSTEM, 1, "By whom is it, and when was it made?"], "off"))


@pytest.mark.parametrize("mode", ["auto", "full-reuse", "mpic-8", "cacheblend-30"])
def test_behind_text_that_is_known_a_prompt_links_like_one_of_which_nothing_is(
    rig: Rig, make_rig: Callable[..., Rig], mode: str
):
    """In an approximate mode, with other images than the earlier prompt; then again, as that made it."""
    parts: list[Part] = [SYSTEM, 2, " and ", 1, " and then say what follows."]

    def link(worker: Rig) -> Linked:
        worker.link(["", 2, " and ", 1, "."])  # so that their KV is stored
        worker.link([SYSTEM + "No. ", 2, " and ", 1, "."])
        worker.link([SYSTEM, 3, "What is it?"])
        return worker.link(parts, mode)

    expected, linked = link(make_rig()), link(rig)
    known = linked.result.prefix_tokens_reused
    assert known == linked.plan.request.chunks[0].start > 0
    assert expected.result.prefix_tokens_reused == 0
    assert linked.points == expected.points
    assert linked.result.tokens_reused == expected.result.tokens_reused + known
    assert same(linked, expected)
    again = rig.link(parts, mode)
    assert again.points == ["prefix", "prefix"]
    assert same(again, expected)


def test_a_prompt_in_mode_exact_takes_nothing_that_was_linked_approximately(rig: Rig):
    rig.link(["", 1, " and ", 2, "."])
    patched = rig.link(FIRST)
    assert patched.points == ["patched", "patched"]
    first_chunk = patched.plan.request.chunks[0].start
    exact = rig.link(FIRST, "exact")
    assert exact.result.prefix_tokens_reused == first_chunk
    assert exact.points == ["recomputed", "recomputed"]
    later = rig.link(SECOND)
    assert [chunk.made_at for chunk in later.plan.chunks] == ["recomputed"] * 2, "of both, the exact one"
    strict = rig.link(FIRST, "full-reuse")
    assert (strict.points, strict.result.prefix_tokens_reused) == (["relocated", "relocated"], first_chunk)


def test_what_was_linked_approximately_serves_its_own_mode_until_that_is_switched_off(rig: Rig):
    rig.link(["", 1, " and ", 2, "."])
    patched = rig.link(FIRST)
    again = rig.link(SECOND)
    assert again.points == ["prefix", "prefix"]
    assert [chunk.made_at for chunk in again.plan.chunks] == ["patched", "patched"]
    known = again.result.prefix_tokens_reused
    assert torch.equal(again.kv[:, :known], patched.kv[:, :known])
    rig.fidelity.disable(OperatingPoint.PATCHED, "a test")
    assert set(rig.link(SECOND).points) == {"recomputed"}
    assert rig.fidelity.allow(OperatingPoint.PATCHED)
    assert len(rig.linker.prefixes.index) == 0, "patches may have been wrong"


def test_no_patch_is_formed_behind_a_chunk_that_was_linked_blindly(rig: Rig):
    rig.link(["", 1, "."])
    rig.link([SYSTEM, 1, " What?"], "full-reuse")
    linked = rig.link([SYSTEM, 1, " What is ", 2, "?"], "full-reuse")
    assert linked.points == ["prefix", "encoded"]
    assert not rig.harvester.forms_patch(linked.plan, linked.plan.chunks[1])


def test_a_prompt_without_chunks_takes_what_it_shares_but_for_its_last_token(rig: Rig):
    tokens = list(range(30, 30 + 4 * GRAIN))
    first = linked_tokens(rig, [*tokens, 4])
    assert first.result.tokens_computed == len(tokens) + 1
    longer = linked_tokens(rig, [*tokens, 5, 6, 7])
    assert (longer.result.prefix_tokens_reused, longer.result.tokens_computed) == (len(tokens), 3)
    assert torch.equal(longer.kv[:, : len(tokens)], first.kv[:, : len(tokens)])
    again = linked_tokens(rig, tokens)
    assert (again.result.prefix_tokens_reused, again.result.tokens_computed) == (3 * GRAIN, GRAIN)
    assert apart(again.kv, first.kv[:, : len(tokens)]) < 1e-5


def test_what_is_evicted_between_plan_and_admission_is_computed_or_asked_for(make_rig: Callable[..., Rig]):
    rig = make_rig(keeps_prefixes=True, learns=False)
    rig.link(FIRST)
    asked, text = rig.render(SECOND), rig.render([SYSTEM, SYSTEM])
    request = LinkRequest("test", asked.token_ids, asked.chunks)
    plan, of_text = rig.linker.plan(request), rig.linker.plan(LinkRequest("text", text.token_ids))
    assert plan.prefix.tokens > asked.chunks[1].stop
    assert of_text.prefix.tokens > 0
    for lease in fill(rig):
        rig.loop._pool.abandon(lease)
    with pytest.raises(PixelsNeeded) as lost:
        rig.loop.submit(plan).result(60)
    assert lost.value.chunks == (0, 1)
    assert rig.finish(of_text, rig.loop.submit(of_text).result(60)).result.prefix_tokens_reused == 0
    assert rig.link(SECOND).points == ["encoded", "encoded"]
    rig.wait_until_free()
    assert all_free(rig)


def test_a_deleted_image_is_computed_again(rig: Rig):
    linked = rig.link(FIRST, "exact")
    content = linked.plan.request.chunks[1].content
    asyncio.run(rig.linker.forgets.forget(content, "local"))
    again = rig.link(FIRST, "exact")
    assert 0 < again.result.prefix_tokens_reused <= again.plan.request.chunks[1].start
    assert again.points[1] == "recomputed"
    assert rig.link(FIRST, "exact").points == ["prefix", "prefix"], "it came again since"


def test_a_long_prompt_is_known_as_far_as_it_is_computed_and_one_with_a_like_beginning_waits_for_it(
    make_rig: Callable[..., Rig],
):
    rig, tokens = make_rig(keeps_prefixes=True, budget=128), list(range(30, 30 + 320))
    first, second = (rig.linker.plan(LinkRequest("test", [*tokens, last])) for last in (1, 2))
    done = [rig.loop.submit(plan) for plan in (first, second)]
    results = [one.result(60) for one in done]
    assert [result.prefix_tokens_reused for result in results] == [0, 320]
    assert rig.loop.stats().forwards == 4
    linked = [rig.finish(plan, result) for plan, result in zip((first, second), results, strict=True)]
    assert torch.equal(linked[0].kv[:, :320], linked[1].kv[:, :320])


def test_nothing_is_taken_or_kept_where_reuse_is_off(rig: Rig):
    rig.link(FIRST, "off")
    assert len(rig.linker.prefixes.index) == 0
    rig.link(FIRST)
    assert rig.link(FIRST, "off").result.prefix_tokens_reused == 0


def test_a_tenant_finds_nothing_of_anothers(rig: Rig):
    rig.link(FIRST, tenant="acme")
    assert rig.link(FIRST, tenant="other").result.prefix_tokens_reused == 0
    assert rig.link(FIRST, tenant="acme").result.prefix_tokens_reused > 0


def linked_tokens(rig: Rig, tokens: list[int]) -> Linked:
    plan = rig.linker.plan(LinkRequest("test", tokens))
    return rig.finish(plan, rig.loop.submit(plan).result(60))
