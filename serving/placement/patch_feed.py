"""Feed of stored patches to ingress replicas.

Prefill replicas log the patches that they form, the library's keeper those that lie in its directory, and ingress
replicas ask both; also whether patches, or sums of them, are disabled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.catalog.index import Entry, FormedLog
from serving.errors import RoleUnavailable

if TYPE_CHECKING:
    from kvstore.library import Library
    from prefill_workers.settings import PatchFormSettings
    from serving.placement.orderer import PatchAwareOrderer

logger = logging.getLogger(__name__)

KEEPER_LIMIT = 1 << 18  # patches that a keeper's feed remembers: as many as the indices of ingress replicas hold


class PatchFeed(NamedTuple):
    """News of one replica since it was last asked; `cursor` is what to ask with next.

    `patches`, `sums`: whether the replica links chunks by patches and by sums of them, as far as it has a say in that.
    """

    replica: str
    cursor: int
    entries: list[Entry]
    patches: bool = True
    sums: bool = True


class PatchFeedSource:
    """One replica's side of the feed: a log of patches, read by cursors.

    Args:
        replica: its name, under which its readers keep their cursors.
        limit: patches that the log remembers.
        patches, sums: whether patches, and sums of them, may be served now.
    """

    def __init__(
        self,
        replica: str,
        limit: int = 1 << 14,
        patches: Callable[[], bool] = lambda: True,
        sums: Callable[[], bool] = lambda: True,
    ) -> None:
        self._replica, self._patches, self._sums = replica, patches, sums
        self._log = FormedLog(limit)

    def add(self, entry: Entry) -> None:
        """Log a patch that is stored now."""
        self._log.add(entry)

    def since(self, cursors: Mapping[str, int]) -> PatchFeed:
        """News since these cursors, of which this replica knows its own by its name."""
        news = self._log.since(cursors.get(self._replica, 0))
        return PatchFeed(self._replica, *news, patches=self._patches(), sums=self._sums())


async def log_stored(library: Library, patch: PatchFormSettings, feed: PatchFeedSource, period_s: float) -> None:
    """Log the patches in a library's directory, whoever stored them, every `period_s`.

    Ends at once where the library has no directory.
    """
    from kvstore.catalog.catalogue import PatchCatalogue
    from prefill_workers.patches.patch_compiler import load_form

    catalogue: PatchCatalogue | None = None
    while library.disk is not None:
        try:
            if catalogue is None:
                form = await asyncio.to_thread(load_form, patch, library)
                catalogue = PatchCatalogue(library.disk, library.fingerprint, form)
            for entry in await asyncio.to_thread(catalogue.look):
                feed.add(entry)
            if catalogue.is_behind:
                continue
        except Exception:
            logger.exception("what the library holds cannot be listed; trying again in %s s", period_s)
        await asyncio.sleep(period_s)


class PatchFeedRoles(Protocol):
    """Roles that feed an ingress."""

    async def formed(self, cursors: Mapping[str, int]) -> list[PatchFeed]:
        """News of every prefill replica and of the library's keeper.

        Raises RoleUnavailable when one does not answer.
        """


async def follow(roles: PatchFeedRoles, orderer: PatchAwareOrderer, period_s: float) -> None:
    """Tell an orderer every `period_s`, for ever, which patches are stored and whether used."""
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
