"""How the ingress learns which patches are stored: prefill replicas log what they form, ingress replicas ask for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ray import serve

from kvstore.index import Entry, FormedLog
from serving.errors import RoleUnavailable

if TYPE_CHECKING:
    from serving.arranger import Arranger

logger = logging.getLogger(__name__)


class Formed(NamedTuple):
    """What one prefill replica has formed since it was last asked; `cursor` is what to ask with next."""

    replica: str
    cursor: int
    entries: list[Entry]


class FormedReplica:
    """A part of `serving.app.PrefillWorker`; `log_formed` comes first."""

    def log_formed(self) -> FormedLog:
        """This replica's log."""
        self._formed = FormedLog()
        return self._formed

    async def formed(self, cursors: Mapping[str, int]) -> Formed:
        """What was formed since these cursors, of which this replica knows its own by its name."""
        name = str(serve.get_replica_context().replica_id.unique_id)
        return Formed(name, *self._formed.since(cursors.get(name, 0)))


class FormedRoles(Protocol):
    """What `follow` needs of the prefill role."""

    async def formed(self, cursors: Mapping[str, int]) -> list[Formed]:
        """What every prefill replica has formed since. Raises RoleUnavailable when one does not answer."""


async def follow(roles: FormedRoles, arranger: Arranger, period_s: float) -> None:
    """Tell an arranger, every so many seconds and for ever, what prefill replicas have formed."""
    cursors: dict[str, int] = {}
    while True:
        try:
            news = await roles.formed(cursors)
            cursors = {one.replica: one.cursor for one in news}
            for one in news:
                arranger.formed(one.entries)
        except RoleUnavailable as error:
            logger.debug("a prefill worker does not say what it formed: %s", error)
        except Exception:
            logger.exception("what prefill workers formed is not known; trying again in %s s", period_s)
        await asyncio.sleep(period_s)
