"""Sessions on a real engine: windows that slide without a forward over what stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from rig import Linked, Part, Rig, apart
from torch import Tensor

from kvstore.operator.apply import relocate
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.protocol import SessionRef, Survivors
from prefill_workers.sequence import LinkSequence, Run, complement, union

pytestmark = pytest.mark.engine

ACTIONS = [
    " the first click went to the menu on the left of the page and opened it. ",
    " then the pointer moved on to the second entry and nothing happened at all. ",
    " after a while the third entry was tried, and it was the right one to try. ",
    " so the form that came up was filled in with what the user had asked for. ",
    " and at the end of it all the button at the bottom of the form was found. ",
]
SESSION, KEPT = SessionRef("agent"), SessionRef("kept", survivors=Survivors.KEEP)


def window(first: int, count: int = 3) -> list[Part]:
    """Screenshots from `first` on, with the actions between them."""
    return [part for n in range(first, first + count) for part in (n, ACTIONS[n % 5])][:-1]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A worker that compiles nothing ahead."""
    return make_rig(orbit_chunks=0)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def segments_of(linked: Linked) -> list[Run]:
    """Chunks and texts of a prompt in which no text was cut."""
    chunks = [Run(span.start, span.stop) for span in linked.plan.request.chunks]
    return sorted([*chunks, *complement(chunks, len(linked.plan.sequence))], key=lambda run: run.start)


def moved(before: Linked, run: Run, after: Linked, to: Run, rig: Rig) -> tuple[Run, Tensor]:
    """KV of a segment of one link, relocated to where it stands in another."""
    first = [linked.plan.sequence.positions.reshape(-1, len(linked.plan.sequence))[0] for linked in (before, after)]
    delta = int(first[1][to.start]) - int(first[0][run.start])
    return to, relocate(before.kv[:, run.start : run.stop], delta, rig.engine.layout)


def computed_behind(rig: Rig, linked: Linked, kept: Sequence[tuple[Run, Tensor]]) -> tuple[Tensor, Tensor]:
    """KV and next-token log-probabilities of a prompt of which some KV is given and the rest computed."""
    engine, whole = rig.engine, linked.plan.sequence
    blocks = range(1, 2 + len(whole) // engine.block_size)
    for run, kv in kept:
        engine.write_kv(kv, engine.slots(blocks, run.start, run.stop))
    sequence = LinkSequence(whole.token_ids, whole.positions, blocks, whole.embedded)
    logits = engine.logits([(sequence, complement(union([run for run, _ in kept]), len(whole)))])
    return engine.read_kv(blocks, 0, len(whole)), logits[-1].log_softmax(-1)


def test_a_window_slides_without_a_forward_over_what_stays(rig: Rig):
    first = rig.link(window(0), session=KEPT)
    assert first.points == ["encoded"] * 3
    second = rig.link(window(1), session=KEPT)
    assert second.points == ["survived", "survived", "encoded"]
    outcome = second.result.session
    assert outcome is not None
    assert (outcome.prefix, outcome.survived, outcome.computed, outcome.new) == (1, 3, 1, 2), (
        "the template's tail stays"
    )

    old, new = segments_of(first), segments_of(second)
    kept = [(old[0], new[0]), *zip(old[3:6], new[1:4], strict=True)]  # head; page, action, page
    stays = sum(len(to) for _, to in kept)
    assert outcome.tokens_reused == stays
    assert second.result.tokens_computed == len(second.plan.sequence) - stays

    given = [moved(first, run, second, to, rig) for run, to in kept]
    kv, logprobs = computed_behind(rig, second, given)
    assert apart(second.kv, kv) < 1e-6
    assert difference(second.logprobs, logprobs) < 1e-4
    assert int(second.logprobs.argmax()) == int(logprobs.argmax())

    exact = rig.link(window(1), "exact")
    assert apart(second.chunk_kv(0), exact.chunk_kv(0)) > 1e-3, "a survivor knows what left"


def test_kept_kv_is_relocated_from_where_it_was_computed_however_often_a_window_slides(rig: Rig):
    links = [rig.link(window(n), session=KEPT) for n in range(3)]
    assert links[2].points == ["survived", "survived", "encoded"]
    old, new = segments_of(links[0]), segments_of(links[2])
    _, kv = moved(links[0], old[5], links[2], new[1], rig)  # the third page of the first window, the first of the third
    assert apart(links[2].kv[:, new[1].start : new[1].stop], kv) < 1e-6


def test_what_stays_takes_kv_that_idle_time_made_behind_what_will_stand_in_front_of_it(rig: Rig):
    rig.link(window(0), session=SESSION)
    links = [rig.link(window(n), session=SESSION) for n in (1, 2)]
    for n, linked in enumerate(links, 1):
        assert linked.points == ["prefix", "prefix", "encoded"]
        outcome = linked.result.session
        assert outcome is not None
        assert (outcome.prefix, outcome.refreshed) == (4, 3), "the oldest page, the words behind it, and the next page"
        exact = rig.link(window(n), "exact")
        assert apart(linked.kv, exact.kv) < 1e-5
        assert difference(linked.logprobs, exact.logprobs) < 1e-4
        assert linked.result.tokens_computed < len(linked.plan.sequence) / 2
    assert rig.loop.stats().harvest_failures == 0


def test_in_bfloat16_a_survivor_is_rounded_once_however_often_a_window_slides(
    make_rig: Callable[..., Rig], bf16: PrefillEngine
):
    rig = make_rig(bf16, orbit_chunks=0)
    links = [rig.link(window(n), session=KEPT) for n in range(3)]
    assert links[2].points == ["survived", "survived", "encoded"]
    old, new = segments_of(links[0]), segments_of(links[2])
    _, kv = moved(links[0], old[5], links[2], new[1], rig)
    assert apart(links[2].kv[:, new[1].start : new[1].stop], kv) < 4e-3


def test_with_survivors_exact_a_session_equals_exact(rig: Rig):
    careful = SessionRef("careful", survivors=Survivors.EXACT)
    rig.link(window(0), session=careful)
    slid, exact = rig.link(window(1), session=careful), rig.link(window(1), "exact")
    assert "survived" not in slid.points
    assert difference(slid.logprobs, exact.logprobs) < 1e-4
    again = rig.link(window(1), session=careful)
    assert again.points == ["prefix"] * 3, "what is exact where it stands is taken"
    assert again.result.tokens_computed == 1
    assert difference(again.logprobs, exact.logprobs) < 1e-4
    grown = [*window(1), ACTIONS[3], 5]
    assert rig.link(grown, "exact", session=careful).points == ["prefix"] * 3 + ["encoded"]


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_with_survivors_exact_no_chunk_is_patched(make_rig: Callable[..., Rig], keeps_prefixes: bool):
    rig = make_rig(orbit_chunks=0, keeps_prefixes=keeps_prefixes)
    short = [0, " then ", 1, " then ", 2]
    rig.link(short)
    moved = ["See ", *short]
    assert "patched" in rig.link(moved).points
    careful = SessionRef("careful", survivors=Survivors.EXACT)
    asked, exact = rig.link(moved, session=careful), rig.link(moved, "exact")
    assert set(asked.points) == {"recomputed"}
    assert difference(asked.logprobs, exact.logprobs) < 1e-4


def test_exact_takes_nothing_approximate_from_a_session(rig: Rig):
    rig.link(window(0), session=SESSION)
    rig.link(window(1), session=SESSION)
    asked, exact = rig.link(window(1), "exact", session=SESSION), rig.link(window(1), "exact")
    assert not {"survived", "patched", "composed"} & set(asked.points)
    assert difference(asked.logprobs, exact.logprobs) < 1e-4


def test_what_stands_behind_something_it_never_saw_is_computed(rig: Rig):
    rig.link(window(1), session=SESSION)
    recalled_in_front = rig.link([0, ACTIONS[0], *window(1)], session=SESSION)
    assert set(recalled_in_front.points).isdisjoint({"survived", "prefix"})
    outcome = recalled_in_front.result.session
    assert outcome is not None
    assert (outcome.prefix, outcome.survived, outcome.computed, outcome.new) == (1, 0, 6, 2)
    exact = rig.link([0, ACTIONS[0], *window(1)], "exact")
    assert difference(recalled_in_front.logprobs, exact.logprobs) < 1e-4


def test_what_comes_back_is_linked_by_its_patch_behind_few_words(rig: Rig):
    def asked(first: int) -> list[Part]:
        return [first, " then ", first + 1, " then ", first + 2]

    for first in (0, 1):
        rig.link(asked(first), session=SESSION)
    recalled, exact = rig.link(asked(0), session=SESSION), rig.link(asked(0), "exact")
    assert recalled.points == ["patched"] * 3
    assert {str(chunk.kind) for chunk in recalled.result.chunks} == {"own"}
    outcome = recalled.result.session
    assert outcome is not None
    assert (outcome.prefix, outcome.survived, outcome.recalled) == (1, 0, 2), "the page and the words behind it"
    assert apart(recalled.kv, exact.kv) < 1e-4
