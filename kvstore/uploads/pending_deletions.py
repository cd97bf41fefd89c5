"""Journal of pending deletions: contents whose derived records are still to be deleted.

    owed/<owner>/<content>.json      noted before the file or reference goes, taken away when all that derives is gone

So nothing that happens in between, the end of a process included, leaves derived records behind for good.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore.tiers.base import Tier
from kvstore.tiers.paths import tenant_digest
from kvstore.uploads.json_objects import JsonObjects

_ROOT = "owed/"


@dataclass(frozen=True)
class PendingDeletion:
    """A content id and its owner, a tenant or DYNAMIC_TENANT; noted `at`, Unix seconds."""

    content: str
    owner: str
    at: float


class PendingDeletions:
    """Journal of pending deletions in a tier. Thread-safe; processes may share the tier.

    All methods raise TierUnavailable.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._objects = JsonObjects(tier, PendingDeletion)

    def note(self, content: str, owner: str) -> None:
        """Note a content before its last holder goes, or one that may be the last."""
        self._objects.write(_key(content, owner), PendingDeletion(content, owner, time.time()))

    def settle(self, content: str, owner: str) -> None:
        """Remove a content from the journal: nothing that derives from it is left."""
        self._tier.delete(_key(content, owner))

    def settle_held(self, one: PendingDeletion) -> None:
        """Remove a content that is still held, unless it was noted again since."""
        if self._objects.read(_key(one.content, one.owner)) == one:
            self.settle(one.content, one.owner)

    def all(self) -> list[PendingDeletion]:
        """All pending deletions, in no order."""
        return self._objects.find(_ROOT)


def _key(content: str, owner: str) -> str:
    return f"{_ROOT}{tenant_digest(owner)}/{content}.json"
