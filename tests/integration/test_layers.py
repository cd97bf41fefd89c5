"""KV that a forward writes layer by layer while it comes in: whatever comes late or damaged, the answer stands.

`test_families` has the case in which all goes well, for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from layers import LayerTier, cold_rig, parts_of, teach
from rig import QWEN2_5_VL, Linked, Rig
from waiting import wait_for

from kvstore.tiers.base import Tier
from kvstore.tiers.memory import MemoryTier
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.plan import ChunkState
from prefill_workers.protocol import Sampling
from prefill_workers.scheduler.cost_model import ForwardCostModel

pytestmark = pytest.mark.engine

PARTS = parts_of(QWEN2_5_VL)
Lesson = tuple[Tier, dict[int, float]]


@pytest.fixture(scope="module")
def lesson(fp32: PrefillEngine, tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    return teach(fp32, QWEN2_5_VL, tmp_path_factory.mktemp("taught"))


@pytest.fixture
def tier(lesson: Lesson) -> Iterator[LayerTier]:
    whole = MemoryTier()  # what one test damages is moved aside
    for entry in lesson[0].entries():
        blob = lesson[0].get(entry.key)
        assert blob is not None
        whole.put(entry.key, [blob])
    tier = LayerTier(whole)
    yield tier
    tier.held.set()


@pytest.fixture
def cold(make_rig: Callable[..., Rig], fp32: PrefillEngine, tier: LayerTier) -> Callable[[float], Rig]:
    return lambda patience: cold_rig(make_rig, fp32, QWEN2_5_VL, tier, patience)


def off_by(linked: Linked, lesson: Lesson) -> float:
    """Largest difference in log-probability from vLLM's own prefill."""
    return max(abs(float(linked.logprobs[token]) - value) for token, value in lesson[1].items())


def test_one_forward_computes_everything_beside_the_loads(cold: Callable[[float], Rig], lesson: Lesson):
    rig = cold(30.0)
    linked = rig.link(PARTS)
    assert linked.points == ["patched"] * 3
    assert off_by(linked, lesson) < 1e-4
    stats = rig.loop.stats()
    assert stats.forwards_by_layer == 1
    assert stats.tokens_forwarded == linked.result.tokens_computed


def test_layers_that_come_too_late_are_waited_for_as_chunks(
    cold: Callable[[float], Rig], tier: LayerTier, lesson: Lesson
):
    rig = cold(0.0)
    plan = rig.plan(PARTS, sampling=Sampling())
    future = rig.loop.submit(plan)
    wait_for(lambda: rig.loop.stats().forwards_by_layer == 1)
    wait_for(lambda: all(chunk.state is ChunkState.LOADING for chunk in plan.chunks))  # the forward is counted before
    assert not future.done()
    tier.held.set()
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["patched"] * 3
    assert off_by(linked, lesson) < 1e-4
    assert linked.result.first_token == int(linked.logprobs.argmax()), "drawn again behind what had come late"
    assert rig.loop.stats().forwards_by_layer == 1, "once late, layers are not waited for again"


@pytest.mark.parametrize("index", range(3))
def test_what_was_taken_from_a_damaged_record_is_computed_again(
    cold: Callable[[float], Rig], tier: LayerTier, lesson: Lesson, index: int
):
    rig = cold(30.0)
    key = rig.plan(PARTS, "off").chunks[index].keys.canonical
    tier.damaged[key] = b""  # in the last layer
    linked = rig.link(PARTS, sampling=Sampling())
    assert linked.result.first_token == int(linked.logprobs.argmax())
    assert linked.points == ["recomputed" if i == index else "patched" for i in range(3)]
    assert off_by(linked, lesson) < 1e-4
    assert rig.loop.stats().forwards_by_layer == 1
    assert rig.library.stats().corrupt == 1


def test_what_does_not_even_fit_the_model_is_left_alone_until_it_is_known_to_be_damaged(
    cold: Callable[[float], Rig], tier: LayerTier, lesson: Lesson
):
    rig = cold(30.0)
    key = rig.plan(PARTS, "off").chunks[1].keys.canonical
    tier.damaged[key] = rb"inverse_frequencies\":[1.0,0."
    tier.held.set()
    linked = rig.link(PARTS)
    assert linked.points == ["patched", "recomputed", "patched"]
    assert off_by(linked, lesson) < 1e-4
    assert rig.loop.stats().forwards_by_layer == 0
    assert rig.library.stats().corrupt == 1


def test_a_link_cancelled_while_its_layers_come_in_leaves_nothing(cold: Callable[[float], Rig], tier: LayerTier):
    rig = cold(0.0)
    future = rig.loop.submit(rig.plan(PARTS))
    wait_for(lambda: rig.loop.stats().forwards_by_layer == 1)
    future.cancel()
    wait_for(lambda: rig.loop.stats().blocks_free == rig.loop.stats().blocks_total and not rig.library._pins)
    tier.held.set()
    assert rig.link(PARTS).points == ["patched"] * 3


def test_a_worker_that_knows_no_pace_waits_for_whole_chunks(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tier: LayerTier, lesson: Lesson
):
    rig = cold_rig(make_rig, fp32, QWEN2_5_VL, tier, 0.0)
    rig.loop._scheduler.cost_model = ForwardCostModel()
    tier.held.set()
    assert off_by(rig.link(PARTS), lesson) < 1e-4
    assert rig.loop.stats().forwards_by_layer == 0
