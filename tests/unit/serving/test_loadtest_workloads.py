"""What load tests ask: the same for the same seed, and of the shape that each workload promises."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from serving.loadtest.workloads import WORKLOADS, Ask, Picture, Reply, WorkloadError, workload


def pictures(ask: Ask) -> list[int]:
    return [part.number for _, parts in ask.messages for part in parts if isinstance(part, Picture)]


def texts(ask: Ask) -> str:
    return " ".join(part for _, parts in ask.messages for part in parts if isinstance(part, str))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_requests_and_another_seed_others(name: str):
    def asks(seed: int) -> list[Ask]:
        made = workload(name, seed=seed)
        return [made.ask() for _ in range(30)]

    assert asks(5) == asks(5)
    assert asks(5) != asks(6)


def test_pixels_depend_on_seed_and_number_alone():
    drawn = np.asarray(Picture(1, 2, 4, 3).draw())
    assert drawn.shape == (3 * 28, 4 * 28, 3)
    np.testing.assert_array_equal(drawn, np.asarray(Picture(1, 2, 4, 3).draw()))
    assert (drawn != np.asarray(Picture(1, 3, 4, 3).draw())).any()
    assert (drawn != np.asarray(Picture(2, 2, 4, 3).draw())).any()


def test_mrag_takes_different_pages_and_popular_ones_more_often():
    made = workload("mrag", pages=10, retrieved=3, zipf=1.0)
    asks = [made.ask() for _ in range(2000)]
    assert all(len(set(pictures(ask))) == 3 for ask in asks)
    counts = Counter(page for ask in asks for page in pictures(ask))
    by_page = [counts[page] for page in range(10)]
    assert by_page[0] > 1.2 * by_page[1] > 1.2 * by_page[4]
    firsts = Counter(pictures(ask)[0] for ask in asks)
    assert firsts[0] == pytest.approx(counts[0] / 3, rel=0.15)  # the order tells nothing of how popular a page is
    alike = workload("mrag", pages=10, retrieved=3, zipf=0)
    spread = Counter(page for _ in range(2000) for page in pictures(alike.ask()))
    assert max(spread.values()) < 1.25 * min(spread.values())


def test_mrag_takes_as_many_pages_of_the_steepest_distribution():
    made = workload("mrag", pages=1000, retrieved=5, zipf=50)
    assert all(set(pictures(made.ask())) == set(range(5)) for _ in range(20))


def test_novel_never_repeats_a_set_and_uses_every_page():
    made = workload("novel", pages=12, retrieved=3)
    asks = [made.ask() for _ in range(180)]  # of 220 sets
    sets = {frozenset(pictures(ask)) for ask in asks}
    assert len(sets) == 180
    assert frozenset.union(*sets) == frozenset(range(12))


def test_novel_says_when_no_set_is_left():
    made = workload("novel", pages=3, retrieved=2)
    for _ in range(3):
        made.ask()
    with pytest.raises(WorkloadError, match="take more pages"):
        made.ask()


def test_an_agents_window_slides_with_actions_between_the_screenshots():
    made = workload("agent", sessions=2, steps=8, window=3, lookback=0.0)
    asks = [made.ask() for _ in range(2 * 8 + 2)]
    first, second = ([pictures(ask) for ask in asks[start:16:2]] for start in (0, 1))
    assert first == [list(range(max(0, step - 2), step + 1)) for step in range(8)]
    assert not {page for shown in first for page in shown} & {page for shown in second for page in shown}
    third = {page for ask in asks[16:] for page in pictures(ask)}  # new sessions, new screens
    assert not third & {page for shown in first + second for page in shown}
    assert [role for role, _ in asks[14].messages] == ["user", "assistant"] * 3 + ["user"]
    assert asks[14].messages[:2] == asks[12].messages[:2], "a session finds its head again"
    assert all(isinstance(parts[0], Picture) for role, parts in asks[14].messages[2::2]), "nothing else in front"
    assert len({ask.conversation for ask in asks[:16]}) == 2
    assert not {ask.conversation for ask in asks[16:]} & {ask.conversation for ask in asks[:16]}
    actions = [parts[0] for ask in asks for role, parts in ask.messages if role == "assistant" and parts != ("ready",)]
    assert all(20 <= len(str(action).split()) <= 200 for action in actions)
    assert len({len(str(action).split()) for action in actions}) > 8
    assert asks[14].messages[3] == asks[12].messages[5], "what stays is the same word for word"


def test_an_agent_looks_back_and_may_keep_the_words_of_what_has_left():
    made = workload("agent", sessions=1, steps=9, window=3, lookback=1.0, keep_actions=True, longest_action=20)
    asks = [made.ask() for _ in range(9)]
    for step in range(3, 9):
        shown = pictures(asks[step])
        window = range(step - 2, step + 1)
        assert [page for page in shown if page in window][-3:][0] == step - 2
        assert shown[-1] < window[0], "it asks for a screenshot behind its newest one"
        assert texts(asks[step]).count(", left") == window[0]
        actions = [
            parts[0] for role, parts in asks[step].messages[2:] if role == "assistant" and "once more" not in parts[0]
        ]
        assert len(actions) == step
    with pytest.raises(WorkloadError, match="longest_action is 3, shortest_action 20"):
        workload("agent", longest_action=3)


def test_turns_of_a_chat_hold_what_was_said_before_and_bring_images_in_two():
    made = workload("turns", chats=3)
    asks = [made.ask() for _ in range(3 * 8 + 1)]
    chat = asks[1:24:3]
    assert [len(pictures(ask)) for ask in chat] == [1, 1, 1, 1, 2, 2, 2, 2]
    for earlier, later in pairwise(chat):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        (reply,) = later.messages[len(earlier.messages)][1]
        assert isinstance(reply, Reply)
        assert reply.request == earlier.number
    assert {ask.max_tokens for ask in asks} == {128}
    assert len({ask.conversation for ask in chat}) == 1
    assert asks[24].conversation not in {ask.conversation for ask in asks[:24]}
    assert len(asks[24].messages) == 1
    assert not {*pictures(asks[24])} & {page for ask in asks[:24] for page in pictures(ask)}
    assert pictures(workload("turns", image_turns=0).ask()) == []


def test_image_first_asks_new_questions_about_the_same_image():
    made = workload("image-first")
    asks = [made.ask() for _ in range(5)]
    assert {tuple(pictures(ask)) for ask in asks} == {(0,)}
    assert all(isinstance(ask.messages[0][1][0], Picture) for ask in asks)


def test_chat_interleaves_text_and_images_in_turns_of_both_sides():
    made = workload("chat", gallery=6, images=4, turns=3)
    asks = [made.ask() for _ in range(100)]
    assert {len(pictures(ask)) for ask in asks} == {1, 2, 3, 4}
    assert {len(ask.messages) for ask in asks} == {1, 3, 5}
    for ask in asks:
        assert [role for role, _ in ask.messages][::2] == ["user"] * (len(ask.messages) // 2 + 1)
        for role, parts in ask.messages:
            kinds = [isinstance(part, Picture) for part in parts]
            assert kinds == [False] * (role == "assistant") or kinds[:-1] == [False, True] * (len(kinds) // 2)


def test_one_shot_images_come_once():
    made = workload("one-shot", images=2)
    seen = [page for _ in range(50) for page in pictures(made.ask())]
    assert len(set(seen)) == len(seen) == 100


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_two_requests_have_the_same_words(name: str):
    made = workload(name)
    asked = [texts(made.ask()) for _ in range(60)]
    assert len(set(asked)) == 60


def test_shapes_of_a_trace_replace_a_workloads_own():
    ask = workload("mrag", system="Read with care.").ask(images=5, max_tokens=3)
    assert (len(pictures(ask)), ask.max_tokens, ask.messages[0]) == (5, 3, ("system", ("Read with care.",)))
    assert len(pictures(workload("mrag", pages=4).ask(images=9))) == 4


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [("mgar", {}, "mrag, agent"), ("mrag", {"page": 3}, "page"), ("agent", {"lookback": "2"}, "lookback")],
)
def test_wrong_names_and_parameters_are_named(name: str, parameters: dict[str, str], words: str):
    with pytest.raises(WorkloadError, match=words):
        workload(name, **parameters)
