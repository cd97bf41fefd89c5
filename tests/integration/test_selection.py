"""Modes that compute some tokens of a chunk whose KV is stored (mpic-K, cacheblend-R), on real engines in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import LayerTier, cold_rig, parts_of, teach
from rig import QWEN2_5_VL, Linked, Page, Part, Rig, apart
from torch import Tensor

from infra.families import FAMILIES, Family
from kvstore.library import Library
from kvstore.operator.apply import relocate
from kvstore.settings import LibrarySettings
from kvstore.tiers.memory import MemoryTier
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.scheduler.cost_model import ForwardCostModel
from prefill_workers.sequence import LinkSequence, Run, complement

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " and then say what follows."]
MORE = ["A word before. ", 3, 1, " quite some words between the two ", 2, " and then say what follows."]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "kimi_vl"])
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def engine(family: Family, only_engines: Any) -> PrefillEngine:
    return only_engines.get("float32", family)


@pytest.fixture
def worker(engine: PrefillEngine, family: Family, make_rig: Callable[..., Rig]) -> Rig:
    """A worker that has stored the images one by one: no patch of it fits a prompt of several."""
    return taught(make_rig(engine, family=family, orbit_chunks=0))


def taught(rig: Rig) -> Rig:
    for number in (1, 2, 3):
        rig.link([number])
    return rig


def stored(rig: Rig, linked: Linked, index: int) -> Tensor:
    """Canonical KV [layers, tokens, features] of a link's chunk."""
    canonical = rig.library.get_canonical(linked.plan.chunks[index].keys.canonical, "local")
    assert canonical is not None
    return canonical.kv


def deviation(rig: Rig, linked: Linked, exact: Linked, index: int) -> Tensor:
    """How far each token of a chunk is from its canonical KV in the second layer of an exact link: [tokens]."""
    chunk = linked.plan.chunks[index]
    moved = relocate(stored(rig, linked, index), chunk.start_position, rig.engine.layout)
    return (exact.chunk_kv(index)[1] - moved[1]).pow(2).sum(-1).sqrt()


def composed(rig: Rig, linked: Linked) -> Tensor:
    """What a link's KV must be, made with the engine's primitives: canonical KV written, then its runs computed."""
    s = linked.plan.sequence
    blocks = range(1, 2 + len(s) // rig.engine.block_size)
    sequence = LinkSequence(s.token_ids, s.positions, blocks, s.embedded)
    reused = []
    for i, chunk in enumerate(linked.plan.chunks):
        moved = relocate(stored(rig, linked, i), chunk.start_position, rig.engine.layout)
        rig.engine.write_kv(moved, rig.engine.slots(blocks, chunk.span.start, chunk.span.stop))
        reused += complement(chunk.selected, chunk.span.stop, chunk.span.start)
    rig.engine.forward([(sequence, complement(reused, len(s)))])
    return rig.engine.read_kv(blocks, 0, len(s))


@pytest.mark.parametrize("mode", ["mpic-0", "cacheblend-0"])
def test_no_token_selected_is_full_reuse_bit_for_bit(worker: Rig, mode: str):
    linked, blind = worker.link(PAGES, mode), worker.link(PAGES, "full-reuse")
    assert linked.points == ["selected", "selected"]
    assert torch.equal(linked.kv, blind.kv)
    assert torch.equal(linked.logprobs, blind.logprobs)
    assert linked.result.tokens_computed == blind.result.tokens_computed


@pytest.mark.parametrize("mode", ["mpic-4096", "cacheblend-100"])
def test_all_tokens_selected_is_exact(worker: Rig, mode: str):
    linked, exact, blind = (worker.link(MORE, which) for which in (mode, "exact", "full-reuse"))
    assert linked.points == ["selected"] * 3
    assert apart(linked.kv, exact.kv) < 1e-5
    assert apart(blind.kv, exact.kv) > 1e-2, "reuse must lose something, or this test shows nothing"
    assert (linked.result.tokens_reused, linked.result.tokens_computed) == (0, len(linked.plan.sequence))


@pytest.mark.parametrize("mode", ["mpic-1", "mpic-20", "cacheblend-15", "cacheblend-60"])
def test_a_link_computes_the_selected_tokens_and_the_text_in_one_forward(worker: Rig, mode: str):
    exact, before = worker.link(MORE, "exact"), worker.loop.stats()
    linked = worker.link(MORE, mode)
    kind, amount = mode.split("-")
    counts = []
    for i, chunk in enumerate(linked.plan.chunks):
        tokens = len(chunk.span)
        count = min(int(amount), tokens) if kind == "mpic" else -(-tokens * int(amount) // 100)
        counts.append(count)
        assert sum(map(len, chunk.selected)) == count
        assert linked.result.chunks[i].reason == f"mode {mode}: {count} of {tokens} tokens computed in context"
        if kind == "mpic":
            assert chunk.selected == (Run(chunk.span.start, chunk.span.start + count),)
        else:
            mask = torch.zeros(len(linked.plan.sequence), dtype=torch.bool)
            for run in chunk.selected:
                mask[run.start : run.stop] = True
            chosen = mask[chunk.span.start : chunk.span.stop]
            apart_by = deviation(worker, linked, exact, i)
            assert float(apart_by[chosen].min()) >= float(apart_by[~chosen].max()) - 1e-6

    chunks = sum(len(chunk.span) for chunk in linked.plan.chunks)
    assert linked.result.tokens_reused == chunks - sum(counts)
    assert linked.result.tokens_computed == len(linked.plan.sequence) - chunks + sum(counts)
    stats = worker.loop.stats()
    assert stats.forwards == before.forwards + 1
    assert stats.forwards_partial == before.forwards_partial + (kind == "cacheblend")
    assert stats.tokens_forwarded == before.tokens_forwarded + linked.result.tokens_computed
    assert apart(linked.kv, composed(worker, linked)) < 1e-6


def test_documents_are_selected_from_too(only_engines: Any, make_rig: Callable[..., Rig]):
    text = FAMILIES["qwen2"]
    rig = make_rig(only_engines.get("float32", text), family=text)
    pages: list[Part] = ["See ", Page(1), " and ", Page(2), " and then say what follows."]
    for number in (1, 2):
        rig.link([Page(number)])
    exact = rig.link(pages, "exact")
    for mode in ("mpic-7", "cacheblend-30"):
        linked = rig.link(pages, mode)
        assert linked.points == ["selected", "selected"]
        assert apart(linked.kv, composed(rig, linked)) < 1e-6
        assert 0 < linked.result.tokens_reused < sum(len(chunk.span) for chunk in linked.plan.chunks)
    assert apart(rig.link(pages, "mpic-4096").kv, exact.kv) < 1e-5


def test_what_was_computed_in_part_teaches_nothing(worker: Rig):
    formed, kept = worker.compiler.formed, [stored(worker, worker.link([n], "exact"), 0).clone() for n in (1, 2)]
    for mode in ("mpic-20", "mpic-4096", "cacheblend-40", "cacheblend-100"):
        linked = worker.link(PAGES, mode)
        assert linked.points == ["selected", "selected"]
        assert not worker.library.has("patch", linked.plan.chunks[1].keys.own_patch, "local")
        assert all(torch.equal(stored(worker, linked, i), kept[i]) for i in range(2))
    assert worker.compiler.formed == formed
    assert worker.link(PAGES, "auto").points == ["patched", "recomputed"]  # before the first chunk there was none


@pytest.mark.parametrize("mode", ["mpic-20", "cacheblend-40", "full-reuse"])
def test_a_new_chunk_is_kept_but_forms_no_patch_behind_one_that_is_not_exact(worker: Rig, mode: str):
    point = "relocated" if mode == "full-reuse" else "selected"
    first = worker.link([4, " and ", 1, "?"], mode)
    assert first.points == ["encoded", point]
    assert worker.library.has("patch", first.plan.chunks[0].keys.own_patch, "local")
    behind = worker.link([1, " and ", 0, "?"], mode)
    assert behind.points == [point, "encoded"]
    assert not worker.library.has("patch", behind.plan.chunks[1].keys.own_patch, "local")
    assert worker.link([1, " and ", 0, "?"], mode).points == [point, point]
    assert worker.link([1, " and ", 0, "?"], "auto").points == ["patched", "recomputed"]


def test_links_of_all_modes_share_one_forward(worker: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        worker.loop._scheduler, "cost_model", ForwardCostModel(fixed=10_000.0)
    )  # a forward of one's own is dear: all join
    modes = ["auto", "mpic-20", "cacheblend-15", "exact", "cacheblend-60", "full-reuse", "mpic-0", "off"]
    worker.link(MORE, "exact")  # computed whole: whatever there is to learn
    serial = [worker.link(MORE, mode) for mode in modes]
    plans = [worker.plan(MORE, mode) for mode in modes]
    for plan in plans:
        for chunk in plan.chunks:
            if chunk.lookup is not None:
                chunk.lookup.found()
    before = worker.loop.stats()
    with worker.loop._wake:  # the loop sees all of them at once
        futures = [worker.loop.submit(plan) for plan in plans]
    results = [future.result(60) for future in futures]
    stats = worker.loop.stats()
    assert (stats.forwards, stats.forwards_partial) == (before.forwards + 1, before.forwards_partial + 1)
    for plan, result, alone in zip(plans, results, serial, strict=True):
        linked = worker.finish(plan, result)
        assert [chunk.selected for chunk in linked.plan.chunks] == [chunk.selected for chunk in alone.plan.chunks]
        assert apart(linked.kv, alone.kv) < 1e-5


def test_a_small_token_budget_changes_nothing(worker: Rig, engine: PrefillEngine, family: Family, make_rig):
    small = taught(make_rig(engine, family=family, budget=50))
    for mode in ("mpic-20", "cacheblend-40"):
        assert apart(small.link(MORE, mode).kv, worker.link(MORE, mode).kv) < 1e-5
    assert small.loop.stats().forwards_partial > worker.loop.stats().forwards_partial == 1


def test_a_chunk_whose_embeddings_are_gone_is_computed_and_they_are_kept_again(
    make_rig: Callable[..., Rig], only_engines
):
    engine, tier = only_engines.get("float32"), MemoryTier()
    settings = LibrarySettings(directory=None, memory_bytes=0)
    rig = taught(make_rig(engine, library=Library(settings, engine.fingerprint, [tier])))
    for entry in list(tier.entries("")):
        if "/embedding/" in entry.key:
            tier.delete(entry.key)
    assert rig.link(PAGES, "mpic-0").points == ["selected", "selected"], "no token of them is computed"
    without = rig.link(PAGES, "mpic-20")
    assert without.points == ["encoded", "encoded"]
    assert "no embeddings" in without.result.chunks[0].reason
    assert rig.link(PAGES, "mpic-20").points == ["selected", "selected"]


@pytest.mark.parametrize("mode", ["mpic-20", "cacheblend-40"])
def test_layers_are_not_written_while_they_come_in(
    mode: str, make_rig: Callable[..., Rig], only_engines: Any, tmp_path: Path
):
    engine = only_engines.get("float32")
    held = LayerTier(teach(engine, QWEN2_5_VL, tmp_path)[0])
    rig = cold_rig(make_rig, engine, QWEN2_5_VL, held, patience=0)
    plan = rig.plan(parts_of(QWEN2_5_VL), mode)
    future = rig.loop.submit(plan)
    assert not future.done()
    held.held.set()
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["selected"] * 3
    assert rig.loop.stats().forwards_by_layer == 0
    again = rig.link(parts_of(QWEN2_5_VL), mode)
    assert apart(linked.kv, again.kv) < 1e-5
