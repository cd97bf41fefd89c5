"""Disabled operating points across replicas, owned by the library's keeper.

| what happens                       | who acts        | how the others learn                                        |
|------------------------------------|-----------------|-------------------------------------------------------------|
| rolling KL passes a point's bound  | prefill replica | disabled there at once; `exchange` tells the keeper, which  |
|                                    |                 | persists it and tells every prefill replica                 |
| an operator allows a point         | keeper          | persisted, then told to every prefill replica               |
| a prefill replica starts           | prefill replica | `exchange` before it serves                                 |
| keeper or a replica was away       | prefill replica | `exchange` every few seconds, both ways                     |

Of two decisions about a point the later one holds, so that the order in which they arrive does not matter. A keeper
that is down stops nothing: replicas go on with what they know.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prefill_workers.fidelity.disabled_points import DisabledPoints, PointDecision
from serving.errors import RoleUnavailable
from serving.frontend.ray_calls import answers_of_all

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from prefill_workers.modes import OperatingPoint
    from prefill_workers.settings import FidelitySettings

logger = logging.getLogger(__name__)

_TELL_SECONDS = 10.0  # for prefill replicas to hear of a decision
_START_SECONDS = 30.0  # for a keeper that starts beside a prefill replica to answer it
_EXCHANGE_SECONDS = 5.0  # between two exchanges, and for the keeper's answer to one

Exchange = Callable[[Sequence[PointDecision]], Awaitable[Sequence[PointDecision]]]


class FidelityKeeper:
    """Owner of the decisions about operating points. Belongs to one event loop.

    Args:
        stored: where disabled points outlive the process.
        prefill: the role whose replicas serve at operating points.
    """

    def __init__(self, stored: DisabledPoints, prefill: DeploymentHandle) -> None:
        self._stored, self._prefill = stored, prefill
        self._decisions = {decision.point: decision for decision in stored.read()}
        self._telling: set[asyncio.Task[None]] = set()

    async def exchange(self, decisions: Sequence[PointDecision]) -> list[PointDecision]:
        """Take over a prefill replica's later decisions; returns all that are known here."""
        news = [decision for decision in decisions if self._take(decision)]
        if news:
            telling = asyncio.create_task(self._tell(news))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
        return list(self._decisions.values())

    async def allow(self, point: OperatingPoint) -> int:
        """Allow a point by an operator's word; returns on how many prefill replicas it was disabled.

        Raises:
            RoleUnavailable: a prefill replica did not answer. It learns of the decision with its next exchange.
        """
        known = self._decisions.get(point)
        later = 0.0 if known is None else math.nextafter(known.changed, math.inf)  # clocks of nodes differ
        decision = PointDecision(point, True, max(time.time(), later))
        try:  # told before it is known here: a replica that learnt of it by an exchange would not count
            answers = await self._broadcast("allow", point)
        finally:
            self._take(decision)
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise RoleUnavailable(f"{point} is allowed, and not every prefill replica has answered: {failed[0]}")
        return sum(answers)

    def _take(self, decision: PointDecision) -> bool:
        """Adopt a decision if it is later than what is known. Returns whether it changes anything."""
        known = self._decisions.get(decision.point) or PointDecision(decision.point, True, 0.0)
        if decision.changed <= known.changed:
            return False
        self._decisions[decision.point] = decision
        if decision.allowed == known.allowed:
            return False
        self._stored.write(decision)
        return True

    async def _tell(self, decisions: Sequence[PointDecision]) -> None:
        for answer in await self._broadcast("apply_decisions", decisions):
            if isinstance(answer, BaseException):
                logger.warning(
                    "a prefill replica has not heard yet which operating points are switched off: %s", answer
                )

    async def _broadcast(self, method: str, *arguments: object) -> list[Any]:
        """Answers or exceptions of all prefill replicas; none where none serves."""
        try:
            return await answers_of_all(self._prefill, method, *arguments, timeout_s=_TELL_SECONDS)
        except TimeoutError as error:
            return [error]


class PrefillFidelity:
    """Rolling fidelity of a prefill replica, in step with the keeper's decisions.

    Must be made on the replica's event loop.

    Args:
        exchange: `FidelityKeeper.exchange`, wherever the keeper is. May raise anything, or hang.

    Attributes:
        monitor: measures, and says which points are allowed.
    """

    def __init__(self, settings: FidelitySettings, exchange: Exchange) -> None:
        from prefill_workers.fidelity.monitor import Fidelity

        self._exchange, self._events = exchange, asyncio.get_running_loop()
        self._disabled = asyncio.Event()  # here, and the keeper does not know yet
        self._in_step = True
        self.monitor = Fidelity(settings, on_disable=self._wake)

    async def start(self) -> None:
        """Learn from the keeper what is disabled, if it answers in time, and stay in step with it."""
        await self._exchange_once(_START_SECONDS)
        self._staying = asyncio.create_task(self._stay_in_step())

    async def _stay_in_step(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._disabled.wait(), _EXCHANGE_SECONDS)
            self._disabled.clear()
            await self._exchange_once(_EXCHANGE_SECONDS)

    async def _exchange_once(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self.monitor.apply(await self._exchange(self.monitor.decisions()))
        except Exception as error:
            if self._in_step:
                words = "the library's keeper does not say which operating points are switched off; trying again: %r"
                logger.warning(words, error)
            self._in_step = False
        else:
            self._in_step = True

    def _wake(self) -> None:
        """Called on the prefill loop's thread."""
        self._events.call_soon_threadsafe(self._disabled.set)
