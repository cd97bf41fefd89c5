"""Loads beside compute on a real engine: whatever arrives when, or never, the answer is the one of a full prefill."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

import pyarrow as pa
import pytest
from rig import Linked, Part, Rig, all_free
from waiting import wait_for

from kvstore.errors import TierUnavailable
from kvstore.library import Library
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.faults import WrappedTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.paths import record_path
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.link.keys import ChunkKeys
from prefill_workers.link.lookups import Lookup
from prefill_workers.link.plan import LinkPlan
from prefill_workers.modes import Text
from prefill_workers.protocol import LinkRequest, PixelsNeeded, PrefetchRequest
from serving.frontend.prompt_segments import image_delimiters

pytestmark = pytest.mark.engine

TEXT = "quite a few words that stand between two pictures, more than a forward takes along for nothing "
SHORT: list[Part] = ["See ", 1, " what?"]
PAGES: list[Part] = [TEXT, 1, TEXT, 2, TEXT, 3, "What follows?"]


class GatedTier(WrappedTier):
    """Holds reads of the records named in `gates` until theirs opens; then those in `failing` fail, `absent` miss."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gates: dict[str, threading.Event] = {}
        self.waiting: set[str] = set()
        self.failing: set[str] = set()
        self.absent: set[str] = set()
        self.asked = threading.Event()  # whether it was asked what it has
        self.answers = threading.Event()  # whether it tells
        self.answers.set()

    def hold(self, *keys: str) -> list[threading.Event]:
        """Closed gates for the records with these keys."""
        self.gates.update({key: threading.Event() for key in keys})
        return [self.gates[key] for key in keys]

    def get(self, key: str) -> pa.Buffer | None:
        name = key.rpartition("/")[2].removesuffix(".arrow")
        if name in self.gates:
            self.waiting.add(name)
            assert self.gates[name].wait(30)
        if name in self.failing:
            raise TierUnavailable("injected: the connection dropped")
        return None if name in self.absent else super().get(key)

    def contains(self, key: str) -> bool:
        self.asked.set()
        assert self.answers.wait(30)
        return not any(name in key for name in self.absent) and super().contains(key)

    def reads(self, name: str) -> int:
        """Reads of the record with this key that went through."""
        return sum(action == "get" and name in key for action, key in self.calls)


@pytest.fixture(scope="module")
def taught(fp32: PrefillEngine, tmp_path_factory: pytest.TempPathFactory) -> Tier:
    """A tier that holds what linking PAGES teaches: canonical KV, embeddings and full-rank patches, keyed by their text
    and not.
    """
    tier = MemoryTier()
    library = Library(LibrarySettings(directory=None), fp32.fingerprint, [tier])
    rig = Rig(fp32, tmp_path_factory.mktemp("unused"), library=library, orbit_chunks=0)
    for parts in (PAGES, [part for part in PAGES if part != TEXT]):
        rig.link(parts)
    rig.close()
    return tier


@pytest.fixture(scope="module")
def reference(fp32: PrefillEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """vLLM's own multimodal prefill of PAGES: log-probabilities of the next token."""
    rig = Rig(fp32, tmp_path_factory.mktemp("reference"))
    try:
        return rig.vllm_logprobs(PAGES)
    finally:
        rig.close()


@pytest.fixture
def tier(taught: Tier) -> Iterator[GatedTier]:
    tier = GatedTier(taught)
    yield tier
    for gate in (tier.answers, *tier.gates.values()):
        gate.set()


@pytest.fixture
def cold(make_rig: Callable[..., Rig], fp32: PrefillEngine, tier: GatedTier) -> Callable[..., Rig]:
    """Builds a worker whose memory is empty and whose tier is gated; it learns nothing."""

    def make(load_timeout_s: float = 30.0, **loop_options) -> Rig:
        settings = LibrarySettings(directory=None, tier_failures=1000, load_timeout_s=load_timeout_s)
        return make_rig(library=Library(settings, fp32.fingerprint, [tier]), learns=False, **loop_options)

    return make


def asked(rig: Rig, parts: list[Part] = PAGES, text: Text = Text.AUTO) -> LinkRequest:
    segments = rig.render(parts)
    return LinkRequest("test", segments.token_ids, segments.chunks, text=text)


def keys_of(rig: Rig, text: Text = Text.AUTO) -> list[ChunkKeys]:
    """Under which keys the chunks of PAGES are stored."""
    return rig.linker.keys(asked(rig, text=text))


def prefetched(rig: Rig, request: LinkRequest) -> PrefetchRequest:
    """The prefetch that the ingress sends ahead of a request."""
    contents = tuple(chunk.content for chunk in request.chunks)
    return PrefetchRequest(contents, image_delimiters(rig.renderer, rig.delimiters))


def off_by(linked: Linked, reference: dict[int, float]) -> float:
    """Largest difference in log-probability from vLLM's own prefill."""
    return max(abs(float(linked.logprobs[token]) - value) for token, value in reference.items())


def settled(plan: LinkPlan, index: int) -> bool:
    return not plan.chunks[index].is_loading


# Hits


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_loads_may_end_in_any_order(cold, tier: GatedTier, reference: dict[int, float], order: tuple[int, ...]):
    rig = cold()
    gates = tier.hold(*(keys.canonical for keys in keys_of(rig)))
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    for i in order:
        assert not future.done()
        gates[i].set()
        wait_for(lambda i=i: settled(plan, i))
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["patched"] * 3
    assert off_by(linked, reference) < 1e-4


def test_what_stands_before_a_load_is_computed_while_it_goes_on(cold, tier: GatedTier, reference: dict[int, float]):
    rig = cold()
    (gate,) = tier.hold(keys_of(rig)[1].canonical)
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    wait_for(lambda: settled(plan, 0) and settled(plan, 2))
    first, second, _ = (chunk.span for chunk in plan.chunks)
    wait_for(lambda: rig.loop.stats().tokens_forwarded == second.start - len(first))
    assert not future.done()
    gate.set()
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["patched"] * 3
    assert {"plan", "queue", "place", "forward"} <= linked.result.stages_ms.keys()
    assert off_by(linked, reference) < 1e-4


def test_a_few_tokens_wait_for_the_load_behind_them(cold, tier: GatedTier):
    """A forward of their own would cost more than it hides."""
    rig = cold()
    (gate,) = tier.hold(keys_of(rig)[0].canonical)
    plan = rig.plan(SHORT)
    future = rig.loop.submit(plan)
    wait_for(lambda: rig.loop.stats().running == 1)
    gate.set()
    rig.loop.abandon(future.result(30).lease)
    assert rig.loop.stats().forwards == 1


def test_a_link_that_waits_holds_up_nobody_else(cold, tier: GatedTier):
    rig = cold()
    (gate,) = tier.hold(keys_of(rig)[0].canonical)
    waits, other = rig.plan(PAGES), rig.plan(["Only text."])
    future = rig.loop.submit(waits)
    rig.loop.abandon(rig.loop.submit(other).result(30).lease)
    assert not future.done()
    gate.set()
    rig.loop.abandon(future.result(30).lease)


def test_two_links_of_the_same_chunks_share_every_read(cold, tier: GatedTier, reference: dict[int, float]):
    rig = cold()
    keys = keys_of(rig)
    gates = tier.hold(*(key.canonical for key in keys))
    plans = [rig.plan(PAGES) for _ in range(2)]
    futures = [rig.loop.submit(plan) for plan in plans]
    for gate in gates:
        gate.set()
    for plan, future in zip(plans, [future.result(30) for future in futures], strict=True):
        assert off_by(rig.finish(plan, future), reference) < 1e-4
    assert [tier.reads(key.canonical) for key in keys] == [1, 1, 1]


def test_a_prefetch_loads_before_the_prompt_is_there(cold, tier: GatedTier):
    """Of a worker that has just started, under the keys of the plan. Whatever no text keys: that is not known yet."""
    rig = cold()
    request, keys = asked(rig), keys_of(rig, Text.FREE)
    rig.linker.prefetch(prefetched(rig, request))
    wait_for(lambda: all(rig.library._resident(path_of_canonical(rig, key)) for key in keys))
    wait_for(lambda: all(lookup.done() for _, lookup in rig.linker._lookups._kept.values()))  # they ask tiers till then
    tier.failing |= {name for key in keys for name in (key.canonical, key.own_patch)}
    asked_before = len(tier.calls)
    assert rig.link(PAGES, text=Text.FREE).points == ["patched"] * 3
    assert [tier.reads(key.canonical) for key in keys] == [1, 1, 1]
    assert not [call for call in tier.calls[asked_before:] if call[0] in ("get", "contains")], "it was asked already"


def path_of_canonical(rig: Rig, keys: ChunkKeys) -> str:
    return record_path("canonical", keys.canonical, rig.engine.fingerprint, "local")


# Misses


def test_a_prefetch_tells_which_images_will_have_to_be_encoded(cold, tier: GatedTier):
    rig = cold()
    first, second, _ = keys_of(rig, Text.FREE)
    tier.hold(first.canonical)
    tier.absent |= {second.own_patch, second.embedding}
    request = prefetched(rig, asked(rig))
    contents = request.contents
    lacking = rig.linker.prefetch(
        replace(request, contents=(*contents, "never seen"), documents=frozenset({contents[2]}))
    )
    assert {content: lacks.result(30) for content, lacks in lacking.items()} == {
        contents[0]: False,  # on its way, which is known before it has come
        contents[1]: True,
        "never seen": True,
    }
    assert tier.waiting == {first.canonical}


def test_a_missing_image_is_known_while_the_others_still_load(cold, tier: GatedTier, reference: dict[int, float]):
    rig = cold()
    first, second, third = keys_of(rig)
    tier.hold(first.canonical, third.canonical)
    tier.absent |= {second.own_patch, second.embedding}
    request, segments = asked(rig), rig.render(PAGES)
    with pytest.raises(PixelsNeeded) as needed:
        rig.linker.plan(request)
    assert needed.value.chunks == (1,)
    wait_for(lambda: {first.canonical, third.canonical} <= tier.waiting)
    (pixels,) = rig.engine.encode([segments.items[1]])
    plan = rig.linker.plan(request, {1: pixels})
    future = rig.loop.submit(plan)
    for name in (third.canonical, first.canonical):
        tier.gates[name].set()
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["patched", "encoded", "patched"]
    assert off_by(linked, reference) < 1e-4
    assert [tier.reads(key.canonical) for key in (first, third)] == [1, 1], "the second plan joined the first's loads"


@pytest.mark.parametrize("fault", ["failing", "absent"])
@pytest.mark.parametrize("index", range(3))
def test_a_load_that_fails_late_leaves_its_chunk_to_be_computed(
    cold, tier: GatedTier, reference: dict[int, float], fault: str, index: int
):
    rig = cold()
    key = keys_of(rig)[index].canonical
    (gate,) = tier.hold(key)
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    wait_for(lambda: all(settled(plan, i) for i in range(3) if i != index))
    getattr(tier, fault).add(key)
    gate.set()
    linked = rig.finish(plan, future.result(30))
    assert linked.points == ["recomputed" if i == index else "patched" for i in range(3)]
    assert "no canonical KV could be loaded" in linked.result.chunks[index].reason
    assert not any(chunk.missed for chunk in linked.result.chunks), "every patch is stored"
    assert off_by(linked, reference) < 1e-4


def test_a_load_that_takes_too_long_is_one_that_failed(cold, tier: GatedTier, reference: dict[int, float]):
    rig = cold(load_timeout_s=0.2)
    tier.hold(keys_of(rig)[1].canonical)
    linked = rig.link(PAGES)
    assert linked.points == ["patched", "recomputed", "patched"]
    assert not linked.result.chunks[1].missed
    assert off_by(linked, reference) < 1e-4
    assert rig.library.stats().timeouts == 1


def test_a_tier_that_does_not_answer_holds_a_plan_up_once_and_not_once_for_every_chunk(
    cold, tier: GatedTier, monkeypatch: pytest.MonkeyPatch
):
    rig = cold(load_timeout_s=0.5)
    tier.answers.clear()
    waited: list[float] = []
    is_coming = Lookup.is_coming
    monkeypatch.setattr(Lookup, "is_coming", lambda self, seconds: waited.append(seconds) or is_coming(self, seconds))
    with pytest.raises(PixelsNeeded) as needed:
        rig.linker.plan(asked(rig))
    assert needed.value.chunks == (0, 1, 2)
    first, *others = waited
    assert 0 < first <= 1.0
    assert len(others) == 2
    assert max(others) < 0.1


def test_pixels_are_asked_for_late_if_only_a_load_that_failed_could_have_spared_them(
    cold, tier: GatedTier, reference: dict[int, float]
):
    rig = cold()
    second = keys_of(rig)[1]
    (gate,) = tier.hold(second.canonical)
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    tier.failing |= {second.canonical, second.embedding}
    gate.set()
    with pytest.raises(PixelsNeeded) as needed:
        future.result(30)
    assert needed.value.chunks == (1,)
    wait_for(lambda: all_free(rig))
    segments = rig.render(PAGES)
    again = rig.linker.plan(plan.request, {1: rig.engine.encode([segments.items[1]])[0]})
    linked = rig.finish(again, rig.loop.submit(again).result(30))
    assert linked.points == ["patched", "encoded", "patched"]
    assert off_by(linked, reference) < 1e-4


# Ends


def test_a_plan_that_is_dropped_lets_go_of_its_pins(cold):
    rig = cold()
    rig.plan(PAGES)
    wait_for(lambda: not rig.library._pins)


def test_a_cancelled_link_lets_go_of_blocks_and_pins_while_its_loads_go_on(cold, tier: GatedTier):
    rig = cold()
    keys = keys_of(rig)
    (gate,) = tier.hold(keys[1].canonical)
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    wait_for(lambda: settled(plan, 0))
    assert rig.library._is_pinned(keys[1].canonical)
    future.cancel()
    wait_for(lambda: all_free(rig) and not rig.library._pins)
    gate.set()
    assert rig.link(PAGES).points == ["patched"] * 3
    assert tier.reads(keys[1].canonical) == 1, "what was loaded was not lost"


def test_a_lease_does_not_end_while_its_link_still_loads(cold, tier: GatedTier, reference: dict[int, float]):
    now = [0.0]
    rig = cold(lease_seconds=1.0, clock=lambda: now[0])
    gates = tier.hold(*(key.canonical for key in keys_of(rig)[1:]))
    plan = rig.plan(PAGES)
    future = rig.loop.submit(plan)
    wait_for(lambda: rig.loop.stats().running == 1)
    now[0] = 100.0
    gates[0].set()
    wait_for(lambda: settled(plan, 1))  # the loop has turned since
    gates[1].set()
    result = future.result(30)
    assert rig.loop.stats().leases_expired == 0
    assert off_by(rig.finish(plan, result), reference) < 1e-4


def test_a_plan_pins_what_it_uses_until_it_is_placed(cold, tier: GatedTier):
    rig = cold()
    keys = keys_of(rig)
    (gate,) = tier.hold(keys[2].canonical)
    plan = rig.plan(PAGES)
    assert all(rig.library._is_pinned(key.canonical) and rig.library._is_pinned(key.own_patch) for key in keys)
    future = rig.loop.submit(plan)
    gate.set()
    result = future.result(30)
    assert not rig.library._pins
    rig.loop.abandon(result.lease)


def test_links_that_load_are_refused_and_freed_when_the_loop_stops(cold, tier: GatedTier):
    rig = cold()
    (gate,) = tier.hold(keys_of(rig)[2].canonical)
    future = rig.loop.submit(rig.plan(PAGES))
    wait_for(lambda: rig.loop.stats().running == 1)
    stopping = threading.Thread(target=rig.loop.stop)
    stopping.start()
    gate.set()
    stopping.join(30)
    assert future.result(1).tokens_reused > 0, "what runs is finished"
    assert not rig.loop.alive()


def test_links_do_not_wait_while_what_was_learnt_is_looked_up_in_a_silent_tier(
    make_rig: Callable[..., Rig], fp32: PrefillEngine
):
    tier = GatedTier(MemoryTier())
    settings = LibrarySettings(directory=None, tier_failures=1000, load_timeout_s=60)
    rig = make_rig(library=Library(settings, fp32.fingerprint, [tier]))
    first, second = rig.plan([TEXT, 1, "What?"]), rig.plan([TEXT, 2, "What?"], "off")
    try:
        tier.answers.clear()
        tier.asked.clear()
        lease = rig.loop.submit(first).result(30).lease
        rig.loop.hasten(60)
        assert tier.asked.wait(10)
        rig.loop.abandon(lease)
        rig.loop.abandon(rig.loop.submit(second).result(10).lease)
        rig.wait_until_free(10)
        assert not rig.loop.stats().leases, "what is looked up holds no blocks"
        assert rig.loop.stats().harvest
    finally:
        tier.answers.set()
    rig.settle()
    assert rig.link([TEXT, 1, "What?"]).points == ["patched"]
