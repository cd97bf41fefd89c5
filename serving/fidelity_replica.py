"""What a prefill replica says and hears about fidelity: a part of `serving.app.PrefillWorker`."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ray import serve

from serving.errors import RoleUnavailable
from serving.ray_roles import answered_by_all

if TYPE_CHECKING:
    from prefill_workers.fidelity import Fidelity, PointStatus
    from prefill_workers.policies import OperatingPoint
    from prefill_workers.settings import FidelitySettings
    from prefill_workers.switched_off import SwitchedOff

logger = logging.getLogger(__name__)


class FidelityReplica:
    """Methods that every prefill replica answers; `watch_fidelity` comes first."""

    def watch_fidelity(self, settings: FidelitySettings, kept: SwitchedOff | None = None) -> Fidelity:
        """This replica's `Fidelity`. Must be called on the replica's event loop."""
        from prefill_workers.fidelity import Fidelity

        self._replica_loop = asyncio.get_running_loop()
        self._announcing: set[Future[None]] = set()
        self._fidelity = Fidelity(settings, on_switch_off=self._switched_off, kept=kept)
        return self._fidelity

    async def fidelity(self) -> tuple[str, list[PointStatus]]:
        """This replica's name, and what it measured of every approximate operating point."""
        return self._name, self._fidelity.status()

    async def switch_off(self, point: OperatingPoint, reason: str) -> None:
        """Serve at an operating point no more until it is allowed again."""
        self._fidelity.switch_off(point, reason)

    async def announced(self) -> None:
        """Wait until the other replicas have heard of every point that this one switched off."""
        await asyncio.gather(*map(asyncio.wrap_future, list(self._announcing)), return_exceptions=True)

    async def allow(self, point: OperatingPoint) -> bool:
        """Serve at an operating point again; returns whether it was switched off."""
        return self._fidelity.allow(point)

    @property
    def _name(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    def _switched_off(self, point: OperatingPoint) -> None:
        """Called on the prefill loop's thread: what spoils one replica's answers spoils those of all, as a rule."""
        announcing = asyncio.run_coroutine_threadsafe(self._tell_replicas(point), self._replica_loop)
        self._announcing.add(announcing)
        announcing.add_done_callback(self._announcing.discard)

    async def _tell_replicas(self, point: OperatingPoint) -> None:
        context = serve.get_replica_context()
        replicas = serve.get_deployment_handle(context.deployment, context.app_name)
        reason = f"its rolling KL passed its bound on prefill replica {self._name}"
        try:
            await answered_by_all(replicas, "switch_off", point, reason)
        except RoleUnavailable as error:
            logger.warning("not every prefill replica has switched operating point %s off: %s", point, error)
