"""Composed patches on a real engine: a set that was never seen is linked by the sum of its members' pair patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rig import Rig

from kvstore.patch import PatchKind, relocate
from prefill_workers.plan import LinkRequest
from prefill_workers.policies import Mode


def taught(rig: Rig, *sets: list[int]) -> None:
    """Link sets of pages behind one another, and wait until the patches of all their orders are stored."""
    for pages in sets:
        rig.link([*pages, "?"])


def test_a_new_set_is_linked_by_the_sum_of_its_pairs(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=3)
    taught(rig, [1, 2], [1, 4], [2, 4])
    linked = rig.link([1, 2, 4, "?"])
    assert linked.points == ["patched"] * 3
    assert linked.result.chunks[2].reason == "sum of the stored pair patches behind 2 antecedents"
    segments = rig.render([1, 2, 4, "?"])
    keys = rig.linker.keys(LinkRequest("test", segments.token_ids, segments.chunks, Mode.AUTO))[2]
    base, one, two = (rig.library.get_patch(key, "local").patch for key in keys.parts)
    assert (one.kind, two.kind) == (PatchKind.pair, PatchKind.pair)
    canonical = rig.library.get_canonical(keys.canonical, keys.owner).kv
    expected = canonical + one.dense() + two.dense() - base.dense()
    position = linked.plan.chunks[2].start_position
    torch.testing.assert_close(
        linked.chunk_kv(2), relocate(expected, position, rig.engine.layout), rtol=1e-4, atol=1e-4
    )


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


def test_a_set_with_a_page_twice_is_not_composed(make_rig: Callable[..., Rig]):
    rig = make_rig(compose_up_to=4)
    taught(rig, [1, 2], [1, 4], [2, 4])
    assert rig.link([1, 1, 4, "?"]).points[2] == "recomputed"
