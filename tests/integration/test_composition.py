"""Composed patches on a real engine: a set never seen before is linked by the weighted sum of its members' patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import Linked, Rig
from torch import Tensor

from kvstore.operator.apply import relocate
from kvstore.operator.patch import Patch, PatchKind
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import PatchRecord
from prefill_workers.link.compose import attention_weights, measured_weights, weighted_sum
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.link.linker import Linker
from prefill_workers.link.token_selection import MEASURED_LAYER
from prefill_workers.model_card import FILE
from prefill_workers.modes import Mode, OperatingPoint
from prefill_workers.protocol import LinkRequest
from prefill_workers.settings import FidelitySettings, Weighing
from serving.config import OrbitServeConfig

SET = [1, "and", 2, "or", 4, "?"]
SUMMED = ["patched", "patched", "composed"]


def taught(rig: Rig, *sets: list[int]) -> None:
    """Link sets of pages behind one another, and wait until the patches of all their orders are stored."""
    for pages in sets:
        rig.link([*pages, "?"])


def keys(rig: Rig) -> ChunkKeys:
    """Of the last chunk of SET."""
    segments = rig.render(SET)
    return rig.linker.keys(LinkRequest("test", segments.token_ids, segments.chunks, Mode.AUTO))[2]


def parts(rig: Rig) -> list[Patch]:
    """The patches behind nothing and behind each page."""
    found = [rig.library.get_patch(key, "local") for key in keys(rig).parts]
    return [record.patch for record in found if isinstance(record, PatchRecord)]


def delta(rig: Rig, linked: Linked) -> Tensor:
    """The last chunk's deficit [layers, tokens, features] in a link."""
    record = rig.library.get_canonical(keys(rig).canonical, "local")
    return relocate(linked.chunk_kv(2), -linked.plan.chunks[2].start_position, rig.engine.layout) - record.kv


def test_a_new_set_is_linked_by_the_weighted_sum_of_its_pairs(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    partial = rig.loop.stats().forwards_partial
    linked = rig.link(SET)
    assert linked.points == SUMMED
    assert linked.result.chunks[2].reason == "weighted sum of the stored pair patches behind 2 antecedents"
    assert rig.loop.stats().forwards_partial == partial + 1
    base, one, two = parts(rig)
    assert (one.kind, two.kind) == (PatchKind.pair, PatchKind.pair)
    exact = delta(rig, rig.link(SET, "off"))
    weights = measured_weights(base, [one, two], exact[[MEASURED_LAYER]])
    assert weights.shape == (2, exact.shape[1])
    expected = weighted_sum(base, [one, two], weights[:, None])
    torch.testing.assert_close(delta(rig, linked), expected.dense(), rtol=1e-3, atol=1e-3)
    assert (linked.result.chunks[2].rank, linked.result.chunks[2].kind) == (expected.rank, PatchKind.composed)
    plain = one.dense() + two.dense() - base.dense()
    assert (delta(rig, linked) - exact)[1:].norm() < (plain - exact)[1:].norm()


@pytest.mark.parametrize("budget", [4096, 50])
def test_a_new_set_is_weighed_by_attention_without_a_forward_through_any_layer(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, budget: int
):
    rig = make_rig(compose_up_to=3, weigh_by=Weighing.ATTENTION, budget=budget)
    taught(rig, [1, 2], [1, 4], [2, 4])
    monkeypatch.setattr(rig.engine, "forward_first", None)
    linked = rig.link(SET)
    assert linked.points == SUMMED

    base, *pairs = parts(rig)
    expected = weighted_sum(base, pairs, attention_weights(rig.attended(SET))[:, None])
    torch.testing.assert_close(delta(rig, linked), expected.dense(), rtol=1e-3, atol=1e-3)
    exact = delta(rig, rig.link(SET, "off"))
    assert (expected.dense() - exact)[1:].norm() < (pairs[0].dense() + pairs[1].dense() - base.dense() - exact)[
        1:
    ].norm()


def test_attention_weighs_sums_while_other_requests_choose_tokens(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3, weigh_by=Weighing.ATTENTION)
    taught(rig, [1, 2], [1, 4], [2, 4])
    alone = [rig.link(SET), rig.link(SET, "cacheblend-30")]
    rig.linker.forgets.start("", "local")
    plans = [rig.plan(SET), rig.plan(SET, "cacheblend-30")]
    results = [rig.loop.submit(plan) for plan in plans]
    for one, plan, result in zip(alone, plans, results, strict=True):
        together = rig.finish(plan, result.result(60))
        assert together.points == one.points
        torch.testing.assert_close(together.kv, one.kv, rtol=1e-4, atol=1e-4)


def test_attention_that_is_not_told_is_refused():
    latent = SimpleNamespace(tells_attention=False, spec=SimpleNamespace(model="some/model"))
    with pytest.raises(ValueError, match=r"prefill\.weigh_by: attention: some/model"):
        Linker(latent, None, None, weigh_by=Weighing.ATTENTION)


def test_a_stored_chunk_between_two_composed_ones_is_left_as_it_is(make_rig: Callable[..., Rig]):
    """The partial forward computes the composed chunks' first layers, and nothing of what loads have written."""
    rig = make_rig(compose_up_to=4, orbit_chunks=2)
    pages = [1, 2, 4, 3, 5]
    taught(rig, pages, [1, 2], [1, 4], [2, 4], *([page, 5] for page in pages[:4]))
    stored = rig.link([*pages, "?"])
    assert stored.points == ["patched"] * 5
    for index in (2, 4):
        assert rig.library.delete("patch", stored.plan.chunks[index].keys.own_patch, "local")
    linked = rig.link([*pages, "?"])
    reasons = [chunk.reason.split()[0] for chunk in linked.result.chunks]
    assert reasons == ["stored", "stored", "weighted", "stored", "weighted"]
    assert torch.equal(linked.chunk_kv(3), stored.chunk_kv(3))
    assert not torch.equal(linked.chunk_kv(4), stored.chunk_kv(4))


def test_a_sum_without_stored_embeddings_takes_them_from_the_request(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    measured = rig.link(SET)
    rig.library.delete("embedding", keys(rig).embedding, "local")
    rig.linker.forgets.start("", "local")  # the weights
    again = rig.link(SET)  # the rig encodes what the plan asks for
    assert again.points == SUMMED
    assert rig.library.has("embedding", keys(rig).embedding, "local"), "nobody encodes these pixels again"
    torch.testing.assert_close(again.kv, measured.kv, rtol=1e-4, atol=1e-4)


def test_the_same_order_is_weighed_once_and_needs_no_embeddings_again(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    weighed = rig.link(SET)
    partial = rig.loop.stats().forwards_partial
    rig.library.delete("embedding", keys(rig).embedding, "local")
    again = rig.link(SET)
    assert again.plan.chunks[2].embeddings is None  # nobody was asked for them
    assert rig.loop.stats().forwards_partial == partial
    assert torch.equal(again.kv, weighed.kv)
    assert again.result.chunks == weighed.result.chunks


def test_weights_are_one_orders_and_gone_with_what_their_tenant_deletes(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    rig.link(SET)
    patch_key, known = keys(rig).own_patch, rig.linker._weights
    assert known.get("local", patch_key) is not None
    assert known.get("other", patch_key) is None
    partial = rig.loop.stats().forwards_partial
    rig.link([2, 1, 4, "?"])
    assert rig.loop.stats().forwards_partial == partial + 1
    assert len(known) == 2
    rig.linker.forgets.start(rig.link(SET).plan.request.chunks[0].content, "other")
    rig.link(SET)
    assert len(known) == 2
    rig.linker.forgets.start(rig.link(SET).plan.request.chunks[0].content, "local")
    partial = rig.loop.stats().forwards_partial
    rig.link(SET)
    assert rig.loop.stats().forwards_partial == partial + 1


@pytest.mark.parametrize("point", [OperatingPoint.COMPOSED, OperatingPoint.PATCHED])
def test_weights_are_measured_anew_after_their_point_was_switched_off(
    make_rig: Callable[..., Rig], point: OperatingPoint
):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    rig.link(SET)
    rig.linker.fidelity.disable(point, "a test")
    assert rig.linker.fidelity.allow(point)
    partial = rig.loop.stats().forwards_partial
    assert rig.link(SET).points == SUMMED
    assert rig.loop.stats().forwards_partial == partial + 1


def corrupt(rig: Rig, keys: Sequence[str]) -> list[PatchRecord]:
    """Turn the directions of stored patches in the layers below that which tells their weights; the honest records."""
    honest = [record for key in keys if (record := rig.library.get_patch(key, "local")) is not None]
    for record in honest:
        segments = []
        for part in record.patch.segments:
            kept = sum(part.ranks[: MEASURED_LAYER + 1])
            turned = torch.cat([part.right[:kept], -4.0 * part.right[kept:].flip(1)])
            segments.append(replace(part, right=turned))
        rig.library.put(replace(record, patch=replace(record.patch, segments=tuple(segments))))
    rig.settle()
    return honest


def test_sums_that_are_wrong_are_switched_off_alone_until_an_operator_allows_them(make_rig: Callable[..., Rig]):
    watched = FidelitySettings(share=1.0, window=4, minimum=2, bounds={"composed": 0.2})
    rig = make_rig(compose_up_to=3, orbit_chunks=2, subset_forwards=1, fidelity=watched)
    taught(rig, [1, 2], [1, 4], [2, 4])
    honest = corrupt(rig, keys(rig).parts)
    for _ in range(2):
        assert rig.link(SET).points == SUMMED
    assert not rig.fidelity.allows(OperatingPoint.COMPOSED)
    without = rig.link(SET)
    assert without.points == ["patched", "patched", "recomputed"], "what is stored of other chunks goes on"
    assert without.result.chunks[2].reason == (
        "no patch stored for these antecedents, and operating point composed is switched off"
    )
    own = rig.link(SET)
    assert own.result.chunks[2].reason == "stored own patch for these antecedents", "as compiled"
    assert own.points == ["patched"] * 3

    for record in honest:
        rig.library.put(record)
    rig.library.delete("patch", keys(rig).own_patch, "local")
    assert rig.fidelity.allow(OperatingPoint.COMPOSED)
    assert rig.link(SET).points == SUMMED
    now = {status.point: status for status in rig.fidelity.status()}
    assert (now[OperatingPoint.COMPOSED].checks, now[OperatingPoint.COMPOSED].rolling_checks) == (3, 1)
    assert now[OperatingPoint.COMPOSED].rolling_kl < 0.1, "of parts that are sound, by weights that were measured anew"


def test_deep_patches_cannot_be_weighed_and_are_not_composed(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3, form=PatchForm(None, depth=0.25))
    taught(rig, [1, 2], [1, 4], [2, 4])
    assert rig.link(SET).points == ["patched", "patched", "recomputed"]


def test_the_patch_of_a_set_goes_before_the_sum(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2, 4])
    linked = rig.link([2, 1, 4, "?"])
    assert linked.result.chunks[2].reason == "stored orbit patch for these antecedents"


def test_no_sum_is_served_of_larger_sets_of_missing_pairs_or_where_it_is_switched_off(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=2)
    taught(rig, [1, 2], [1, 4], [2, 4])
    assert rig.link([1, 2, 3, "?"]).points == ["patched", "patched", "encoded"]  # 3 behind 1 and 2: no pairs
    rig.linker.compose_up_to = 1
    assert rig.link([2, 1, 4, "?"], "auto").points == ["patched", "patched", "recomputed"]


def test_a_model_whose_sums_were_measured_to_lose_answers_is_never_summed(make_rig: Callable[..., Rig], tmp_path: Path):
    (tmp_path / FILE).write_text('{"compose_up_to": 0}')
    config = OrbitServeConfig.model_validate({"model": {"path": tmp_path}})
    limits = config.prefill.compile_limits(config.compose_up_to)
    rig = make_rig(compose_up_to=config.compose_up_to, compiles=limits)
    taught(rig, [1, 2], [1, 4], [2, 4])
    assert keys(rig).parts == ()
    assert rig.link(SET).points == ["patched", "patched", "recomputed"]
    rig.link([3, 1, 2, 4, "?"])
    forwards = rig.loop.stats().compiled.forwards
    assert forwards.keys() == {"orders", "prefix_subsets"}, forwards


def test_a_set_with_a_page_twice_is_not_composed(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=4)
    taught(rig, [1, 2], [1, 4], [2, 4])
    assert rig.link([1, 1, 4, "?"]).points[2] == "recomputed"
