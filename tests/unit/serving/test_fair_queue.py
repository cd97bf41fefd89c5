"""Places for answers, shared fairly by tenants."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from serving.frontend.errors import OverloadedError
from serving.frontend.fair_queue import FairQueue


class Answers:
    """Answers that last until they are let go; `running` are the tenants of those that hold a place."""

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue
        self.running: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []

    async def begin(self, tenant: str, count: int = 1, choices: int = 1) -> None:
        for _ in range(count):
            leave = asyncio.Event()
            self._tasks.append((tenant, asyncio.create_task(self._answer(tenant, leave, choices)), leave))
        await asyncio.sleep(0)

    async def _answer(self, tenant: str, leave: asyncio.Event, choices: int) -> None:
        async with self._queue.place(tenant, choices):
            self.running.append(tenant)
            try:
                await leave.wait()
            finally:
                self.running.remove(tenant)

    async def end(self, tenant: str) -> None:
        """End the tenant's oldest answer; the next one takes its place."""
        for one in self._tasks:
            if one[0] == tenant:
                self._tasks.remove(one)
                one[2].set()
                await one[1]
                break
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def cancel(self, tenant: str) -> None:
        """Cancel the tenant's latest answer."""
        last = [one for one in self._tasks if one[0] == tenant][-1]
        self._tasks.remove(last)
        last[1].cancel()
        await asyncio.gather(last[1], return_exceptions=True)
        await asyncio.sleep(0)


async def test_a_tenant_that_asks_for_little_is_next_however_many_another_has_waiting():
    answers = Answers(FairQueue(places=4, most_of_one=4, most_waiting=100))
    await answers.begin("a", 50)
    await answers.begin("b")
    assert answers.running == ["a"] * 4
    await answers.end("a")
    assert Counter(answers.running) == {"a": 3, "b": 1}
    await answers.end("b")
    assert answers.running == ["a"] * 4


async def test_reserved_places_are_not_waited_for():
    answers = Answers(FairQueue(places=4, most_of_one=3, most_waiting=100))
    await answers.begin("a", 50)
    assert answers.running == ["a"] * 3
    await answers.begin("b")
    assert Counter(answers.running) == {"a": 3, "b": 1}


async def test_places_are_shared_by_weight():
    queue = FairQueue(places=6, most_of_one=6, most_waiting=100, weight=lambda tenant: 2.0 if tenant == "b" else 1.0)
    answers = Answers(queue)
    await answers.begin("c", 6)
    await answers.begin("a", 20)
    await answers.begin("b", 20)
    for _ in range(6):
        await answers.end("c")
    assert Counter(answers.running) == {"a": 2, "b": 4}
    assert (queue.held, queue.waiting) == (6, 34)


async def test_those_that_leave_while_they_wait_or_run_give_way():
    queue = FairQueue(places=1, most_of_one=1, most_waiting=100)
    answers = Answers(queue)
    await answers.begin("a", 3)
    await answers.cancel("a")
    assert (queue.held, queue.waiting) == (1, 1)
    await answers.end("a")
    await answers.cancel("a")
    assert (queue.held, queue.waiting) == (0, 0)
    await answers.begin("b")
    assert answers.running == ["b"]


async def test_a_place_that_is_granted_as_its_answer_leaves_is_passed_on():
    queue = FairQueue(places=1, most_of_one=1, most_waiting=100)
    leave = asyncio.Event()

    async def answer() -> None:
        async with queue.place("a"):
            await leave.wait()

    first, second, third = (asyncio.create_task(answer()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)  # the second has its turn, and has not run since
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    leave.set()
    await asyncio.wait_for(third, 1)
    assert (queue.held, queue.waiting) == (0, 0)


async def test_one_tenants_queue_is_bounded_and_anothers_open():
    answers = Answers(queue := FairQueue(places=1, most_of_one=1, most_waiting=2))
    await answers.begin("a", 3)
    with pytest.raises(OverloadedError, match="2 of your requests"):
        async with queue.place("a"):
            pass
    await answers.begin("b")
    assert queue.waiting == 3


async def test_an_answer_takes_a_place_for_each_of_its_choices_and_smaller_ones_do_not_pass_it():
    answers = Answers(queue := FairQueue(places=4, most_of_one=3, most_waiting=100))
    await answers.begin("a", choices=8)  # more than one tenant may hold
    assert queue.held == 3
    await answers.begin("b", choices=2)
    await answers.begin("c")
    assert (answers.running, queue.waiting) == (["a"], 3)
    await answers.end("a")
    assert (answers.running, queue.held, queue.waiting) == (["b", "c"], 3, 0)


async def test_one_that_leaves_while_it_waits_for_several_places_lets_the_others_pass():
    answers = Answers(queue := FairQueue(places=4, most_of_one=3, most_waiting=100))
    await answers.begin("a", choices=3)
    await answers.begin("b", choices=2)
    await answers.begin("c")
    await answers.cancel("b")
    assert (answers.running, queue.held, queue.waiting) == (["a", "c"], 4, 0)
