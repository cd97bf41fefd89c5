"""Deletions that are still owed: contents whose last file or reference goes, and what was derived from them.

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
    """Of a content id and its owner, a tenant or DYNAMIC_TENANT; noted `at`, Unix seconds."""

    content: str
    owner: str
    at: float


class PendingDeletions:
    """Thread-safe; processes may share the tier. All methods raise TierUnavailable."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._objects = JsonObjects(tier, PendingDeletion)

    def note(self, content: str, owner: str) -> None:
        """Before the last holder of the content goes, or one that may be the last."""
        self._objects.write(_key(content, owner), PendingDeletion(content, owner, time.time()))

    def settle(self, content: str, owner: str) -> None:
        """Nothing that derives from the content is left."""
        self._tier.delete(_key(content, owner))

    def settle_held(self, one: PendingDeletion) -> None:
        """Something holds the content still; unless it was noted again since, because that goes as well."""
        if self._objects.read(_key(one.content, one.owner)) == one:
            self.settle(one.content, one.owner)

    def all(self) -> list[PendingDeletion]:
        """What is owed, in no order."""
        return self._objects.find(_ROOT)


def _key(content: str, owner: str) -> str:
    return f"{_ROOT}{tenant_digest(owner)}/{content}.json"
