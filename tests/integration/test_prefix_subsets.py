"""Prefix subsets that are compiled ahead, by a real engine: the next request over one is all patched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import Page, Rig

pytestmark = pytest.mark.engine


def test_subsets_of_a_served_set_are_patched_in_its_order_before_anybody_asks(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0, subset_forwards=8)
    rig.link([1, 2, 3, "What?"])
    subset = rig.link([1, 3, "And here?"])
    assert subset.points == ["patched", "patched"]
    assert [str(outcome.kind) for outcome in subset.result.chunks] == ["own", "own"]
    exact = rig.link([1, 3, "And here?"], "exact")
    blind = rig.link([1, 3, "And here?"], "full-reuse")

    def loss(linked) -> float:
        return float((exact.logprobs.exp() * (exact.logprobs - linked.logprobs)).sum())

    assert loss(subset) < loss(blind)
    assert rig.link([3, 1, "And so?"]).points == ["patched", "recomputed"], "only in the order that was served"


def test_only_as_many_forwards_as_are_allowed_are_spent(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0, subset_forwards=1)
    rig.link([Page(1), Page(2), Page(3), "What?"])
    assert rig.compiler.formed == 3 + 2, "pages 2 and 3, the longest, without page 1"
    assert rig.link([Page(2), Page(3), "And?"]).points == ["patched", "patched"]


def test_without_forwards_nothing_is_compiled_ahead(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=0, subset_forwards=0)
    rig.link([1, 2, "What?"])
    assert rig.compiler.formed == 2
    assert rig.link([2, "And here?"]).points == ["recomputed"]


def test_a_patch_that_found_no_room_with_the_compiler_is_sent_again(make_rig: Callable[..., Rig]):
    rig, sent = make_rig(orbit_chunks=0, subset_forwards=8), []
    rig.harvester._submit_patch = lambda job: bool(sent.append(job))  # a queue that is full
    rig.link([1, "What?"])
    assert sent
    assert not rig.harvester._sent
    rig.harvester._submit_patch = rig.compiler.compile
    rig.link([1, "What?"])
    assert rig.link([1, "What?"]).points == ["patched"]


def test_a_patch_that_is_still_being_compiled_is_not_sent_again(make_rig: Callable[..., Rig]):
    """A subset is read without the request's text: its patches must not take the place of those that know it."""
    rig, sent = make_rig(orbit_chunks=0, subset_forwards=8), []
    rig.harvester._submit_patch = sent.append  # a compiler that is slow
    rig.link(["First ", 1, " then ", 2, " then ", 3, "What?"])
    assert len(sent) > 3
    assert len({job.key for job in sent}) == len(sent)
