"""Library keeper: deletion, expiry, idle sessions, stored patches, disabled points."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from autoscale.planner import PlannerKeeper, start_planner
from autoscale.settings import Mode
from prefill_workers.fidelity.disabled_points import DisabledPoints
from serving.config import OrbitServeConfig
from serving.frontend.ray_calls import answers_of_all, has_died
from serving.placement.patch_feed import KEEPER_LIMIT, PatchFeed, PatchFeedSource, log_stored
from serving.replicas.fidelity import FidelityKeeper
from serving.replicas.process import enter, replica_name, replica_states
from serving.scaling.roles import fixed_bundles, planned
from serving.settings import ReplicaRange, RoleSettings

if TYPE_CHECKING:
    from prefill_workers.fidelity.disabled_points import PointDecision
    from prefill_workers.modes import OperatingPoint

logger = logging.getLogger(__name__)

_MARKERS_S = 3600.0  # between two sweeps of markers, for which a store is listed


class LibraryKeeper:
    """Keeper role: deletion, expiry, idle sessions, stored patches, disabled points."""

    async def __init__(  # type: ignore[misc]
        self,
        config: OrbitServeConfig,
        prefill: DeploymentHandle,
        compiler: DeploymentHandle,
        retriever: DeploymentHandle | None = None,
    ) -> None:
        enter(config.keeper)
        from kvstore.library import Library
        from kvstore.uploads.files import FileStore
        from kvstore.uploads.vector_stores import VectorStores
        from prefill_workers.engine.fingerprint import fingerprint

        ingress = DeploymentHandle("Ingress", serve.get_replica_context().app_name)  # not deployed yet
        # Roles that remember what derives from content, each with its replicas that may have it on their node's disk.
        self._holders = [
            (prefill, _number(config.prefill)),
            (compiler, _number(config.patch)),
            (ingress, 0),
        ]
        if retriever is not None:
            self._holders.append((retriever, _number(config.retriever)))
        self._files = FileStore(config.files_url, config.files)
        self._stores = VectorStores(self._files)
        self._undeleted: set[tuple[str, str]] = set()  # content ids and tenants
        model = fingerprint(config.model.path, config.model.load_format)
        self._library = Library(config.library, model)
        self._sessions = config.prefill.sessions
        self._session_bytes = config.prefill.sessions.max_bytes * config.prefill.most_replicas
        self._fidelity = FidelityKeeper(DisabledPoints(config.library.directory, model), prefill)
        self._markers_swept = time.monotonic()
        self._sweeping = asyncio.create_task(self._sweep(config.keeper.sweep_period_s))
        self._feed = PatchFeedSource(replica_name(), KEEPER_LIMIT)
        period_s = config.keeper.catalogue_period_s
        if config.autoscale.mode is not Mode.OFF:
            app_name = serve.get_replica_context().app_name
            start = partial(start_planner, app_name, planned(config), config.autoscale, fixed_bundles(config))
            self._planner = PlannerKeeper(start)
            if config.autoscale.nodes:
                vars(self)["__del__"] = self._withdraw  # Serve awaits an instance's
        self._listing = asyncio.create_task(log_stored(self._library, config.patch, self._feed, period_s))

    async def delete_content(self, content: str, tenant: str) -> int:
        """Remove all that derives from a content id and its parts, in all tiers and memory.

        Returns of how many records it knew. What cannot be reached now is raised, and tried again with every sweep
        until it is gone; also by a later replica, if a file or a vector store held it (see
        `kvstore.uploads.pending_deletions`). So it is while a replica is missing, since on the disk of its node its
        successor would find what it kept, and while one leaves.
        """
        self._undeleted.add((content, tenant))
        went, everywhere = 0, True
        for one in (*await asyncio.to_thread(self._files.parts.of, content, tenant), content):
            removed, reached = await self._delete(one, tenant)
            went, everywhere = went + removed, everywhere and reached
        if everywhere:
            await asyncio.to_thread(self._files.parts.settle, content, tenant)
            await asyncio.to_thread(self._files.pending_deletions.settle, content, tenant)
            self._undeleted.discard((content, tenant))
        return went

    async def _delete(self, content: str, tenant: str) -> tuple[int, bool]:
        """Remove what derives from one content id; returns of how many records, and whether all replicas were reached.

        Raises what keeps it from being removed everywhere.
        """
        everywhere, failures = True, list[Exception]()
        for role, replicas in self._holders:
            answers = await answers_of_all(role, "forget", content, tenant)
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            states = await asyncio.to_thread(replica_states, role.app_name, role.deployment_name)
            expected = _there(states) if replicas is None else replicas
            # A replica that leaves hears no call any more, and its last writes may bring the content back.
            everywhere &= len(answers) - len(failed) >= expected and not states.get("STOPPING")
            failures += failed
        went = await asyncio.to_thread(self._library.delete_content, content, tenant)
        for failure in failures:
            if not has_died(failure):
                raise failure
        return went, everywhere

    async def _sweep(self, period_s: float) -> None:
        """Delete expired files and stores, idle sessions, and what derives from content that nothing holds."""
        while True:
            gone = list(self._undeleted)
            try:
                await asyncio.to_thread(self._files.sweep)
                await asyncio.to_thread(self._stores.sweep)
                gone += await asyncio.to_thread(self._stores.unheld)
            except Exception:
                logger.exception("expired files could not be swept; trying again in %s s", period_s)
            try:
                await asyncio.to_thread(self._sweep_sessions)
            except Exception as error:
                logger.warning("idle sessions are not deleted yet, trying again in %s s: %s", period_s, error)
            if time.monotonic() - self._markers_swept > _MARKERS_S:
                self._markers_swept = time.monotonic()
                try:
                    await asyncio.to_thread(self._library.sweep_markers)
                except Exception as error:
                    logger.warning("markers of deleted records are not swept yet: %s", error)
            for content, tenant in dict.fromkeys(gone):
                try:
                    await self.delete_content(content, tenant)
                except Exception as error:
                    logger.warning("%s is not deleted yet, trying again in %s s: %s", content[:16], period_s, error)
            await asyncio.sleep(period_s)

    def _sweep_sessions(self) -> None:
        from prefill_workers.sessions.sweep import sweep

        swept = sweep(self._library, self._sessions.idle_s, self._session_bytes, time.time())
        if swept.sessions or swept.segments:
            logger.info("swept %d idle sessions, %d segments, %d bytes", swept.sessions, swept.segments, swept.nbytes)

    async def formed(self, cursors: Mapping[str, int]) -> PatchFeed:
        """Patches found in the directory since these cursors; see `serving.placement.patch_feed`."""
        return self._feed.since(cursors)

    async def exchange(self, decisions: Sequence[PointDecision]) -> list[PointDecision]:
        """Take over a prefill replica's decisions about operating points; returns all known ones."""
        return await self._fidelity.exchange(decisions)

    async def allow(self, point: OperatingPoint) -> int:
        """Allow an operating point; returns on how many prefill replicas it was disabled."""
        return await self._fidelity.allow(point)

    async def _withdraw(self) -> None:
        """End the plans, so that nodes may go."""
        await self._planner.end()

    async def alive(self) -> str:
        """This replica's name."""
        return replica_name()

    async def stats(self) -> Any:
        """The library's counters and bytes."""
        return self._library.stats()

    async def check_health(self) -> None:
        """Raise when the sweep has ended."""
        if self._sweeping.done():
            raise RuntimeError("the sweep of expired files has ended")


def _number(settings: RoleSettings) -> int | None:
    """Replicas of a role; None if they follow the load."""
    return None if isinstance(settings.replicas, ReplicaRange) else settings.least_replicas


def _there(states: Mapping[str, int]) -> int:
    """Replicas that Serve keeps of a role, those that are starting included: one may be the successor of a lost one."""
    return sum(count for state, count in states.items() if state != "STOPPING")
