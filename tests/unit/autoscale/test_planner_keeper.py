"""The planner's keeper: a planner that is new is told to plan, one that has ended is made again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from autoscale import planner
from autoscale.planner import PlannerKeeper


class Actor:
    """A planner's handle; `told`: calls of `start`, which fail when `lives` is False."""

    def __init__(self) -> None:
        self.told, self.lives, self.ended = 0, True, False
        self.start = SimpleNamespace(remote=self._start)
        self.end = SimpleNamespace(remote=self._end)

    async def _start(self) -> None:
        if not self.lives:
            raise ActorDiedError()
        self.told += 1

    async def _end(self) -> None:
        self.ended = True


async def test_a_planner_that_is_new_is_told_to_plan_and_one_that_ended_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "_LOOK_S", 0.01)
    made: list[Any] = []

    def start() -> Any:
        if len(made) == 1 and not made[0].named:
            made[0].named = True
            raise ValueError("the name is taken still")
        made.append(Actor())
        made[-1].named = False
        return made[-1]

    keeper = PlannerKeeper(start)
    async with asyncio.timeout(5):
        while made[0].told < 2:
            await asyncio.sleep(0.01)
        made[0].lives = False
        while len(made) < 2 or not made[1].told:
            await asyncio.sleep(0.01)
    await keeper.end()
    assert made[1].ended
    assert not made[0].ended
