"""Background work in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from prefill_workers.patches.scratch import Pieces, ResumableTask, Scratch, aside, at_once


def counted(seen: list[int], pieces: int) -> Pieces[str]:
    for number in range(pieces - 1):
        seen.append(number)
        yield
    seen.append(pieces - 1)
    return "done"


def test_work_goes_on_a_piece_at_a_time_and_its_seconds_leave_out_the_pauses():
    seen: list[int] = []
    work = ResumableTask(counted(seen, 3))
    overs = []
    for _ in range(3):
        overs.append(work.go_on())
        time.sleep(0.05)
    assert (overs, seen, work.result) == ([False, False, True], [0, 1, 2], "done")
    assert work.seconds < 0.05


def test_all_pieces_at_once():
    seen: list[int] = []
    assert at_once(counted(seen, 4)) == "done"
    assert seen == [0, 1, 2, 3]


def test_what_a_piece_raises_comes_out_of_the_step_that_took_it():
    def broken() -> Pieces[None]:
        yield
        raise OSError("injected")

    work = ResumableTask(broken())
    assert not work.go_on()
    with pytest.raises(OSError, match="injected"):
        work.go_on()


def test_scratch_blocks_hold_so_many_tokens():
    assert Scratch(range(5, 9), 16, lambda left: 100).tokens == 64


@pytest.fixture
def others() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_an_answer_that_takes_long_is_waited_for_in_short_pieces(others: Executor):
    answers = threading.Event()
    work = ResumableTask(aside(others, lambda name: answers.wait(30) and name, "it"))
    try:
        assert not any(work.go_on() for _ in range(5))
        assert work.seconds < 5
    finally:
        answers.set()
    while not work.go_on():
        pass
    assert work.result == "it"


def test_an_answer_that_is_there_ends_no_piece():
    class AtOnce(Executor):
        def submit(self, call: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            answer.set_result(call(*arguments, **more))
            return answer

    assert ResumableTask(aside(AtOnce(), abs, -1)).go_on()


def test_what_the_other_thread_raises_comes_out_of_the_piece(others: Executor):
    def silent() -> None:
        raise TimeoutError("injected")

    with pytest.raises(TimeoutError, match="injected"):
        at_once(aside(others, silent))
