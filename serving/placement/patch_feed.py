"""How the ingress learns which patches are stored: prefill replicas log what they form, the library's keeper what lies
in its directory, and ingress replicas ask for both; and whether patches, or their sums, are switched off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ray import serve

from kvstore.catalog.index import Entry, FormedLog
from serving.errors import RoleUnavailable

if TYPE_CHECKING:
    from kvstore.library import Library
    from prefill_workers.settings import PatchFormSettings
    from serving.placement.orderer import PatchAwareOrderer

logger = logging.getLogger(__name__)

_CATALOGUED = 1 << 18  # patches that a keeper remembers for ingress replicas: as many as their indices hold


class PatchFeed(NamedTuple):
    """What one replica has formed or found since it was last asked; `cursor` is what to ask with next.

    `patches`, `sums`: whether it links chunks by patches and by sums of them, as far as it has a say in that.
    """

    replica: str
    cursor: int
    entries: list[Entry]
    patches: bool = True
    sums: bool = True


class PatchFeedReplica:
    """A part of `serving.replicas.prefill.PrefillWorker`; `log_formed` comes first."""

    def log_formed(
        self,
        limit: int = 1 << 14,
        patches: Callable[[], bool] = lambda: True,
        sums: Callable[[], bool] = lambda: True,
    ) -> FormedLog:
        """This replica's log, of so many patches. `patches`, `sums`: whether these are not switched off."""
        self._formed, self._patches, self._sums = FormedLog(limit), patches, sums
        return self._formed

    async def formed(self, cursors: Mapping[str, int]) -> PatchFeed:
        """What was formed since these cursors, of which this replica knows its own by its name."""
        name = str(serve.get_replica_context().replica_id.unique_id)
        news = self._formed.since(cursors.get(name, 0))
        return PatchFeed(name, *news, patches=self._patches(), sums=self._sums())


class KeeperReplica(PatchFeedReplica):
    """A part of `serving.app.LibraryKeeper`: what lies in the library's directory, whoever put it there."""

    def catalogue(self, library: Library, patch: PatchFormSettings, period_s: float) -> asyncio.Task[None]:
        """Begin to look every so many seconds. Must be called on the replica's event loop."""
        self.log_formed(_CATALOGUED)
        return asyncio.create_task(self._look(library, patch, period_s))

    async def _look(self, library: Library, patch: PatchFormSettings, period_s: float) -> None:
        from kvstore.catalog.catalogue import PatchCatalogue
        from prefill_workers.patches.patch_compiler import load_form

        catalogue: PatchCatalogue | None = None
        while library.disk is not None:
            try:
                if catalogue is None:
                    form = await asyncio.to_thread(load_form, patch, library)
                    catalogue = PatchCatalogue(library.disk, library.fingerprint, form)
                for entry in await asyncio.to_thread(catalogue.look):
                    self._formed.add(entry)
                if catalogue.behind:
                    continue
            except Exception:
                logger.exception("what the library holds cannot be listed; trying again in %s s", period_s)
            await asyncio.sleep(period_s)


class PatchFeedRoles(Protocol):
    """What `follow` needs of the roles."""

    async def formed(self, cursors: Mapping[str, int]) -> list[PatchFeed]:
        """What every prefill replica has formed since, and what the library's keeper has found.

        Raises RoleUnavailable when one does not answer.
        """


async def follow(roles: PatchFeedRoles, orderer: PatchAwareOrderer, period_s: float) -> None:
    """Tell an orderer, every so many seconds and for ever, which patches are stored besides, and what uses them."""
    cursors: dict[str, int] = {}
    while True:
        try:
            news = await roles.formed(cursors)
            cursors = {one.replica: one.cursor for one in news}
            orderer.patches_allowed = all(one.patches for one in news)
            orderer.sums_allowed = all(one.sums for one in news)
            for one in news:
                orderer.formed(one.entries)
        except RoleUnavailable as error:
            logger.debug("a replica does not say what it formed or found: %s", error)
        except Exception:
            logger.exception("what is stored by now is not known; trying again in %s s", period_s)
        await asyncio.sleep(period_s)
