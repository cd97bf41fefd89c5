"""Reuse on a real engine: equal to a full prefill where it must be, and visibly not where it is approximate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from rig import Part, Rig, apart
from torch import Tensor

from kvstore.errors import TierUnavailable
from kvstore.library import Library
from kvstore.operator.patch import PatchKind
from kvstore.records.record import RecordKind
from kvstore.settings import LibrarySettings
from kvstore.tiers.loading import Loading
from kvstore.tiers.memory import MemoryTier
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.lookups import Lookup
from prefill_workers.link.plan import ChunkPlan, LinkPlan
from prefill_workers.modes import Text
from prefill_workers.protocol import LinkRequest, PixelsNeeded

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " and then say what follows."]
ALONE = [1, "What is this?"]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference in log-probability."""
    return float((a - b).abs().max())


def test_a_full_rank_patch_restores_the_conditioned_kv_and_the_exact_answer(rig: Rig):
    first = rig.link(PAGES, "auto")
    assert first.points == ["encoded", "encoded"]
    again, exact = rig.link(PAGES, "auto"), rig.link(PAGES, "exact")

    assert again.points == ["patched", "patched"]
    for i in range(2):
        assert apart(again.chunk_kv(i), exact.chunk_kv(i)) < 1e-5  # the patch gives KV(B|A), not something near it
    assert difference(again.logprobs, exact.logprobs) < 1e-4
    chunk_tokens = sum(chunk.tokens for chunk in again.result.chunks)
    assert again.result.tokens_reused == chunk_tokens
    assert again.result.tokens_computed == len(again.plan.sequence) - chunk_tokens


def test_a_linked_chunk_needs_neither_pixels_nor_embeddings(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.link(PAGES, "auto")
    load = rig.library.load

    def loads(kind: RecordKind, *place: str) -> Loading:
        assert kind != "embedding"
        return load(kind, *place)

    monkeypatch.setattr(rig.library, "load", loads)
    monkeypatch.setattr(rig.engine, "encode", pytest.fail)
    assert rig.link(PAGES, "auto").points == ["patched", "patched"]


def test_other_text_around_the_chunks_is_exact_to_the_first_chunk_and_close_behind(rig: Rig):
    """Patches are keyed by the chunks before, and not by a little text: what it adds is the approximation."""
    rig.link(PAGES, "auto")
    other = ["Now something different: ", 1, " or rather ", 2, " decide."]
    linked, exact, blind = (rig.link(other, mode, text=Text.FREE) for mode in ("auto", "exact", "full-reuse"))
    assert linked.points == ["patched", "patched"]
    assert apart(linked.chunk_kv(1), exact.chunk_kv(1)) < apart(blind.chunk_kv(1), exact.chunk_kv(1))
    assert 0 < difference(linked.logprobs, exact.logprobs) < difference(blind.logprobs, exact.logprobs)


LONG = "These are the pages of a report, and this is the one that was printed before. "


def test_text_between_chunks_that_is_long_is_part_of_what_patches_are_keyed_by(rig: Rig):
    def between(text: str, ahead: str = "See ") -> list[Part]:
        return [ahead, 1, text, 2, " and then say what follows."]

    assert rig.link(between(LONG), "auto").points == ["encoded", "encoded"]
    again, exact, blind = (rig.link(between(LONG, "Look at "), mode) for mode in ("auto", "exact", "full-reuse"))
    assert again.points == ["patched", "patched"], "what stands before the first chunk does not matter"
    assert apart(again.chunk_kv(1), exact.chunk_kv(1)) < apart(blind.chunk_kv(1), exact.chunk_kv(1))
    other = rig.link(between(LONG.upper()), "auto")
    assert other.points == ["patched", "recomputed"], "the first page stands behind no such text"
    assert rig.link(between(LONG.upper()), "auto").points == ["patched", "patched"]
    assert rig.link(between(", "), "auto").points == ["patched", "recomputed"], "what is keyed by text serves that text"


def test_a_request_may_have_all_text_key_its_patches_or_none(rig: Rig):
    assert rig.link(PAGES, "auto", text=Text.STRICT).points == ["encoded", "encoded"]
    again, exact = (rig.link(PAGES, mode, text=Text.STRICT) for mode in ("auto", "exact"))
    assert again.points == ["patched", "patched"]
    assert difference(again.logprobs, exact.logprobs) < 1e-4
    changed = ["Sea ", *PAGES[1:]]
    assert rig.link(changed, "auto", text=Text.STRICT).points == ["recomputed", "recomputed"]
    assert rig.link(PAGES, "auto", text=Text.FREE).points == ["recomputed", "recomputed"], "these are without text"
    longer = ["See ", 1, LONG, *PAGES[3:]]
    assert rig.link(longer, "auto", text=Text.FREE).points == ["patched", "patched"]


def test_what_is_computed_behind_text_that_a_request_takes_for_nothing_is_not_kept_for_others(rig: Rig):
    behind_text = ["See ", 1, LONG, 2, " and then say what follows."]
    assert rig.link(behind_text, "auto", text=Text.FREE).points == ["encoded", "encoded"]
    found = rig.link(PAGES, "auto")
    assert found.points == ["patched", "patched"]
    kinds = [chunk.outcome.kind for chunk in found.plan.chunks]
    assert kinds[1] is PatchKind.pair, "what was compiled since, without text"
    assert rig.link(behind_text, "auto", text=Text.FREE).points == ["patched", "patched"], "it takes what is there"


def test_full_reuse_is_blind_to_its_neighbours(rig: Rig):
    rig.link(PAGES, "auto")
    blind, exact = rig.link(PAGES, "full-reuse"), rig.link(PAGES, "exact")
    assert blind.points == ["relocated", "relocated"]
    assert apart(blind.chunk_kv(1), exact.chunk_kv(1)) > 1e-2
    assert difference(blind.logprobs, exact.logprobs) > 1e-2


def test_full_reuse_of_a_chunk_at_the_start_is_relocation_of_what_was_computed_alone(rig: Rig):
    rig.link(ALONE, "auto")
    linked = rig.link([" ".join(["far"] * 40), 1, "What is this?"], "full-reuse")
    (chunk,) = linked.plan.chunks
    assert chunk.start_position > 100
    canonical = rig.library.get_canonical(chunk.keys.canonical, "local")
    assert canonical is not None
    keys = rig.engine.layout.slices()["keys"]
    assert torch.equal(linked.chunk_kv(0)[..., keys.stop :], canonical.kv[..., keys.stop :])
    assert not torch.equal(linked.chunk_kv(0)[..., keys], canonical.kv[..., keys])


def test_another_order_is_served_by_orbit_patches(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=2)
    rig.link(PAGES, "auto")
    swapped = ["See ", 2, " and ", 1, " and then say what follows."]
    linked, exact, blind = (rig.link(swapped, mode) for mode in ("auto", "exact", "full-reuse"))
    assert linked.points == ["patched", "patched"]
    assert "orbit" in linked.result.chunks[0].reason
    assert difference(linked.logprobs, exact.logprobs) < difference(blind.logprobs, exact.logprobs)


def test_without_orbits_another_order_is_computed_in_context_from_stored_embeddings(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0)
    rig.link(PAGES, "auto")
    swapped = rig.link(["See ", 2, " and ", 1, " and then say what follows."], "auto")
    assert swapped.points == ["recomputed", "recomputed"]


def test_the_same_chunk_twice_in_one_prompt(rig: Rig):
    twice = ["Once ", 1, " twice ", 1, " the same?"]
    rig.link(twice, "auto")
    again, exact = rig.link(twice, "auto"), rig.link(twice, "exact")
    assert again.points == ["patched", "patched"]
    assert difference(again.logprobs, exact.logprobs) < 1e-4


def test_a_fixed_prefix_keys_patches(rig: Rig):
    rig.link(PAGES, "auto", prefix=(5, 6, 7))
    assert rig.link(PAGES, "auto", prefix=(5, 6, 8)).points == ["recomputed", "recomputed"]
    assert rig.link(PAGES, "auto", prefix=(5, 6, 7)).points == ["patched", "patched"]


def test_tenants_do_not_see_each_others_chunks(rig: Rig):
    rig.link(PAGES, "auto", tenant="one")
    assert rig.link(PAGES, "auto", tenant="two").points == ["encoded", "encoded"]


def test_off_looks_nothing_up_and_stores_nothing(rig: Rig):
    for _ in range(2):
        assert rig.link(PAGES, "off").points == ["encoded", "encoded"]
    assert rig.compiler.formed == 0
    segments = rig.render(PAGES)
    with pytest.raises(PixelsNeeded):  # not even embeddings
        rig.linker.plan(LinkRequest("again", segments.token_ids, segments.chunks))


def test_low_rank_lies_between_blind_and_exact(make_rig: Callable[..., Rig]):
    full, low = make_rig(), make_rig(rank=8)
    for rig in (full, low):
        rig.link(PAGES, "auto")
    exact = full.link(PAGES, "exact")
    off = [apart(rig.link(PAGES, mode).chunk_kv(1), exact.chunk_kv(1)) for rig, mode in
           ((full, "full-reuse"), (low, "auto"), (full, "auto"))]  # fmt: skip
    assert off[0] > off[1] > off[2]
    assert low.link(PAGES, "auto").result.chunks[1].rank == 8


def test_full_rank_in_bf16_is_exact_to_the_precision_of_its_factors(make_rig: Callable[..., Rig], bf16: PrefillEngine):
    """Factors are stored in bf16: the answer is nearer to exact than a blind link by far, not equal."""
    rig = make_rig(bf16)
    rig.link(PAGES, "auto")
    linked, exact, blind = (rig.link(PAGES, mode) for mode in ("auto", "exact", "full-reuse"))
    assert linked.points == ["patched", "patched"]
    assert difference(linked.logprobs, exact.logprobs) < 0.2 * difference(blind.logprobs, exact.logprobs)


class BrokenTier(MemoryTier):
    """Answers until `broken` is set; from then on every read fails."""

    broken = False

    def get(self, path: str):
        if self.broken:
            raise TierUnavailable("injected: the store is down")
        return super().get(path)


def test_a_failing_store_costs_reuse_never_the_answer(make_rig: Callable[..., Rig], fp32: PrefillEngine):
    tier = BrokenTier()
    settings = LibrarySettings(directory=None, memory_bytes=0, tier_failures=1000)
    rig = make_rig(library=Library(settings, fp32.fingerprint, [tier]))
    rig.link(PAGES, "auto")
    healthy = rig.link(PAGES, "auto")
    tier.broken = True
    without = rig.link(PAGES, "auto")
    assert healthy.points == ["patched", "patched"]
    assert without.points == ["encoded", "encoded"]
    assert difference(without.logprobs, healthy.logprobs) < 1e-4


def test_a_damaged_record_is_computed_again(make_rig: Callable[..., Rig], fp32: PrefillEngine):
    tier = MemoryTier()
    settings = LibrarySettings(directory=None, memory_bytes=0)
    rig = make_rig(library=Library(settings, fp32.fingerprint, [tier]))
    healthy = rig.link(PAGES, "auto")
    for entry in list(tier.entries("")):
        data = bytearray(tier.get(entry.key).to_pybytes())
        data[len(data) // 2] ^= 0xFF
        tier.put(entry.key, [pa.py_buffer(bytes(data))])
    damaged = rig.link(PAGES, "auto")
    assert "patched" not in damaged.points
    assert difference(damaged.logprobs, healthy.logprobs) < 1e-4


def test_what_is_stored_of_other_tokens_is_computed_and_stored_again(rig: Rig, caplog: pytest.LogCaptureFixture):
    """As after an upgrade of what cuts images into tokens."""
    exact = rig.link(PAGES, "auto")
    keys = rig.linker.keys(exact.plan.request)
    canonical = [rig.library.get_canonical(key.canonical, "local") for key in keys]
    patch = rig.library.get_patch(keys[0].own_patch, "local")
    embedding = rig.library.get_embedding(keys[1].embedding or "", "local")
    assert canonical[0] is not None
    assert patch is not None
    assert embedding is not None
    rig.library.put(replace(patch, key=keys[1].own_patch))  # fits the first page, which has another size
    rig.library.put(replace(canonical[0], kv=canonical[0].kv[:, 1:]))
    with caplog.at_level(logging.WARNING):
        linked = rig.link(PAGES, "auto")
    assert linked.points == ["encoded", "encoded"]
    assert {chunk.reason for chunk in linked.result.chunks} == {"what is stored of it does not fit its tokens"}
    assert difference(linked.logprobs, exact.logprobs) < 1e-4
    assert caplog.text.count("does not fit it") == 1
    assert rig.link(PAGES, "auto").points == ["patched", "patched"]

    rig.library.put(replace(embedding, embeddings=embedding.embeddings[1:]))
    again = rig.link(PAGES, "exact")
    assert again.points == ["recomputed", "encoded"]
    assert difference(again.logprobs, exact.logprobs) < 1e-4
    assert rig.link(PAGES, "exact").points == ["recomputed", "recomputed"]


def test_canonical_kv_of_other_tokens_is_stored_again_where_no_patch_asked_for_it(rig: Rig):
    plan = rig.link(ALONE, "auto").plan
    stored = rig.library.get_canonical(plan.chunks[0].keys.canonical, "local")
    assert stored is not None
    rig.library.put(replace(stored, kv=stored.kv[:, 1:]))
    rig.link(PAGES[::-1], "auto")
    assert rig.link(PAGES[::-1], "auto").points == ["patched", "patched"]


def test_kv_that_comes_too_late_for_the_plan_is_computed(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.link(PAGES, "auto")
    exact = rig.link(PAGES, "exact")
    monkeypatch.setattr(Lookup, "is_coming", lambda lookup, timeout_s: lookup.found() is None)
    for mode in ("auto", "full-reuse", "mpic-8"):
        assert apart(rig.link(PAGES, mode).kv, exact.kv) < 1e-5


def test_deleting_content_deletes_what_was_derived_from_it_or_conditioned_on_it(rig: Rig):
    three = ["See ", 1, 2, 3, " and say what follows."]
    rig.link(three, "auto")
    span = rig.plan(three).request.chunks[1]
    assert rig.library.delete_content(span.content, "local") > 0
    again = rig.link(three, "auto")
    assert again.points == ["patched", "encoded", "recomputed"]


def test_behind_a_patched_page_no_patch_is_formed(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0)
    rig.link([1, "What?"])
    linked = rig.link([1, 2, "What?"])
    assert linked.points == ["patched", "encoded"]
    behind = linked.plan.chunks[1].keys.own_patch
    assert not rig.library.has("patch", behind, "local"), "it would hold what the first one's patch leaves out"
    assert rig.link([1, 2, "What?"], "exact").points == ["recomputed", "recomputed"]
    assert rig.library.has("patch", behind, "local")


def test_what_memory_knows_to_be_kept_is_not_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    parts = ["See ", 1, " what?"]
    rig.link(parts)
    read, conditioned = list[str](), rig.harvester.conditioned

    def reads(plan: LinkPlan, chunk: ChunkPlan) -> Tensor:
        read.append(chunk.span.content)
        return conditioned(plan, chunk)

    monkeypatch.setattr(rig.harvester, "conditioned", reads)
    assert rig.link(parts, "exact").points == ["recomputed"]
    assert not read
    assert rig.link(["See ", 2, " what?"], "exact").points == ["encoded"]
    assert len(read) == 1
