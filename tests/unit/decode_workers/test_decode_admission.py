"""Admission: whole sequences only, in order, and nothing is ever lost."""

from __future__ import annotations

import asyncio

import pytest

from decode_workers.admission import Admission


async def hold(admission: Admission, tokens: int, sequences: int, release: asyncio.Event, log: list[int]) -> None:
    async with admission.admit(tokens, sequences):
        log.append(tokens)
        await release.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_held_for_every_token_of_every_sequence():
    admission = Admission(blocks=20, block_size=16)
    async with admission.admit(tokens=33, sequences=2):
        assert admission.reserved == 2 * (3 + 1)  # three blocks, and one for a partial copy
        assert admission.running == 2
    assert (admission.reserved, admission.running) == (0, 0)


async def test_what_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"needs 102 KV blocks; the decode worker has 20: lower max_tokens or n"):
        async with Admission(20, 16).admit(tokens=800, sequences=2):
            pass


async def test_those_who_wait_are_served_in_order_even_if_a_later_one_would_fit():
    admission, release, log = Admission(10, 16), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, tokens, 1, release, log)) for tokens in (112, 96, 1)]
    await turns()
    assert log == [112]
    assert admission.waiting == 2
    release.set()
    await asyncio.gather(*tasks)
    assert log == [112, 96, 1]
    assert (admission.reserved, admission.running, admission.waiting) == (0, 0, 0)


async def test_what_runs_and_what_waits_is_counted_in_sequences():
    admission, release, log = Admission(10, 16), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, 16, sequences, release, log)) for sequences in (4, 3)]
    await turns()
    assert (admission.running, admission.waiting) == (4, 3)
    release.set()
    await asyncio.gather(*tasks)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_cancelled_wait_leaves_no_trace_and_lets_the_next_one_in():
    admission, release, log = Admission(10, 16), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(admission, tokens, 1, release, log)) for tokens in (64, 128, 1)]
    await turns()
    assert log == [64]
    tasks[1].cancel()
    await turns()
    assert log == [64, 1], "the small one fits as soon as the large one is gone"
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.reserved, admission.running, admission.waiting) == (0, 0, 0)


async def test_a_turn_granted_to_somebody_who_just_left_is_passed_on():
    admission, log = Admission(10, 16), []
    first, rest = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold(admission, 128, 1, first, log))
    await turns()
    leaver = asyncio.create_task(hold(admission, 100, 1, rest, log))
    next_one = asyncio.create_task(hold(admission, 101, 1, rest, log))
    await turns()
    first.set()
    await holder  # grants the leaver's turn ...
    leaver.cancel()  # ... before it could take it
    await turns()
    assert 101 in log
    rest.set()
    await asyncio.gather(leaver, next_one, return_exceptions=True)
    assert (admission.reserved, admission.running, admission.waiting) == (0, 0, 0)


async def test_a_wait_that_is_cancelled_in_the_turn_in_which_it_is_passed_over_is_just_cancelled():
    admission, log = Admission(10, 16), []
    first, rest = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold(admission, 128, 1, first, log))
    await turns()
    leaver = asyncio.create_task(hold(admission, 100, 1, rest, log))
    await turns()
    first.set()
    leaver.cancel()  # the holder's task runs first, and finds its wait cancelled
    with pytest.raises(asyncio.CancelledError):
        await leaver
    await holder
    assert (admission.reserved, admission.running, admission.waiting) == (0, 0, 0)


async def test_room_that_is_still_in_use_behind_whoever_left_is_nobodys():
    admission, ended = Admission(10, 16), asyncio.Event()

    async def until() -> None:
        await ended.wait()

    async with admission.admit(64, 1) as room:
        room.until = until
    assert (admission.reserved, admission.running) == (5, 0)
    waiting = asyncio.create_task(hold(admission, 128, 1, ended, log := []))
    await turns()
    assert log == []
    ended.set()
    await waiting
    assert log == [128]
    assert (admission.reserved, admission.running, admission.waiting) == (0, 0, 0)


async def test_the_longest_sequence_is_admitted_and_no_longer_one():
    admission = Admission(10, 16)
    async with admission.admit(admission.longest, 1):
        pass
    with pytest.raises(ValueError, match="11 KV blocks"):
        async with admission.admit(admission.longest + 1, 1):
            pass
