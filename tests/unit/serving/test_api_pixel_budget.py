"""Who may decode how many pixels, and when."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serving.api.pixel_budget import PixelBudget, PixelReservation


async def test_who_waits_goes_in_the_order_of_coming_and_what_ends_anywhere_is_given_back():
    budget = PixelBudget(10)
    first = [await budget.take(pixels) for pixels in (3, 5)]
    order, held = list[str](), list[PixelReservation]()

    async def asked(name: str, pixels: int) -> None:
        held.append(await budget.take(pixels))
        order.append(name)

    waiting = [asyncio.create_task(asked(name, pixels)) for name, pixels in (("large", 6), ("small", 1))]
    await asyncio.sleep(0)
    assert (order, budget.held) == ([], 8)
    ending = threading.Thread(target=first.pop)
    ending.start()
    ending.join()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert (order, budget.held) == (["large", "small"], 3 + 6 + 1)


async def test_who_leaves_while_waiting_makes_room_for_the_next():
    budget = PixelBudget(10)
    held = [await budget.take(8)]
    large, small = (asyncio.create_task(budget.take(pixels)) for pixels in (6, 2))
    await asyncio.sleep(0)
    large.cancel()
    held.append(await asyncio.wait_for(small, 5))
    assert (len(held), budget.held) == (2, 10)
    with pytest.raises(asyncio.CancelledError):
        await large


async def test_who_leaves_just_when_its_turn_comes_gives_back_what_it_was_given():
    budget = PixelBudget(10)
    held = [await budget.take(8)]
    waiting = asyncio.create_task(budget.take(6))
    await asyncio.sleep(0)
    held.clear()
    await asyncio.sleep(0)  # it was told so, and has not run since
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.held == 0


async def test_more_than_there_is_goes_alone():
    budget = PixelBudget(10)
    held = [await budget.take(1)]
    waiting = asyncio.create_task(budget.take(11))
    await asyncio.sleep(0)
    assert not waiting.done()
    held.clear()
    held.append(await asyncio.wait_for(waiting, 5))
    assert budget.held == 10
