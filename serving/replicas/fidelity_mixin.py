"""What a prefill replica says and hears about fidelity: a part of `serving.replicas.prefill.PrefillWorker`."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from serving.errors import RoleUnavailable
from serving.frontend.ray_roles import answered_by_all

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from prefill_workers.fidelity.disabled_points import DisabledPoints
    from prefill_workers.fidelity.monitor import Fidelity, PointStatus
    from prefill_workers.modes import OperatingPoint
    from prefill_workers.settings import FidelitySettings

logger = logging.getLogger(__name__)

_HEARD_SECONDS = 10.0  # for the other replicas to say what they have switched off: one that hangs holds up no other
_AGAIN_SECONDS = 5.0  # until they are asked again


class FidelityReplica:
    """Methods that every prefill replica answers; `watch_fidelity` comes first."""

    def watch_fidelity(self, settings: FidelitySettings, kept: DisabledPoints | None = None) -> Fidelity:
        """This replica's `Fidelity`. Must be called on the replica's event loop."""
        from prefill_workers.fidelity.monitor import Fidelity

        self._replica_loop = asyncio.get_running_loop()
        self._announcing: set[Future[None]] = set()
        self._fidelity = Fidelity(settings, on_switch_off=self._switched_off, kept=kept)
        return self._fidelity

    async def hear_fidelity(self) -> None:
        """Take over what the other replicas have switched off; to be called before this one serves.

        One that starts where the library's directory is another one (see `prefill_workers.fidelity.disabled_points`)
        would serve at a point that no operator allowed again. Nobody tells it what changes before Serve lists it: so it
        goes on asking until it is listed.
        """
        if not await self._hear():
            self._hearing = asyncio.create_task(self._keep_hearing())

    async def _keep_hearing(self) -> None:
        while not await self._hear():
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _hear(self) -> bool:
        """Ask all replicas that serve. Returns whether all have answered, this one among them."""
        try:
            replicas = self._replicas().broadcast("fidelity")
            answers = await replicas.results_async(timeout_s=_HEARD_SECONDS, return_exceptions=True)
        except DeploymentUnavailableError:
            return False  # none serves yet
        except TimeoutError:
            logger.warning("the other prefill replicas do not say which operating points they have switched off")
            return False
        names: list[str] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.warning("a prefill replica does not say which operating points it has switched off: %s", answer)
                continue
            name, points = answer
            names.append(name)
            self._fidelity.hear(name, points)
        return self._name in names and len(names) == len(answers)

    async def fidelity(self) -> tuple[str, list[PointStatus]]:
        """This replica's name, and what it measured of every approximate operating point."""
        return self._name, self._fidelity.status()

    async def switch_off(self, point: OperatingPoint, reason: str, since: float | None = None) -> None:
        """Serve at an operating point no more until it is allowed again; `since`: see `Fidelity.switch_off`."""
        self._fidelity.switch_off(point, reason, since)

    async def announced(self) -> None:
        """Wait until the other replicas have heard of every point that this one switched off."""
        await asyncio.gather(*map(asyncio.wrap_future, list(self._announcing)), return_exceptions=True)

    async def allow(self, point: OperatingPoint) -> bool:
        """Serve at an operating point again; returns whether it was switched off."""
        return self._fidelity.allow(point)

    @property
    def _name(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    def _replicas(self) -> DeploymentHandle:
        """All replicas of this one's role that serve."""
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, context.app_name)

    def _switched_off(self, point: OperatingPoint, since: float) -> None:
        """Called on the prefill loop's thread: what spoils one replica's answers spoils those of all, as a rule."""
        announcing = asyncio.run_coroutine_threadsafe(self._tell_replicas(point, since), self._replica_loop)
        self._announcing.add(announcing)
        announcing.add_done_callback(self._announcing.discard)

    async def _tell_replicas(self, point: OperatingPoint, since: float) -> None:
        reason = f"its rolling KL passed its bound on prefill replica {self._name}"
        try:
            await answered_by_all(self._replicas(), "switch_off", point, reason, since)
        except RoleUnavailable as error:
            logger.warning("not every prefill replica has switched operating point %s off: %s", point, error)
